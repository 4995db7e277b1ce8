"""One rank as its agent sees it from outside: its slot, the state of its process, its stack."""

from __future__ import annotations

import statistics
import time
from collections import deque
from pathlib import Path

from aegis_elastic.agents.watch.slots import CheckpointRecord, OwnWork, SlotReader, WorkSample
from aegis_elastic.core.detection import stacks
from aegis_elastic.core.detection.progress import RankFacts, WindowWork, error_of_usual, usual
from aegis_elastic.core.detection.stacks import Stack

# A window of own work: at least so many iterations, at least so long.
WINDOW_COUNT, WINDOW_S = 5, 0.9
STEPS_KEPT = 64


class RankView:
    """What is known of one rank of one incarnation: `update` reads its slot and /proc, `facts` sums it up."""

    def __init__(self, rank: int, pid: int, slot: Path) -> None:
        """`pid` is what the guard started: the rank, or a wrapper around it. `slot` need not exist yet."""
        self.rank = rank
        self._started_pid = pid
        self._path = slot
        self._reader: SlotReader | None = None
        self._started_s = time.monotonic()
        self._state, self._switches, self._state_since_s = "", 0, self._started_s
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)
        self._samples_read = 0
        self._samples: list[WorkSample] = []
        self._window_s = self._started_s
        self._own_work: WindowWork | None = None
        self._stack: Stack = ()
        self._steady, self._moves = 0, False
        self._last_step = (-1, 0, 0.0)  # step, count, monotonic s of the last
        self._longest_s = 0.0
        self._first_step_s = 0.0
        self._io = (0.0, 0, 0.0)  # when it was read, bytes so far, bytes per second since the time before
        self.ended = False

    @property
    def pid(self) -> int:
        """The process that trains: the one that writes the slot, else the one that was started."""
        writer = self._reader.pid() if self._reader is not None else 0
        return writer if writer and _state(writer) else self._started_pid

    @property
    def step_count(self) -> int:
        """How many steps it has made."""
        return self._last_step[1]

    @property
    def checkpoint(self) -> CheckpointRecord | None:
        """The last checkpoint that its code reported."""
        return self._reader.checkpoint() if self._reader is not None else None

    def idle_s(self, now_s: float) -> float:
        """Seconds since its last step, or since it was started."""
        return max(0.0, now_s - (self._last_step[2] or self._started_s))

    def update(self, now_s: float) -> None:
        """Read its slot and the state of its process. `now_s`: monotonic."""
        if self._reader is None:
            try:
                self._reader = SlotReader(self._path)
            except (OSError, ValueError):
                self._reader = None  # it hasn't started so far, or is no Python with our sitecustomize
        if self._reader is not None:
            self._read(self._reader, now_s)
        state = _state(self.pid)
        self.ended = not _state(self._started_pid)
        # A process that moves much data is in state D every time, but wakes in between; one that hangs there
        # doesn't.
        switches = _switches(self.pid) if state == "D" else 0
        if (state, switches) != (self._state, self._switches):
            self._state, self._switches, self._state_since_s = state, switches, now_s

    def _read(self, reader: SlotReader, now_s: float) -> None:
        hooked, reported = reader.step(), reader.progress()
        step, step_count, last_ns, longest_ns = -1, 0, 0, 0
        first_ns = hooked.first_ns if hooked is not None else 0
        if hooked is not None:
            step, step_count, last_ns, longest_ns = (
                hooked.step,
                hooked.total,
                hooked.last_ns,
                hooked.longest_ns,
            )
        if reported is not None:
            # the step that the training code reports is better than the one that the hooks count
            step, step_count = reported.step, step_count + reported.total
            last_ns = max(last_ns, reported.last_ns)
        before = self._last_step
        if step_count and not before[1]:
            self._first_step_s = max((first_ns or last_ns) / 1e9 - self._started_s, 0.0)
        self._longest_s = max(self._longest_s, longest_ns / 1e9)
        if step_count > before[1]:
            if before[1]:
                # of several steps since the last time only the rank itself knows the pauses
                took_s = (last_ns / 1e9 - before[2]) / (step_count - before[1])
                self._steps.append(took_s)
                if step_count > 3:
                    self._longest_s = max(self._longest_s, took_s)
            self._stack, self._steady, self._moves = (), 0, False
        self._last_step = step, step_count, last_ns / 1e9
        work = reader.own_work(self._samples_read)
        if work is not None and work.total > self._samples_read:
            self._samples_read = work.total
            self._samples += work.samples
        full = len(self._samples) >= WINDOW_COUNT and now_s - self._window_s >= WINDOW_S
        if work is not None and full:
            serial = (self._own_work.serial if self._own_work else 0) + 1
            self._own_work = _window(serial, self._samples, work, reader.groups())
            self._samples, self._window_s = [], now_s

    def on_stack(self, stack: Stack, moves: bool = False) -> None:
        """Take the stack just read, () if it couldn't be. `moves`: a moment later it was another one."""
        elsewhere = bool(stack and self._stack) and stacks.place(stack) != stacks.place(self._stack)
        # A rank that has moved since its last step is at work, however long it stays at one place later; but
        # one that has come to wait for others since then waits.
        working = not stacks.waits(stack)
        self._moves = self._moves or (working and (moves or elsewhere))
        still = bool(stack) and not (moves or elsewhere or (working and self._moves))
        self._steady = self._steady + 1 if still else 0
        self._stack = stack
        now_s, total = time.monotonic(), _io_bytes(self.pid)
        before_s, before, _ = self._io
        rate = max(0.0, (total - before) / (now_s - before_s)) if before_s and total else 0.0
        self._io = now_s, total, rate

    @property
    def stack(self) -> Stack:
        """Its stack when last read, () if it was not read since its last step."""
        return self._stack

    def stopped(self, now_s: float) -> float:
        """How many seconds its process has been in a state in which it can't run; 0 if it can."""
        return now_s - self._state_since_s if self._state in ("T", "Z", "X", "D") else 0.0

    def facts(self, now_s: float) -> RankFacts:
        """The summary for a report. `now_s`: monotonic."""
        step, step_count, _ = self._last_step
        return RankFacts(
            rank=self.rank,
            step=step,
            beats=step_count,
            first_s=round(self._first_step_s, 3),
            idle_s=round(self.idle_s(now_s), 3),
            longest_s=round(self._longest_s, 3),
            step_s=round(statistics.median(self._steps), 4) if self._steps else 0.0,
            state=self._state,
            state_s=round(now_s - self._state_since_s, 3),
            stack=stacks.pack(self._stack),
            steady=self._steady,
            io_bytes_s=round(self._io[2]) if self._steady else 0,
            ended=self.ended,
            own=self._own_work,
        )

    def close(self) -> None:
        """Close its slot."""
        if self._reader is not None:
            self._reader.close()


def _window(serial: int, samples: list[WorkSample], work: OwnWork, groups: tuple[int, ...]) -> WindowWork:
    first = [float(sample.first_us) for sample in samples]
    last = [float(sample.last_us) for sample in samples]
    return WindowWork(
        serial,
        len(samples),
        usual(first),
        usual(last),
        usual([float(sample.step_us) for sample in samples]),
        max(0.0, work.cpu_ns / 1e3),
        groups,
        round(error_of_usual(first), 1),
        round(error_of_usual(last), 1),
        work.timed,
    )


def _io_bytes(pid: int) -> int:
    """Bytes that a process has read and written so far, through whatever system call; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(("rchar:", "wchar:")))
    except (OSError, ValueError):
        return 0  # it is gone, or we may not read it


def _switches(pid: int) -> int:
    """Context switches of a process's main thread so far; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return sum(int(line.split()[1]) for line in file if "ctxt_switches:" in line)
    except (OSError, ValueError):
        return 0  # it is gone


def _state(pid: int) -> str:
    """The kernel's letter for the process's main thread, "" if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the name in parentheses may itself hold spaces and parentheses
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return ""
