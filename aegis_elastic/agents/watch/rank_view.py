"""One rank as its agent sees it from outside: its slot, the state of its process, where it stands."""

from __future__ import annotations

import statistics
import time
from collections import deque
from pathlib import Path

from aegis_elastic.agents.watch.slots import Sample, Save, SlotReader, Work
from aegis_elastic.core.detection import stacks
from aegis_elastic.core.detection.progress import Own, RankFacts, error_of_usual, usual
from aegis_elastic.core.detection.stacks import Stack

# A window of own work: at least so many iterations, at least so long.
WINDOW_COUNT, WINDOW_S = 5, 0.9
STEPS = 64


class RankView:
    """What is known of one rank of one incarnation. `look` looks again; `facts` says it."""

    def __init__(self, rank: int, pid: int, slot: Path) -> None:
        """`pid` is what the guard started: the rank, or a wrapper around it. `slot` may come into being."""
        self.rank = rank
        self._started_pid = pid
        self._path = slot
        self._reader: SlotReader | None = None
        self._began_s = time.monotonic()
        self._state, self._switches, self._state_since_s = "", 0, self._began_s
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._taken = 0
        self._samples: list[Sample] = []
        self._window_s = self._began_s
        self._own: Own | None = None
        self._stack: Stack = ()
        self._steady, self._moved = 0, False
        self._beat = (-1, 0, 0.0)  # step, beats, monotonic s of the last
        self._said_longest_s = 0.0
        self._first_s = 0.0
        self._io = (0.0, 0, 0.0)  # when it was read, bytes so far, bytes a second since the look before
        self.ended = False

    @property
    def pid(self) -> int:
        """The process that trains, as far as it has shown itself."""
        writer = self._reader.pid() if self._reader is not None else 0
        return writer if writer and _state(writer) else self._started_pid

    @property
    def beats(self) -> int:
        """How many steps it has told of."""
        return self._beat[1]

    @property
    def save(self) -> Save | None:
        """The last checkpoint that its code told of."""
        return self._reader.save() if self._reader is not None else None

    def idle_s(self, now_s: float) -> float:
        """Seconds since its last step, or since it was started."""
        return max(0.0, now_s - (self._beat[2] or self._began_s))

    def look(self, now_s: float) -> None:
        """Look at its slot and its process (monotonic seconds)."""
        if self._reader is None:
            try:
                self._reader = SlotReader(self._path)
            except (OSError, ValueError):
                self._reader = None  # it hasn't come so far, or is no Python with our site
        if self._reader is not None:
            self._read(self._reader, now_s)
        state = _state(self.pid)
        self.ended = not _state(self._started_pid)
        # Who moves much data is in the kernel at every look, but wakes in between; who is held there doesn't.
        switches = _switches(self.pid) if state == "D" else 0
        if (state, switches) != (self._state, self._switches):
            self._state, self._switches, self._state_since_s = state, switches, now_s

    def _read(self, reader: SlotReader, now_s: float) -> None:
        beat, call = reader.beat(), reader.call()
        step, beats, last_ns, longest_ns = -1, 0, 0, 0
        first_ns = beat.first_ns if beat is not None else 0
        if beat is not None:
            step, beats, last_ns, longest_ns = beat.step, beat.beats, beat.last_ns, beat.longest_ns
        if call is not None:
            # who says its step knows better than we do
            step, beats, last_ns = call.step, beats + call.calls, max(last_ns, call.last_ns)
        before = self._beat
        if beats and not before[1]:
            self._first_s = max((first_ns or last_ns) / 1e9 - self._began_s, 0.0)
        self._said_longest_s = max(self._said_longest_s, longest_ns / 1e9)
        if beats > before[1]:
            if before[1]:
                # of several steps since the last look the pauses are told by the rank itself, if by anyone
                took_s = (last_ns / 1e9 - before[2]) / (beats - before[1])
                self._steps.append(took_s)
                if beats > 3:
                    self._said_longest_s = max(self._said_longest_s, took_s)
            self._stack, self._steady, self._moved = (), 0, False
        self._beat = step, beats, last_ns / 1e9
        work = reader.work(self._taken)
        if work is not None and work.total > self._taken:
            self._taken = work.total
            self._samples += work.samples
        full = len(self._samples) >= WINDOW_COUNT and now_s - self._window_s >= WINDOW_S
        if work is not None and full:
            serial = (self._own.serial if self._own else 0) + 1
            self._own = _window(serial, self._samples, work, reader.groups())
            self._samples, self._window_s = [], now_s

    def stands(self, stack: Stack, moves: bool = False) -> None:
        """One more look found it there; () if its stack couldn't be read. `moves`: elsewhere a moment
        later.
        """
        elsewhere = bool(stack and self._stack) and stacks.place(stack) != stacks.place(self._stack)
        # Who has moved since the last step is at work, however long it stands at one place later; but who has
        # come to wait for others since then waits.
        working = not stacks.waits(stack)
        self._moved = self._moved or (working and (moves or elsewhere))
        still = bool(stack) and not (moves or elsewhere or (working and self._moved))
        self._steady = self._steady + 1 if still else 0
        self._stack = stack
        now_s, total = time.monotonic(), _io_bytes(self.pid)
        before_s, before, _ = self._io
        rate = max(0.0, (total - before) / (now_s - before_s)) if before_s and total else 0.0
        self._io = now_s, total, rate

    @property
    def stack(self) -> Stack:
        """Where it stood at the last look, () if nobody had reason to look since its last step."""
        return self._stack

    def stopped(self, now_s: float) -> float:
        """How many seconds its process has been in a state in which it can't run; 0 if it can."""
        return now_s - self._state_since_s if self._state in ("T", "Z", "X", "D") else 0.0

    def facts(self, now_s: float) -> RankFacts:
        """All of it, for a report."""
        step, beats, _ = self._beat
        return RankFacts(
            rank=self.rank,
            step=step,
            beats=beats,
            first_s=round(self._first_s, 3),
            idle_s=round(self.idle_s(now_s), 3),
            longest_s=round(self._said_longest_s, 3),
            step_s=round(statistics.median(self._steps), 4) if self._steps else 0.0,
            state=self._state,
            state_s=round(now_s - self._state_since_s, 3),
            stack=stacks.pack(self._stack),
            steady=self._steady,
            io_bytes_s=round(self._io[2]) if self._steady else 0,
            ended=self.ended,
            own=self._own,
        )

    def close(self) -> None:
        """Let go of its slot."""
        if self._reader is not None:
            self._reader.close()


def _window(serial: int, samples: list[Sample], work: Work, groups: tuple[int, ...]) -> Own:
    first = [float(sample.first_us) for sample in samples]
    last = [float(sample.last_us) for sample in samples]
    return Own(
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
    """What a process has read and written so far, through whatever system call; 0 if nobody says."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(("rchar:", "wchar:")))
    except (OSError, ValueError):
        return 0  # it is gone, or the kernel lets nobody know


def _switches(pid: int) -> int:
    """How often a process's main thread has gone to sleep or was put to it; 0 if nobody says."""
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
