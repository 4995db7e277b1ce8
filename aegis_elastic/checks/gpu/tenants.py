"""Who else holds memory on a GPU: leftovers of a job that has ended make the next one run out of memory."""

from __future__ import annotations

import os
from collections.abc import Collection

import pynvml

from aegis_elastic.checks.gpu.nvml import Card, Problem, ask

# Less is the context of a monitoring tool, not a training's tensors.
LEFTOVER_BYTES_MIN = 512 << 20
_ANCESTORS_MAX = 64


def leftovers(card: Card, ours: Collection[int], exclusive: bool) -> list[Problem]:
    """Processes with memory on this card that aren't ours.

    Ours are those in `ours` and their descendants. Unless the node is `exclusive` to us, only orphans count:
    training processes whose launcher is gone, or what ended and can't be freed; others may well work here. A
    process that can't be seen from here (a container sees other pids than the driver) is told, not judged.
    """
    problems = []
    unseen = 0
    for process in ask(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, card.handle) or ():
        # The driver doesn't tell the memory of a process on MIG instances, or in some containers.
        used = process.usedGpuMemory or 0
        if used < LEFTOVER_BYTES_MIN:
            continue
        line = ancestry(process.pid)
        if not line:
            unseen += 1
            continue
        orphan = _state(process.pid) in ("Z", "X") or (_is_adopted(line) and _is_rank(process.pid))
        if not set(line).isdisjoint(ours) or not (exclusive or orphan):
            continue
        what = "an orphaned process" if orphan else "a process that is not ours"
        text = f"holds {used >> 20} MiB of {what}, pid {process.pid} ({_name(process.pid)}): end it"
        problems.append(Problem("gpu.leftover", "node", text, "restart"))
    if unseen:
        card.facts["unseen_processes"] = unseen
    return problems


def ancestry(pid: int) -> list[int]:
    """A process, its parent, and so on up to the first process seen from here; [] if it isn't there."""
    line: list[int] = []
    while pid > 0 and len(line) < _ANCESTORS_MAX:
        fields = _stat(pid)
        if not fields:
            break
        line.append(pid)
        pid = int(fields[1])
    return line


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


def _is_adopted(line: list[int]) -> bool:
    """Whether its parent is one that takes up orphans: the first process, or a user's service manager."""
    return line[1:] == [1] or (len(line) > 1 and _name(line[1]) == "systemd")


def _is_rank(pid: int) -> bool:
    """Whether a torchrun-like launcher started it; services belong to the first process by right."""
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


def ours(rank_pids: Collection[int]) -> set[int]:
    """Ranks, and whoever asks for this check: an agent, whose descendants all its processes are."""
    asking = ancestry(os.getppid())  # the checks' process, and who started it
    return {*rank_pids, *asking[:2]} - {1}
