"""Warm spares: next to each running rank one process of its very command, held past its imports.

The keeper decides which spares are wanted and which fit; the guard owns the processes (``guard_spares``),
the gate in them waits (``worker/gate.py``). A spare becomes a rank if its command line is the same and so
is every variable of the environment but the late ones, which it is told at "go". In every other case, and
whenever anything about a spare fails, the rank starts cold, as it would have.

What may be held at all is proven, not assumed: only a command that is a Python interpreter, with options that
leave our sitecustomize alone, and of which a cold start in this job has passed the gate in the very process
that was started. Anything else would run the user's program as a spare. On a node that waits for a seat no
rank has started: there a probe shows it, the same interpreter and options with a program that does nothing.

No thread and no clock of its own: the agent's loop calls ``act`` at ``due_s``.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aegis_elastic.agents.guard.client import GatePassed, GuardClient, RankSpec, SpareGone, SpareReady
from aegis_elastic.worker.gate import LATE
from aegis_elastic.worker.preload import command

logger = logging.getLogger(__name__)

# Ranks have their start for themselves first; then one spare after the other is made.
SETTLE_S = 3.0
HOLD_TIMEOUT_S = 300.0
FAILURES_MAX = 5
# What failed so long ago says nothing of now: a file server was away, or memory was short.
FORGIVEN_S = 3600.0
# Of a node's memory, for its spares: each takes about 0.2 GiB of its own with torch imported.
NODE_BYTES_MIN = 2 << 30
SPARE_BYTES = 512 << 20

_PYTHON = re.compile(r"python(\d+(\.\d+)*[a-z]*)?")
# Options before the script that change nothing about `site`: -E, -I and -S would, and so would -i and -h.
_HARMLESS = re.compile(r"-[bBdOqRsuvxP]+")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def why_not(argv: Sequence[str]) -> str:
    """Why this command can't be held at the gate; "" if it may."""
    start, end = _interpreter(argv)
    if start >= len(argv) or not _is_python(argv[start]):
        program = argv[start] if start < len(argv) else argv[0]
        return f"{os.path.basename(program)} is not a Python interpreter"
    with_value = False
    for option in argv[start + 1 : end]:
        harmless = with_value or option in _WITH_VALUE or _HARMLESS.fullmatch(option)
        if not harmless and not option.startswith(("-W", "-X")):
            return f"Python's option {option} may go past our gate"
        with_value = option in _WITH_VALUE and not with_value
    return "" if command(list(argv[start:]))[0] else "there is no script or module to run"


def _interpreter(argv: Sequence[str]) -> tuple[int, int]:
    """Where the interpreter stands in the command, and the first word that is no option of its."""
    start = 0
    if os.path.basename(argv[0]) == "numactl":
        start = next((place for place in range(1, len(argv)) if not argv[place].startswith("-")), len(argv))
    end = start + 1
    while end < len(argv) and argv[end].startswith("-") and argv[end] not in ("-m", "-c"):
        end += 2 if argv[end] in _WITH_VALUE else 1
    return start, min(end, len(argv))


def probe_of(argv: Sequence[str]) -> tuple[str, ...]:
    """The same interpreter in the same way, with a program that does nothing."""
    return (*argv[: _interpreter(argv)[1]], "-c", "pass")


def _is_python(program: str) -> bool:
    """A binary of that name: a shell script that is called python does things before it is one."""
    path = shutil.which(program)
    if path is None or not _PYTHON.fullmatch(os.path.basename(program)):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def early(env: Mapping[str, str]) -> dict[str, str]:
    """What of a rank's environment its spare starts with."""
    return {key: value for key, value in env.items() if key not in LATE}


def memory_wanted(ranks: int) -> int:
    """How many bytes must be free on the node, so that spares for so many ranks are no risk."""
    return max(NODE_BYTES_MIN, ranks * SPARE_BYTES)


def memory_free(root: Path = Path("/")) -> int:
    """Bytes that processes of ours can still take: the node's, or less where a cgroup (v2) has a limit."""
    free = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    group = root / "sys/fs/cgroup"
    try:
        own = (root / "proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        folder = group / own if (group / own / "memory.max").exists() else group
        limit = (folder / "memory.max").read_text().strip()
        if limit != "max":
            used = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, int(limit) - used + int(stat.get("inactive_file", "0")))
    except (OSError, ValueError):
        return free  # no cgroup v2: the node's memory is all there is to know
    return free


def uses_torch(pid: int) -> bool:
    """Whether a process has torch's libraries in its memory."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return any("/torch/lib/" in line for line in file)
    except OSError:
        return False  # it has ended: the next incarnation shows


@dataclass
class _Spare:
    name: str
    spec: RankSpec
    began_s: float
    held: bool = False


class Spares:
    """The spares of one node. ``mode``: auto (unless memory is short), on, off."""

    def __init__(self, guard: GuardClient, mode: str, free: Callable[[], int] = memory_free) -> None:
        self._guard = guard
        self._on = mode != "off"
        self._careful = mode == "auto"
        self._free = free
        self._names = itertools.count(1)
        self._spares: dict[int, _Spare] = {}  # by local rank
        self._running: dict[int, tuple[RankSpec, int]] = {}  # by local rank: what to make a spare of, its pid
        self._passed: set[int] = set()  # local ranks whose command is known to stop at the gate
        self._generation = -1
        self._without: set[str] = set()
        self._failures = 0
        self._failed_s = 0.0
        self._probe = ""  # the name of the probe, while one is out
        self._expected = False  # what "runs" is only expected to
        self._settled_s = 0.0
        self.due_s: float | None = None

    @property
    def held(self) -> int:
        """How many wait and could go now."""
        return sum(spare.held for spare in self._spares.values())

    def claim(self, specs: Sequence[RankSpec]) -> list[RankSpec]:
        """The ranks to be started, each with the spare that it is to be made of, if one fits. Spares that
        don't fit are ended."""
        if not self._on:
            return list(specs)
        self.ended()
        return [self._claim(spec) for spec in specs]

    @property
    def expecting(self) -> bool:
        """Whether spares are made for ranks that this node has not been asked for yet."""
        return self._expected

    def expect(self, specs: Sequence[RankSpec]) -> None:
        """This node may be asked for such ranks: have them held, if the gate holds such a command."""
        if not self._on or self._failures >= FAILURES_MAX or any(why_not(spec.argv) for spec in specs):
            return
        self._expected = True
        self._running = {spec.local_rank: (spec, 0) for spec in specs}
        self.due_s = self._settled_s = time.monotonic()

    def _claim(self, spec: RankSpec) -> RankSpec:
        spare = self._spares.pop(spec.local_rank, None)
        if spare is not None:
            if spare.held and (spare.spec.argv, spare.spec.env) == (spec.argv, early(spec.env)):
                late = {key: value for key, value in spec.env.items() if key in LATE}
                return spec._replace(spare=spare.name, late=late, gate="pass")
            self._guard.drop(spare.name)
            logger.info("spare of local rank %d ended: %s", spec.local_rank, _difference(spare, spec))
            self._passed.discard(spec.local_rank)
        if spec.local_rank in self._passed:
            return spec
        why = why_not(spec.argv)
        if why:
            logger.info("no warm spare for local rank %d: %s", spec.local_rank, why)
            return spec
        return spec._replace(gate="pass")

    def started(self, generation: int, specs: Sequence[RankSpec], pids: Mapping[int, int]) -> None:
        """These ranks run now: spares for them are wanted in a while."""
        if not self._on:
            return
        self._generation = generation
        if time.monotonic() - self._failed_s >= FORGIVEN_S:
            self._failures = 0
        for spec in specs:
            if spec.spare and spec.local_rank not in self._guard.warm:
                logger.warning("local rank %d started cold: its spare did not go", spec.local_rank)
            self._running[spec.local_rank] = spec, pids[spec.local_rank]
        self.due_s = self._settled_s = time.monotonic() + SETTLE_S

    def on_event(self, event: GatePassed | SpareReady | SpareGone) -> None:
        """Note what the guard says of gates and spares."""
        if isinstance(event, GatePassed):
            if event.generation == self._generation:
                self._passed.add(event.local_rank)
                # an interpreter may take longer to start than the ranks have for themselves
                self.due_s = self.due_s or self._settled_s
            return
        if event.spare == self._probe:
            self._on_probe(event)
            return
        named = [(rank, spare) for rank, spare in self._spares.items() if spare.name == event.spare]
        if not named:
            return  # dropped, or a rank by now
        local_rank, spare = named[0]
        if isinstance(event, SpareReady):
            spare.held = True
            self._failures = 0
            if self.held == len(self._passed & self._running.keys()):
                how = self.held, event.modules, event.seconds
                logger.info("warm spares ready: %d (%d modules in %.1f s)", *how)
        else:
            del self._spares[local_rank]
            self._fail()
            if event.without:
                self._without.add(event.without)
            said = "given up" if self._failures >= FAILURES_MAX else "tried again"
            logger.info("warm spare of local rank %d: %s; %s", local_rank, event.why, said)
        if self._running:
            self.due_s = time.monotonic()

    def _on_probe(self, event: SpareReady | SpareGone) -> None:
        self._guard.drop(self._probe)
        self._probe = ""
        if isinstance(event, SpareReady):
            self._passed |= self._running.keys()
            self.due_s = time.monotonic()
        else:
            logger.info("no warm spares: %s", event.why)
            self._fail()
            self.ended()

    def act(self) -> None:
        """Make the next spare that is missing, one at a time; ``due_s`` says when to call again."""
        self.due_s = None
        if self._probe:
            return
        if self._expected and not self._passed & self._running.keys():
            spec, _ = next(iter(self._running.values()))
            self._probe = f"probe.{next(self._names)}"
            probe = RankSpec(spec.local_rank, probe_of(spec.argv), early(spec.env), "", "", "hold plain")
            self._guard.hold(self._probe, probe)
            return
        for local_rank, spare in list(self._spares.items()):
            if spare.held:
                continue
            if time.monotonic() < spare.began_s + HOLD_TIMEOUT_S:
                self.due_s = spare.began_s + HOLD_TIMEOUT_S
                return
            self._guard.drop(spare.name)
            del self._spares[local_rank]
            self._fail()
            logger.info("warm spare of local rank %d: not ready in %g s", local_rank, HOLD_TIMEOUT_S)
        missing = sorted(self._running.keys() & self._passed - self._spares.keys())
        if not missing or self._failures >= FAILURES_MAX:
            return
        free, wanted = self._free(), memory_wanted(len(missing))
        if self._careful and free < wanted:
            logger.info("no warm spares: %.1f GiB free, want %.1f", free / (1 << 30), wanted / (1 << 30))
            return
        self._hold(missing[0])

    def _hold(self, local_rank: int) -> None:
        spec, pid = self._running[local_rank]
        # of ranks that are yet to run nothing can be seen; that they train is why we are here
        libraries = "torch" if self._expected or uses_torch(pid) else "plain"
        gate = f"hold {libraries} {','.join(sorted(self._without))}".rstrip()
        name = f"{local_rank}.{next(self._names)}"
        held = spec._replace(env=early(spec.env), gate=gate, spare="", late={})
        self._spares[local_rank] = _Spare(name, held, time.monotonic())
        self._guard.hold(name, held)
        self.due_s = time.monotonic() + HOLD_TIMEOUT_S

    def _fail(self) -> None:
        self._failures += 1
        self._failed_s = time.monotonic()

    def ended(self) -> None:
        """The ranks are being stopped: no new spares until the next start."""
        self._running.clear()
        self._expected = False
        self.due_s = None
        if self._probe:
            self._guard.drop(self._probe)
            self._probe = ""

    def moved(self, guard: GuardClient) -> None:
        """A new guard: the spares died with the old one."""
        self._guard = guard
        self._spares.clear()
        self._probe = ""


def _difference(spare: _Spare, spec: RankSpec) -> str:
    if not spare.held:
        return "it was not ready"
    if spare.spec.argv != spec.argv:
        return "the command line is another"
    now = early(spec.env)
    keys = sorted(key for key in spare.spec.env.keys() | now if spare.spec.env.get(key) != now.get(key))
    return f"{', '.join(keys)} changed"
