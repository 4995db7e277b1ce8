"""Compares what torchrun gave a rank with what we gave it: equal, or a difference listed here with its
reason.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]

# Names that a launcher makes up anew each time. They must be there and have this form under both.
_MADE_UP = (
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "{uuid}"),
    (re.compile(r"#\d+ \(deleted\)"), "{a file without a name}"),
    (re.compile(r"torchelastic_[a-z0-9_]{8}"), "torchelastic_{random}"),
    (re.compile(r"(/(?:none|101|4711|job-1|kubeflow|\{uuid\}))_[a-z0-9_]{8}\b"), r"\1_{random}"),
)


class Allowed(NamedTuple):
    """An allowed difference: where, what must still hold of torchrun's value and ours, and the reason."""

    place: str
    holds: Callable[[Any, Any], bool]
    why: str


def _new(theirs: Any, ours: Any) -> bool:
    return theirs is None and ours is not None


ALLOWED = (
    Allowed(
        "environ.MASTER_ADDR",
        lambda theirs, ours: theirs is not None and str(ours).count(".") == 3,
        "the node's address instead of its name: no resolver can come between ranks",
    ),
    Allowed(
        "environ.MASTER_PORT",
        lambda theirs, ours: theirs is not None and (ours == "{port}" or str(ours).isdigit()),
        "every incarnation has a store of its own, on a port of its own",
    ),
    Allowed(
        "environ.TORCHELASTIC_MAX_RESTARTS",
        lambda theirs, ours: (theirs, ours) == ("0", "3"),
        "3 is the default, where torchrun has 0",
    ),
    Allowed(
        "environ.SLURM_*",
        lambda theirs, ours: {theirs, ours} <= {"0", "1"},
        "we keep to --node-rank under c10d too, where torchrun's nodes take ranks in any order",
    ),
    Allowed(
        "environ._",
        lambda theirs, ours: theirs.endswith("/torchrun") and ours.endswith("/aegis-run"),
        "bash's own variable: the program that it has started last",
    ),
    Allowed(
        "environ.LAUNCHER",
        lambda theirs, ours: theirs.replace("torch.distributed.", "aegis_elastic.launch.") == ours,
        "the script's own variable, in which the launcher's name was replaced",
    ),
    Allowed(
        "environ.AEGIS_PROGRESS",
        _new,
        "the folder in which a rank may report its progress (docs/progress.md)",
    ),
    Allowed(
        "descriptors.others",
        lambda theirs, ours: [one for one in ours if "/aegis-progress-" not in one] == theirs,
        "the same",
    ),
    Allowed(
        "modules.*",
        _new,
        "standard modules that our sitecustomize, gone by now, has imported: `_strange` holds that they are",
    ),
    Allowed(
        "parents",
        lambda theirs, ours: len(ours) > len(theirs),
        "the guard stands between launcher and rank; it has the title that traps look for",
    ),
)


def plain(value: Any, replaced: dict[str, str]) -> Any:
    """`value` without what must differ between two runs: their folders, ports, and names made up."""
    if isinstance(value, dict):
        return {key: plain(part, replaced) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part, replaced) for part in value]
    if not isinstance(value, str):
        return value
    for text, name in replaced.items():
        value = value.replace(text, name)
    for pattern, name in _MADE_UP:
        value = pattern.sub(name, value)
    return value


def differences(theirs: Record, ours: Record, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Place to (torchrun's, ours), for all that isn't the same."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*theirs, *ours}):
        place = f"{prefix}{key}"
        left, right = theirs.get(key), ours.get(key)
        if isinstance(left, dict) and isinstance(right, dict) and not prefix:
            found |= differences(left, right, f"{place}.")
        elif left != right:
            found[place] = (left, right)
    return found


def not_allowed(theirs: Record, ours: Record) -> dict[str, tuple[Any, Any]]:
    """The differences that no line of the table allows."""
    return {
        place: pair
        for place, pair in differences(theirs, ours).items()
        if not any(fnmatchcase(place, one.place) and one.holds(*pair) for one in ALLOWED) or _strange(place)
    }


def _strange(place: str) -> bool:
    kind, _, name = place.partition(".")
    return kind == "modules" and name.partition(".")[0] not in sys.stdlib_module_names


def files(folder: Path, replaced: dict[str, str]) -> dict[str, list[str]]:
    """Every file of a log directory with its lines, by its path, without our own folder there."""
    found = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if file.is_file() and "aegis" not in inside.parts:
            lines = file.read_text(errors="replace").splitlines()
            found[plain(f"/{inside}", replaced)] = plain(sorted(lines), replaced)
    return found


def rank_lines(text: str, replaced: dict[str, str], of_rank: Callable[[str], bool]) -> list[str]:
    """The lines of a stream that are the ranks', sorted: ranks write at the same time."""
    return sorted(plain(line, replaced) for line in text.splitlines() if of_rank(line))
