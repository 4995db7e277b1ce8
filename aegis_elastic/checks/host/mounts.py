"""Which file system a path is on, from the mount table only: touching a dead mount would hang."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

MOUNT_TABLE = "/proc/self/mountinfo"
# File systems whose storage many nodes share: their faults aren't a node's.
_SHARED = frozenset(
    {
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "cifs",
        "smb3",
        "afs",
        "glusterfs",
        "orangefs",
        "pvfs2",
        "wekafs",
        "ocfs2",
        "gfs2",
        "panfs",
        "quobyte",
    }
)
_SHARED_FUSE = re.compile(
    r"fuse\.(?!fuse-overlayfs|overlay|squashfuse|lxcfs|portal)"  # these few are this node's own
)
_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """Mount point, the file system's type, and its source ("/dev/nvme0n1p2", "server:/export")."""

    point: str
    fs_type: str
    source: str

    @property
    def shared(self) -> bool:
        """Whether other nodes use the same storage, judged by the type."""
        return self.fs_type in _SHARED or bool(_SHARED_FUSE.match(self.fs_type))


UNKNOWN = Mount("/", "unknown", "unknown")


def table() -> list[Mount]:
    """All mounts that this process sees, in mounting order."""
    with open(MOUNT_TABLE, encoding="utf-8", errors="surrogateescape") as file:
        return parse(file.read().splitlines())


def parse(lines: Sequence[str]) -> list[Mount]:
    """Mounts from the lines of a mountinfo file; a line that isn't one is left out."""
    mounts = []
    for line in lines:
        before, dash, after = line.partition(" - ")
        fields, file_system = before.split(" "), after.split(" ")
        if dash and len(fields) > 4 and len(file_system) > 1:
            mounts.append(Mount(_unescaped(fields[4]), file_system[0], _unescaped(file_system[1])))
    return mounts


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount:
    """The mount that `path` is on by its name; links are not followed."""
    where = os.path.abspath(path)
    best = UNKNOWN
    for mount in mounts:
        inside = where == mount.point or where.startswith(mount.point.rstrip("/") + "/")
        # Of two at the same place the later covers the earlier.
        if inside and (best is UNKNOWN or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
