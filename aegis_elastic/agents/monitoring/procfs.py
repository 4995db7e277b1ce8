"""What the ranks of a node use, read from /proc: CPU time, memory, their children, their node.

Files are read directly: psutil makes an object with a dozen checks for every process, which costs ten times
as much, and this runs every second beside a training. What can't be read (a process that has just ended) is
left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

TICKS_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_READ_BYTES = 4096
_RDMA_WORD_BYTES = 4
_UNLIMITED = 1 << 60  # cgroup v1 has a number near 2**63 for "no limit"


class Usage(NamedTuple):
    """Of one rank with all its descendants: CPU time since the last call, memory now. `state` is the rank's
    own, as in /proc/PID/stat.
    """

    cpu_s: float
    memory_bytes: int
    state: str


class Node(NamedTuple):
    """Of the node, or of our cgroup where it has a memory limit. Network without loopback."""

    cpu_s: float
    available_bytes: int
    total_bytes: int
    network_bytes: int


class ProcessTrees:
    """The ranks' process trees, as of the last `rescan`, which reads all of /proc."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """`pids`: of the ranks, by any key."""
        self._roots = dict(pids)
        self._start_times: dict[int, str] = {}  # by root: a reused pid has another start time
        self._ticks: dict[int, int] = {}
        self.members: dict[int, tuple[int, ...]] = {rank: (pid,) for rank, pid in pids.items()}

    def rescan(self) -> None:
        """Find all descendants that live now."""
        children: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                fields = _stat(int(name))
                if fields is not None:
                    children.setdefault(int(fields[1]), []).append(int(name))
        for rank, root in self._roots.items():
            found, queue = [root], [root]
            while queue:
                below = children.get(queue.pop(), [])
                found += below
                queue += below
            self.members[rank] = tuple(found)
        live = {pid for pids in self.members.values() for pid in pids}
        self._ticks = {pid: ticks for pid, ticks in self._ticks.items() if pid in live}

    def usage(self, rank: int) -> Usage | None:
        """What a rank's tree has used since the last call, and its memory; None if the rank has ended."""
        root = self._roots[rank]
        ticks = pages = 0
        state = ""
        for pid in self.members[rank]:
            fields = _stat(pid)
            if fields is None:
                continue
            if pid == root:
                if fields[0] in "ZX" or self._start_times.setdefault(root, fields[19]) != fields[19]:
                    return None
                state = fields[0]
            # own and reaped children's, in user and kernel mode: includes children that ended between two
            # rescans
            so_far = sum(map(int, fields[11:15]))
            ticks += max(so_far - self._ticks.get(pid, so_far), 0)
            self._ticks[pid] = so_far
            pages += _anonymous_pages(pid)
        return Usage(ticks / TICKS_S, pages * PAGE_BYTES, state) if state else None


def _stat(pid: int) -> list[str] | None:
    """The fields after the name (which may contain anything): state first, then the parent."""
    text = _read(f"/proc/{pid}/stat")
    if text is None:
        return None
    return text[text.rfind(b")") + 2 :].decode("ascii", "replace").split()


def _anonymous_pages(pid: int) -> int:
    """Resident pages but those of mapped files, which the kernel can drop at any time."""
    text = _read(f"/proc/{pid}/statm")
    if text is None:
        return 0
    _, resident, shared, *_ = text.split()
    return int(resident) - int(shared)


class NodeReader:
    """Reads the node. What doesn't change (our cgroup's limit, the RDMA ports) is found once."""

    def __init__(self) -> None:
        self._limit = memory_limit()
        self._counters = _rdma_counters()

    def read(self) -> Node:
        """Read the node's values."""
        ticks = sum(map(int, (_read("/proc/stat") or b"cpu 0").split(b"\n", 1)[0].split()[1:4]))
        total = available = 0
        for line in (_read("/proc/meminfo") or b"").splitlines()[:5]:
            if line.startswith(b"MemTotal:"):
                total = int(line.split()[1]) << 10
            elif line.startswith(b"MemAvailable:"):
                available = int(line.split()[1]) << 10
        if self._limit is not None:
            limit, used = (_number(_read(path)) for path in self._limit)
            if limit is not None and used is not None and limit < total:
                total, available = limit, min(available, max(limit - used, 0))
        return Node(ticks / TICKS_S, available, total, self._network_bytes())

    def _network_bytes(self) -> int:
        """Sent and received so far by all interfaces but loopback, and by RDMA ports."""
        total = 0
        for line in (_read("/proc/net/dev", 1 << 16) or b"").splitlines()[2:]:
            name, _, numbers = line.partition(b":")
            fields = numbers.split()
            if name.strip() != b"lo" and len(fields) > 8:
                total += int(fields[0]) + int(fields[8])
        return total + sum(_RDMA_WORD_BYTES * (_number(_read(path)) or 0) for path in self._counters)


def _rdma_counters() -> list[str]:
    """Files that count the data of RDMA ports."""
    base, found = "/sys/class/infiniband", []
    for device in _listed(base):
        for port in _listed(f"{base}/{device}/ports"):
            counters = f"{base}/{device}/ports/{port}/counters"
            found += [f"{counters}/port_xmit_data", f"{counters}/port_rcv_data"]
    return found


def memory_limit() -> tuple[str, str] | None:
    """The files with our cgroup's limit and what it uses, of version 2 or 1; None where there is none."""
    for line in (_read("/proc/self/cgroup") or b"").decode().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            folders = [f"/sys/fs/cgroup{path}", "/sys/fs/cgroup"]
            names = "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folders = [f"/sys/fs/cgroup/memory{path}", "/sys/fs/cgroup/memory"]
            names = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        for folder in folders:
            files = f"{folder}/{names[0]}", f"{folder}/{names[1]}"
            limit = _number(_read(files[0]))
            if limit is not None and limit < _UNLIMITED:
                return files
    return None


def sockets_of(pids: Iterable[int]) -> set[int]:
    """The inodes of all sockets that these processes have open."""
    inodes = set()
    for pid in pids:
        for descriptor in _listed(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue  # closed meanwhile
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
    return inodes


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _number(text: bytes | None) -> int | None:
    return int(text) if text is not None and text.strip().isdigit() else None


def _read(path: str, limit: int = _READ_BYTES) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, limit)
    except OSError:
        return None
    finally:
        os.close(descriptor)
