"""When a checkpoint is complete: one function for each framework, from the frameworks' own sources.

Each finds the paths in a listing that are its framework's own, complete or not, and what is complete there.
In doubt it is not complete: an eviction would go back to the checkpoint before, and lose the steps between.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from aegis_elastic.core.checkpoints.listing import Checkpoint, Found, Listing, base, join, step_of
from aegis_elastic.core.checkpoints.torch_files import (
    METADATA,
    SHARD,
    Whole,
    all_not_empty,
    lacks_one_of_a_set,
    whole_dcp,
)

MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})")
_ZERO_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_SHARD = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_STATES = re.compile(r".*_(optim|model)_states\.pt")
_HF_INCOMPLETE = "checkpoint-is-incomplete.txt"
_ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"
_ORBAX_MARKERS = ("commit_success.txt", "_CHECKPOINT_METADATA")
_NEMO_MARKER = "-unfinished"


# ---------------------------------------------------------------- Megatron


@dataclass(frozen=True)
class Tracker:
    """Megatron's tracker file: `folder` of the newest checkpoint, "" if the content is invalid.

    Megatron exits with code 0 on a tracker that it can't read.
    """

    path: str
    folder: str
    step: int


def megatron_trackers(listing: Listing) -> tuple[Tracker, ...]:
    """Every tracker file in the listing, read as Megatron reads it: a number or "release"."""
    found = []
    for folder, files in listing.folders.items():
        if MEGATRON_TRACKER not in files:
            continue
        path = join(folder, MEGATRON_TRACKER)
        text = listing.text(path)
        if text == "release":
            found.append(Tracker(path, join(folder, text), 0))
        elif re.fullmatch(r"[0-9]{1,15}", text):
            found.append(Tracker(path, join(folder, f"iter_{int(text):07d}"), int(text)))
        else:
            found.append(Tracker(path, "", -1))
    return tuple(found)


def find_megatron(listing: Listing) -> Found:
    """`iter_%07d/` and then the tracker file beside it: what the tracker doesn't name isn't complete.

    With asynchronous saving the order is the same; the tracker comes when the train loop finalises.
    """
    claims = [folder for folder in listing.folders if _ITERATION.fullmatch(base(folder))]
    complete = []
    for tracker in megatron_trackers(listing):
        if not tracker.folder:
            continue
        claims.append(tracker.folder)
        written_ns = listing.files[tracker.path].mtime_ns
        oldest_ns = _megatron_oldest_ns(listing, tracker.folder, written_ns)
        if oldest_ns is not None:
            found = Checkpoint("megatron", tracker.folder, tracker.step, written_ns, oldest_ns)
            complete.append(found)
    return Found(tuple(dict.fromkeys(claims)), tuple(complete))


def _megatron_oldest_ns(listing: Listing, folder: str, tracker_ns: int) -> int | None:
    """The oldest time in a checkpoint that the tracker names; None if it isn't whole."""
    legacy = [join(folder, name) for name in listing.subfolders(folder) if name.startswith("mp_rank_")]
    if legacy:
        if not all(all_not_empty(listing.in_folder(part).values()) for part in legacy):
            return None
        return min(file.mtime_ns for part in legacy for file in listing.in_folder(part).values())
    whole = whole_dcp(listing, folder)
    config = listing.in_folder(folder).get("metadata.json")
    if whole is None or config is None or not _is_json(listing.text(join(folder, "metadata.json"))):
        return None
    # All three are written by rank 0, one after the other.
    return whole.oldest_ns if max(whole.stamp_ns, config.mtime_ns) <= tracker_ns else None


# ---------------------------------------------------------------- DeepSpeed


def find_deepspeed(listing: Listing) -> Found:
    """A folder per tag and a file `latest` that names one. Rank 0 may write `latest` before others are done.

    So every expected shard is checked.
    """
    claims, complete = [], []
    for folder, files in listing.folders.items():
        if any(_STATES.fullmatch(name) for name in files):
            claims.append(folder)
        if "latest" not in files:
            continue
        tag = listing.text(join(folder, "latest"))
        whole = whole_deepspeed(listing, folder)
        if whole is not None:
            complete.append(Checkpoint("deepspeed", join(folder, tag), step_of(tag), *whole))
    return Found(tuple(claims), tuple(complete))


def whole_deepspeed(listing: Listing, folder: str) -> Whole | None:
    """Whether the checkpoint that the file `latest` in this folder names is whole."""
    latest = listing.in_folder(folder).get("latest")
    tag = listing.text(join(folder, "latest"))
    tag_folder = join(folder, tag)
    names = [name for name in listing.in_folder(tag_folder) if _STATES.fullmatch(name)]
    if latest is None or not tag or "/" in tag or not names:
        return None
    if not all(listing.is_whole_zip(join(tag_folder, name)) for name in names):
        return None
    shards = [match for match in map(_ZERO_SHARD.fullmatch, names) if match]
    models = {int(match.group(1)) for match in map(_MODEL_SHARD.fullmatch, names) if match}
    if shards:
        ranks = {(int(match.group(2)), int(match.group(1))) for match in shards}
        all_there = len(shards) == listing.world_size if listing.world_size else _is_grid(ranks)
    else:
        all_there = models == set(range(len(models)))
    if not all_there or not any(name.endswith("_model_states.pt") for name in names):
        return None
    times = [listing.in_folder(tag_folder)[name].mtime_ns for name in names]
    return Whole(max(latest.mtime_ns, *times), min(times))


def _is_grid(ranks: set[tuple[int, int]]) -> bool:
    """Whether these are all pairs up to the highest numbers."""
    rows, columns = max(row for row, _ in ranks) + 1, max(column for _, column in ranks) + 1
    return len(ranks) == rows * columns


# ---------------------------------------------------------------- Hugging Face Trainer


def find_hf(listing: Listing) -> Found:
    """`checkpoint-N/` with trainer_state.json last by rank 0, which doesn't wait for others' rng_state."""
    claims, complete = [], []
    for folder in listing.folders:
        if not re.fullmatch(r"checkpoint-\d+", base(folder)):
            continue
        claims.append(folder)
        whole = _whole_hf(listing, folder)
        if whole is not None:
            complete.append(Checkpoint("hf", folder, step_of(base(folder)), *whole))
    return Found(tuple(claims), tuple(complete))


def _whole_hf(listing: Listing, folder: str) -> Whole | None:
    files = listing.in_folder(folder)
    state = files.get("trainer_state.json")
    if state is None or _HF_INCOMPLETE in files or lacks_one_of_a_set(files):
        return None
    if not listing.text(join(folder, "trainer_state.json")).endswith("}"):
        return None
    rngs = _hf_rngs(files, listing.world_size)
    if not rngs or not all(listing.is_whole_zip(join(folder, name)) for name in rngs):
        return None
    parts = [Whole(file.mtime_ns, file.mtime_ns) for file in (state, *(files[name] for name in rngs))]
    if "latest" in files:
        deepspeed = whole_deepspeed(listing, folder)
        if deepspeed is None:
            return None
        parts.append(deepspeed)
    for name in listing.subfolders(folder):  # FSDP's shards
        inside = listing.in_folder(join(folder, name))
        if METADATA in inside or any(SHARD.fullmatch(file) for file in inside):
            whole = whole_dcp(listing, join(folder, name))
            if whole is None:
                return None
            parts.append(whole)
    return Whole(max(part.stamp_ns for part in parts), min(part.oldest_ns for part in parts))


def _hf_rngs(files: Iterable[str], world_size: int) -> tuple[str, ...]:
    """The names of the expected rng states; () if one of them is missing."""
    there = {name for name in files if re.fullmatch(r"rng_state(_\d+)?\.pth", name)}
    count = world_size or max(len(there), 1)
    wanted = ("rng_state.pth",) if count == 1 else tuple(f"rng_state_{rank}.pth" for rank in range(count))
    return wanted if there.issuperset(wanted) else ()


# ---------------------------------------------------------------- Lightning, NeMo, Orbax


def find_lightning(listing: Listing) -> Found:
    """One `.ckpt`, moved into place; not atomically when the temporary folder is on another file system.

    Sharded strategies make it a folder, whose `meta.pt` comes last.
    """
    claims, complete = [], []
    for path, file in listing.files.items():
        if not path.endswith(".ckpt"):
            continue
        claims.append(path)
        folder = path.rpartition("/")[0]
        # `last.ckpt` repeats what has just been saved under its step's name.
        repeats = (
            base(path).startswith("last")
            and sum(name.endswith(".ckpt") for name in listing.in_folder(folder)) > 1
        )
        if not repeats and listing.is_whole_zip(path):
            step = step_of(base(path)) if not base(path).startswith(("last", "hpc_ckpt")) else -1
            complete.append(Checkpoint("lightning", path, step, file.mtime_ns, file.mtime_ns))
    for folder in listing.folders:
        if folder.endswith(".ckpt"):
            claims.append(folder)
            whole = _whole_lightning_folder(listing, folder)
            if whole is not None:
                complete.append(Checkpoint("lightning", folder, step_of(base(folder)), *whole))
    return Found(tuple(claims), tuple(complete))


def _whole_lightning_folder(listing: Listing, folder: str) -> Whole | None:
    files = listing.in_folder(folder)
    if "latest" in files:
        return whole_deepspeed(listing, folder)
    whole = whole_dcp(listing, folder)
    if whole is None or not listing.is_whole_zip(join(folder, "meta.pt")):
        return None
    last_ns = files["meta.pt"].mtime_ns
    return Whole(max(whole.stamp_ns, last_ns), min(whole.oldest_ns, last_ns))


def find_nemo(listing: Listing) -> Found:
    """NeMo 2: a folder with `weights/`, and beside it `<folder>-unfinished` for as long as it isn't one."""
    claims, complete = [], []
    unfinished = {path.removesuffix(_NEMO_MARKER) for path in listing.files if path.endswith(_NEMO_MARKER)}
    for folder in listing.folders:
        if folder not in unfinished and "weights" not in listing.subfolders(folder):
            continue
        claims.append(folder)
        weights = join(folder, "weights")
        files = listing.below(weights)
        if folder in unfinished or not files:
            continue
        stamp_ns = max(file.mtime_ns for file in files.values())
        whole: Whole | None = Whole(stamp_ns, min(file.mtime_ns for file in files.values()))
        if any(SHARD.fullmatch(name) for name in listing.in_folder(weights)):
            whole = whole_dcp(listing, weights)
        if whole is not None:
            complete.append(Checkpoint("nemo", folder, step_of(base(folder)), *whole))
    return Found(tuple(claims), tuple(complete))


def find_orbax(listing: Listing) -> Found:
    """A folder under a temporary name until it is whole, or with a commit file where names aren't atomic."""
    claims, complete = [], []
    for folder in listing.folders:
        if _ORBAX_TEMPORARY in folder:
            claims.append(folder)
            continue
        marker = next((name for name in _ORBAX_MARKERS if name in listing.in_folder(folder)), None)
        if marker is None:
            continue
        claims.append(folder)
        inside = listing.below(folder)
        if listing.in_folder(folder)[marker].size and not any(_ORBAX_TEMPORARY in path for path in inside):
            times = [file.mtime_ns for file in inside.values()]
            complete.append(Checkpoint("orbax", folder, step_of(base(folder)), max(times), min(times)))
    return Found(tuple(claims), tuple(complete))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
