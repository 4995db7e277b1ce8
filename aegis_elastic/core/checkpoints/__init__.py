"""Whether a checkpoint is complete, by the rules of each framework.

Pure: decided over a `Listing` of files that an agent made; imports nothing else of the package, and no disk
is read. Start with `complete`; the rules are in `frameworks` and `torch_files`, one function a framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aegis_elastic.core.checkpoints.frameworks import (
    Tracker,
    find_deepspeed,
    find_hf,
    find_lightning,
    find_megatron,
    find_nemo,
    find_orbax,
    megatron_trackers,
)
from aegis_elastic.core.checkpoints.listing import Checkpoint, File, Found, Listing, wanted_bytes
from aegis_elastic.core.checkpoints.torch_files import find_dcp, find_titan

__all__ = [
    "AUTO",
    "KINDS",
    "Checkpoint",
    "File",
    "Listing",
    "Memory",
    "Tracker",
    "complete",
    "megatron_trackers",
    "wanted_bytes",
]

AUTO = "auto"
# In the order in which they may claim a path: the frameworks that use another's files come before it.
_RULES: dict[str, Callable[[Listing], Found]] = {
    "hf": find_hf,
    "lightning": find_lightning,
    "nemo": find_nemo,
    "megatron": find_megatron,
    "deepspeed": find_deepspeed,
    "orbax": find_orbax,
    "torchtitan": find_titan,
    "dcp": find_dcp,
}
KINDS = (AUTO, *_RULES)


def complete(kind: str, listing: Listing) -> tuple[Checkpoint, ...]:
    """The complete checkpoints in a listing, by one framework's rule or, with `auto`, each by its own.

    Raises KeyError for a kind that isn't in KINDS.
    """
    if kind != AUTO:
        return _RULES[kind](listing).complete
    claimed: list[str] = []
    found: list[Checkpoint] = []
    for rule in _RULES.values():
        by_rule = rule(listing)
        found += [checkpoint for checkpoint in by_rule.complete if not _is_within(checkpoint.path, claimed)]
        claimed += by_rule.claims
    return tuple(found)


def _is_within(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") or folder == "" for folder in folders)


class SeenCheckpoints:
    """Which of the complete checkpoints are new: each is returned once, and those from before never.

    `floor_ns`: the newest time of any file when the ranks were started. A part that is no newer belongs to an
    earlier checkpoint, however complete the set looks.
    """

    def __init__(self, floor_ns: int = -1) -> None:
        self._floor_ns = floor_ns
        self._stamps: dict[str, int] = {}

    def rebase(self, floor_ns: int) -> None:
        """The ranks restart: what an interrupted save left must not complete the next one."""
        self._floor_ns = max(floor_ns, self._floor_ns)

    def new(self, found: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
        """The checkpoints that were not complete before, in the order of their completion."""
        fresh = []
        for checkpoint in sorted(found, key=lambda one: (one.stamp_ns, one.step)):
            # Saved again at the same path, a part of the old one may look like one of the new.
            floor_ns = max(self._stamps.get(checkpoint.path, -1), self._floor_ns)
            if checkpoint.stamp_ns > floor_ns and checkpoint.oldest_ns > floor_ns:
                self._stamps[checkpoint.path] = checkpoint.stamp_ns
                fresh.append(checkpoint)
        return tuple(fresh)
