"""The hang check: which ranks of this node are stopped, stuck in the kernel or gone, and where the others
are.

A stopped process (SIGSTOP, a debugger) or one that stays in uninterruptible sleep is the finding
`hang.frozen`. A live one is described by its innermost Python frame, and compared with the other ranks of
this node: those that aren't where most are, are named. One sample can't prove a hang, so that is no finding,
and nothing is killed here. py-spy reads the stacks without pausing the process.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from aegis_elastic.checks.contract.child_process import (
    OnStep,
    Outcome,
    Scalar,
    die_with_parent,
    failed,
    passed,
)
from aegis_elastic.checks.contract.request import CheckRequest
from aegis_elastic.checks.host import kernel_log
from aegis_elastic.core.detection import stacks
from aegis_elastic.core.detection.stacks import Frame, Stack

# A process that reads a file is in D state for milliseconds; only one that is in it in every sample is stuck.
D_SAMPLES = 5
D_INTERVAL_S = 0.05
STACK_TIMEOUT_S = 8.0
SAMPLE_INTERVAL_S = 0.07


class _Frame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _Thread(msgspec.Struct):
    """A thread in py-spy's JSON; `frames` has the innermost first."""

    thread_name: str | None
    frames: list[_Frame]


def check(request: CheckRequest, on_step: OnStep) -> Outcome:
    """For every rank: whether it ended, is frozen, or where it is.

    Details: "rank3" as text, "rank3_kernel" with the kernel log's line on one that was killed, "rank3_stack"
    for `core.detection.stacks` to compare across nodes, "rank3_moves" if another of the request's `samples`
    found it elsewhere, and "odd_ranks" and "desync" if ranks of this node differ from most others here.
    """
    details: dict[str, Scalar] = {
        f"rank{rank}": f"ended: {ended.describe()}" for rank, ended in request.exits.items()
    }
    on_step("reading the kernel log on those that ended")
    details |= _kernel(request)
    on_step("reading process states")
    states = _states(request.rank_pids)
    frozen: dict[int, str] = {}
    for rank, state in states.items():
        if state in ("T", "t"):
            frozen[rank] = "is stopped (SIGSTOP or a debugger)"
        elif state == "D":
            frozen[rank] = "is stuck in the kernel (D state)"
        elif state in ("", "Z", "X"):
            details.setdefault(f"rank{rank}", "ended")
    alive = {rank: pid for rank, pid in request.rank_pids.items() if f"rank{rank}" not in details}
    on_step("reading stacks")
    # Reading a process in D state may get stuck, too.
    read = _stacks({rank: pid for rank, pid in alive.items() if states[rank] != "D"})
    known = {rank: stack for rank, stack in read.items() if not isinstance(stack, str)}
    details |= {f"rank{rank}_moves": True for rank in _moving(alive, known, request.samples - 1)}
    for rank in alive:
        where = _where(read.get(rank, ""))
        details[f"rank{rank}"] = " ".join(filter(None, [frozen.get(rank, "runs"), where]))
    details |= {f"rank{rank}_stack": stacks.pack(stack) for rank, stack in known.items() if stack}
    return _conclude(alive, frozen, stacks.compare(known), details)


def _kernel(request: CheckRequest) -> dict[str, Scalar]:
    """The kernel log's lines on ranks that died of a signal: why they were killed, or by which fault they
    died.
    """
    pids = {ended.pid: rank for rank, ended in request.exits.items() if ended.pid and ended.signal}
    if not pids:
        return {}
    try:
        lines = kernel_log.last_line_of(request.kernel_log, pids)
    except OSError:
        return {}  # a container may not read it
    return {f"rank{pids[pid]}_kernel": text for pid, text in lines.items()}


def _conclude(
    alive: Mapping[int, int],
    frozen: Mapping[int, str],
    compared: stacks.Comparison,
    details: dict[str, Scalar],
) -> Outcome:
    odd = compared.describe()
    if odd:
        details["odd_ranks"] = ", ".join(str(rank) for rank in compared.odd)
        details["desync"] = compared.desync
        odd = f"; odd one out: {odd}"
    kernel_texts = "".join(
        f"; {key.removesuffix('_kernel')}: the kernel says: {text}"
        for key, text in details.items()
        if key.endswith("_kernel")
    )
    if not alive:
        return passed(f"hang: no live rank on this node to look at{kernel_texts}", details)
    if frozen:
        text = "; ".join(f"rank {rank} {details[f'rank{rank}']}" for rank in frozen)
        return failed("hang.frozen", "node", f"hang: {text}{odd}", details)
    text = "; ".join(f"rank {rank} {str(details[f'rank{rank}']).removeprefix('runs ')}" for rank in alive)
    return passed(f"hang: {len(alive)} live, none frozen: {text}{odd}", details)


def _moving(alive: Mapping[int, int], known: Mapping[int, Stack], times: int) -> set[int]:
    """Ranks that further samples find elsewhere. Ranks that wait in a collective don't move."""
    moving: set[int] = set()
    with selectors.DefaultSelector() as pause:
        for _ in range(times):
            still = {rank for rank, stack in known.items() if stack and not stacks.waits(stack)} - moving
            if not still:
                break
            pause.select(SAMPLE_INTERVAL_S)  # no event tells when a process moves on: it must be sampled
            for rank, stack in _stacks({rank: alive[rank] for rank in still}).items():
                if not isinstance(stack, str) and stack and stacks.place(stack) != stacks.place(known[rank]):
                    moving.add(rank)
    return moving


def _where(stack: Stack | str) -> str:
    if isinstance(stack, str):
        return stack
    if not stack:
        return "not in Python code"
    top = stack[0]
    return f"at {top.file}:{top.line} ({top.function})"


def _states(rank_pids: dict[int, int]) -> dict[int, str]:
    """The state letter of each rank's process, "" if it is gone; "D" only if every sample has it."""
    states = {rank: _state(pid) for rank, pid in rank_pids.items()}
    with selectors.DefaultSelector() as pause:
        for _ in range(D_SAMPLES - 1):
            asleep = [rank for rank, state in states.items() if state == "D"]
            if not asleep:
                break
            pause.select(D_INTERVAL_S)  # no event tells when a process leaves the kernel: it must be sampled
            states.update({rank: _state(rank_pids[rank]) for rank in asleep})
    return states


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may itself hold spaces and parentheses.
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


class _Reader(NamedTuple):
    rank: int
    process: subprocess.Popen[bytes]


def _stacks(rank_pids: dict[int, int]) -> dict[int, Stack | str]:
    """The stack of every rank's main thread, all read at once, or a text that says why there is none."""
    program = shutil.which(
        "py-spy", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    )
    if program is None:
        return dict.fromkeys(rank_pids, "at an unknown line: py-spy is not installed")
    parent = os.getpid()
    readers = [
        _Reader(
            rank,
            subprocess.Popen(
                [program, "dump", "--nonblocking", "--json", "--pid", str(pid)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  # this child has no threads
            ),
        )
        for rank, pid in rank_pids.items()
    ]
    deadline = time.monotonic() + STACK_TIMEOUT_S
    return {reader.rank: _stack(reader.process, deadline - time.monotonic()) for reader in readers}


def _stack(process: subprocess.Popen[bytes], timeout_s: float) -> Stack | str:
    try:
        output, errors = process.communicate(timeout=max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"at an unknown line: py-spy gave no answer in {STACK_TIMEOUT_S:g} s"
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or ["no message"]
        return f"at an unknown line: py-spy: {lines[0]}"
    return _main_thread(output)


def _main_thread(dump: bytes) -> Stack | str:
    try:
        threads = msgspec.json.decode(dump, type=list[_Thread])
    except msgspec.DecodeError as error:
        return f"at an unknown line: py-spy said something unexpected ({error})"
    main = next(
        (each for each in threads if each.thread_name == "MainThread"), threads[0] if threads else None
    )
    return tuple(Frame(each.name, each.filename, each.line) for each in main.frames) if main else ()
