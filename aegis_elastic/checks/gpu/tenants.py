"""Probe of memory that other processes hold on a GPU, such as leftovers of a job that has ended."""

from __future__ import annotations

import os
from collections.abc import Collection

import pynvml

from aegis_elastic.checks.gpu.nvml import Card, Problem, query

# Less is the context of a monitoring tool, not tensors of a training.
LEFTOVER_BYTES_MIN = 512 << 20
_ANCESTORS_MAX = 64


def leftovers(card: Card, own_pids: Collection[int], exclusive: bool) -> list[Problem]:
    """Processes with memory on this GPU that aren't ours.

    Ours are those in `own_pids` and their descendants. Unless the node is `exclusive` to us, only orphans
    count: training processes whose launcher is gone, or zombies; others may be at work here. A process that
    can't be seen from here (a container sees other pids than the driver) is counted, not judged.
    """
    problems = []
    unseen = 0
    for process in query(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, card.handle) or ():
        # The driver doesn't report the memory of a process on MIG instances, or in some containers.
        used = process.usedGpuMemory or 0
        if used < LEFTOVER_BYTES_MIN:
            continue
        ancestors = ancestry(process.pid)
        if not ancestors:
            unseen += 1
            continue
        orphan = _state(process.pid) in ("Z", "X") or (_is_adopted(ancestors) and _is_rank(process.pid))
        if not set(ancestors).isdisjoint(own_pids) or not (exclusive or orphan):
            continue
        owner = "an orphaned process" if orphan else "a process that is not ours"
        text = f"holds {used >> 20} MiB of {owner}, pid {process.pid} ({_name(process.pid)}): end it"
        problems.append(Problem("gpu.leftover", "node", text, "restart"))
    if unseen:
        card.facts["unseen_processes"] = unseen
    return problems


def ancestry(pid: int) -> list[int]:
    """A process, its parent, and so on up to the first process seen from here; [] if it isn't there."""
    ancestors: list[int] = []
    while pid > 0 and len(ancestors) < _ANCESTORS_MAX:
        fields = _stat(pid)
        if not fields:
            break
        ancestors.append(pid)
        pid = int(fields[1])
    return ancestors


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else "X"


def _stat(pid: int) -> list[str]:
    """State, parent, ... of a process; [] if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may itself hold spaces and parentheses.
            return file.read().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _is_adopted(ancestors: list[int]) -> bool:
    """Whether its parent adopts orphans: process 1, or a user's service manager."""
    return ancestors[1:] == [1] or (len(ancestors) > 1 and _name(ancestors[1]) == "systemd")


def _is_rank(pid: int) -> bool:
    """Whether a torchrun-like launcher started it: services, too, are children of process 1."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(entry.startswith(b"LOCAL_RANK=") for entry in file.read().split(b"\0"))
    except OSError:
        return False  # another user's, or gone


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "gone"


def own_pids(rank_pids: Collection[int]) -> set[int]:
    """The ranks, the checks' process, and the agent that started it, with all its descendants."""
    requesters = ancestry(os.getppid())  # the checks' process, and its parent
    return {*rank_pids, *requesters[:2]} - {1}
