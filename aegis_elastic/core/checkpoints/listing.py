"""A listing of a folder of checkpoints, as a value: sizes, times, and the ends of the files that matter.

All rules for complete checkpoints decide over a listing; `agents.checkpoints.lister` makes it from the file
system. Paths are relative to the folder, with "/", whatever the system's separator is.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

MIB = 1 << 20
# How much of a file's end the rules need. Trackers are a few bytes; `.metadata` and an index name shards.
_WANTED: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"(.*/)?(latest_checkpointed_iteration\.txt|latest|metadata\.json)"), 4096),
    (re.compile(r"(.*/)?(\.metadata|[^/]*\.index\.json)"), 8 * MIB),
    (re.compile(r"(.*/)?trainer_state\.json"), 64),
    (re.compile(r".*\.(ckpt|pt|pth)"), 128),
)
# The end of a zip: (mark, disks and entries, bytes and offset of the directory, bytes of a comment).
_ZIP_END = struct.Struct("<4s4HIIH")
_ZIP64_END = struct.Struct("<4sQHHIIQQQQ")
_ZIP64_POINTER_BYTES = 20


class File(NamedTuple):
    """A file's size in bytes and the time of its last change, by the clock of its file system."""

    size: int
    mtime_ns: int


def wanted_bytes(path: str) -> int:
    """How many of this file's last bytes the rules need; 0: its size and time are enough."""
    return next((count for pattern, count in _WANTED if pattern.fullmatch(path)), 0)


@dataclass(frozen=True)
class Listing:
    """The files below a folder at one time.

    `ends`: the last `wanted_bytes` of those files. `world_size`: ranks of the training, 0 if unknown.
    """

    files: Mapping[str, File]
    ends: Mapping[str, bytes] = field(default_factory=dict)
    world_size: int = 0

    @cached_property
    def folders(self) -> dict[str, dict[str, File]]:
        """Folder -> the files directly in it by name; "" is the top. Folders above files are there, too."""
        found: dict[str, dict[str, File]] = {"": {}}
        for path, file in self.files.items():
            folder, _, name = path.rpartition("/")
            found.setdefault(folder, {})[name] = file
            while folder:
                folder = folder.rpartition("/")[0]
                found.setdefault(folder, {})
        return found

    @cached_property
    def _subfolders(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for folder in sorted(self.folders):
            if folder:
                above, _, name = folder.rpartition("/")
                found.setdefault(above, []).append(name)
        return {folder: tuple(names) for folder, names in found.items()}

    def in_folder(self, folder: str) -> dict[str, File]:
        """The files directly in a folder, by name; {} if it isn't there."""
        return self.folders.get(folder, {})

    def subfolders(self, folder: str) -> tuple[str, ...]:
        """The names of the folders directly in a folder."""
        return self._subfolders.get(folder, ())

    def below(self, folder: str) -> dict[str, File]:
        """All files below a folder, by their path from the top."""
        inside: dict[str, File] = {}
        todo = [folder]
        while todo:
            here = todo.pop()
            inside |= {join(here, name): file for name, file in self.in_folder(here).items()}
            todo += [join(here, name) for name in self.subfolders(here)]
        return inside

    def text(self, path: str) -> str:
        """The content of a small file, stripped; "" if it isn't there or isn't text."""
        return self.ends.get(path, b"").decode("utf-8", errors="replace").strip()

    def is_whole_zip(self, path: str) -> bool:
        """Whether this file, as torch.save writes it, is there to its end."""
        file = self.files.get(path)
        return file is not None and is_zip_of(file.size, self.ends.get(path, b""))


class Checkpoint(NamedTuple):
    """A complete checkpoint. `path` from the top of the listing; `step` -1 if its name has none.

    `stamp_ns` is the time of its newest part, `oldest_ns` of its oldest: a part older than the last
    completion at the same path belongs to that one.
    """

    kind: str
    path: str
    step: int
    stamp_ns: int
    oldest_ns: int


class Found(NamedTuple):
    """The result of a framework's rule: the paths that are its own, and the complete checkpoints there."""

    claims: tuple[str, ...]
    complete: tuple[Checkpoint, ...]


def is_zip_of(size: int, end: bytes) -> bool:
    """Whether these are the last bytes of a whole zip of that size, by its own end records.

    A file that is still being copied has another size than they say, however far the copy is.
    """
    if len(end) < _ZIP_END.size:
        return False
    mark, _, _, _, _, length, offset, comment = _ZIP_END.unpack(end[-_ZIP_END.size :])
    if mark != b"PK\x05\x06" or comment:
        return False
    after = _ZIP_END.size
    if 0xFFFFFFFF in (length, offset):  # larger than 4 GiB: another record says so, before a pointer to it
        after += _ZIP64_POINTER_BYTES + _ZIP64_END.size
        if len(end) < after:
            return False
        mark, *_, length, offset = _ZIP64_END.unpack(end[-after : -after + _ZIP64_END.size])
        return bool(mark == b"PK\x06\x06") and offset + length + after == size
    both = after + _ZIP64_POINTER_BYTES + _ZIP64_END.size  # which torch writes for small ones, too
    return offset + length in (size - after, size - both)


def join(folder: str, name: str) -> str:
    """The path of a name in a folder ("" is the top)."""
    return f"{folder}/{name}" if folder else name


def base(path: str) -> str:
    """The last part of a path."""
    return path.rpartition("/")[2]


def step_of(name: str) -> int:
    """The step in a name: after "step=" or "step-", else its last number; -1: none."""
    named = re.search(r"step[=_-]?(\d+)", name)
    numbers = re.findall(r"\d+", name)
    text = named.group(1) if named else numbers[-1] if numbers else "-1"
    return int(text) if len(text) <= 15 else -1
