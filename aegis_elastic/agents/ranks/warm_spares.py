"""Warm spares: next to each running rank one process of its very command, held past its imports.

`Spares` decides which spares are made and which fit; the guard owns the processes (``guard/held.py``), in
which the gate waits (``worker/gate.py``). A spare becomes a rank if its command line is the same and so is
every variable of the environment but the late ones, which it gets with "go". In every other case, and
whenever anything about a spare fails, the rank starts cold, as it would have.

A command is held only if it was seen to stop at the gate: it must be a Python interpreter, with options that
leave our sitecustomize enabled, and in a cold start in this job the very process that was started must have
passed the gate. Anything else would run the user's program as a spare. On a node that waits without ranks a
probe is started instead: the same interpreter and options with a program that does nothing.

No thread and no timer of its own: the agent's loop calls ``act`` at ``due_s``.
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

# No spare is started so long after the ranks' start, to leave them the machine; then one after the other.
SETTLE_S = 3.0
HOLD_TIMEOUT_S = 300.0
FAILURES_MAX = 5
# Failures before that are forgotten: a file server was down, or memory was short.
FAILURES_FORGOTTEN_S = 3600.0
# Free memory that a node needs for its spares: each uses about 0.2 GiB of its own with torch imported.
NODE_BYTES_MIN = 2 << 30
SPARE_BYTES = 512 << 20

_PYTHON = re.compile(r"python(\d+(\.\d+)*[a-z]*)?")
# Options before the script that don't affect `site`, as -E, -I and -S would; -i and -h aren't safe, either.
_HARMLESS = re.compile(r"-[bBdOqRsuvxP]+")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def unfit_reason(argv: Sequence[str]) -> str:
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
    """The index of the interpreter in the command, and of the first argument that is no option of its."""
    start = 0
    if os.path.basename(argv[0]) == "numactl":
        start = next((index for index in range(1, len(argv)) if not argv[index].startswith("-")), len(argv))
    end = start + 1
    while end < len(argv) and argv[end].startswith("-") and argv[end] not in ("-m", "-c"):
        end += 2 if argv[end] in _WITH_VALUE else 1
    return start, min(end, len(argv))


def probe_command(argv: Sequence[str]) -> tuple[str, ...]:
    """The same interpreter with the same options, and a program that does nothing."""
    return (*argv[: _interpreter(argv)[1]], "-c", "pass")


def _is_python(program: str) -> bool:
    """Whether it is a binary of that name: a shell script called python would run commands before Python."""
    path = shutil.which(program)
    if path is None or not _PYTHON.fullmatch(os.path.basename(program)):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def early_env(env: Mapping[str, str]) -> dict[str, str]:
    """The part of a rank's environment that its spare starts with."""
    return {key: value for key, value in env.items() if key not in LATE}


def memory_needed(ranks: int) -> int:
    """Free bytes that the node needs, so that spares for so many ranks are no risk."""
    return max(NODE_BYTES_MIN, ranks * SPARE_BYTES)


def memory_free(root: Path = Path("/")) -> int:
    """Bytes that our processes can still allocate: the node's, or less where a cgroup (v2) has a limit."""
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
        return free  # no cgroup v2: the node's free memory
    return free


def uses_torch(pid: int) -> bool:
    """Whether a process has torch's libraries loaded."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return any("/torch/lib/" in line for line in file)
    except OSError:
        return False  # it has ended: known in the next incarnation


@dataclass
class _Spare:
    name: str
    spec: RankSpec
    started_s: float
    held: bool = False


class Spares:
    """The warm spares of one node. ``mode``: auto (if there is enough memory), on, off."""

    def __init__(self, guard: GuardClient, mode: str, free: Callable[[], int] = memory_free) -> None:
        self._guard = guard
        self._on = mode != "off"
        self._check_memory = mode == "auto"
        self._free_memory = free
        self._names = itertools.count(1)
        self._spares: dict[int, _Spare] = {}  # by local rank
        # by local rank: what to make a spare of, and the rank's pid
        self._running: dict[int, tuple[RankSpec, int]] = {}
        self._gated: set[int] = set()  # local ranks whose command was seen at the gate
        self._generation = -1
        self._left_out: set[str] = set()
        self._failures = 0
        self._failed_s = 0.0
        self._probe = ""  # the name of the probe while it runs, else ""
        self._expecting = False  # whether `_running` are ranks that may be started later
        self._settled_s = 0.0
        self.due_s: float | None = None

    @property
    def held(self) -> int:
        """How many are ready to become ranks."""
        return sum(spare.held for spare in self._spares.values())

    def claim(self, specs: Sequence[RankSpec]) -> list[RankSpec]:
        """The ranks to be started, each with the spare that is to become it, if one fits. Spares that don't
        fit are ended.
        """
        if not self._on:
            return list(specs)
        self.on_ranks_ended()
        return [self._claim(spec) for spec in specs]

    @property
    def expecting(self) -> bool:
        """Whether spares are made for ranks that this node may get."""
        return self._expecting

    def expect(self, specs: Sequence[RankSpec]) -> None:
        """This node may get such ranks: make spares for them, if the gate holds such a command."""
        if not self._on or self._failures >= FAILURES_MAX or any(unfit_reason(spec.argv) for spec in specs):
            return
        self._expecting = True
        self._running = {spec.local_rank: (spec, 0) for spec in specs}
        self.due_s = self._settled_s = time.monotonic()

    def _claim(self, spec: RankSpec) -> RankSpec:
        spare = self._spares.pop(spec.local_rank, None)
        if spare is not None:
            if spare.held and (spare.spec.argv, spare.spec.env) == (spec.argv, early_env(spec.env)):
                late = {key: value for key, value in spec.env.items() if key in LATE}
                return spec._replace(spare=spare.name, late=late, gate="pass")
            self._guard.drop(spare.name)
            logger.info("spare of local rank %d ended: %s", spec.local_rank, _difference(spare, spec))
            self._gated.discard(spec.local_rank)
        if spec.local_rank in self._gated:
            return spec
        why = unfit_reason(spec.argv)
        if why:
            logger.info("no warm spare for local rank %d: %s", spec.local_rank, why)
            return spec
        return spec._replace(gate="pass")

    def on_ranks_started(self, generation: int, specs: Sequence[RankSpec], pids: Mapping[int, int]) -> None:
        """These ranks have been started: spares for them are made after SETTLE_S."""
        if not self._on:
            return
        self._generation = generation
        if time.monotonic() - self._failed_s >= FAILURES_FORGOTTEN_S:
            self._failures = 0
        for spec in specs:
            if spec.spare and spec.local_rank not in self._guard.warm:
                logger.warning("local rank %d started cold: its spare did not start", spec.local_rank)
            self._running[spec.local_rank] = spec, pids[spec.local_rank]
        self.due_s = self._settled_s = time.monotonic() + SETTLE_S

    def on_event(self, event: GatePassed | SpareReady | SpareGone) -> None:
        """Process an event of the guard about gates and spares."""
        if isinstance(event, GatePassed):
            if event.generation == self._generation:
                self._gated.add(event.local_rank)
                # an interpreter may take longer to start than SETTLE_S
                self.due_s = self.due_s or self._settled_s
            return
        if event.spare == self._probe:
            self._on_probe(event)
            return
        named = [(rank, spare) for rank, spare in self._spares.items() if spare.name == event.spare]
        if not named:
            return  # it was dropped, or is a rank by now
        local_rank, spare = named[0]
        if isinstance(event, SpareReady):
            spare.held = True
            self._failures = 0
            if self.held == len(self._gated & self._running.keys()):
                summary = self.held, event.modules, event.seconds
                logger.info("warm spares ready: %d (%d modules in %.1f s)", *summary)
        else:
            del self._spares[local_rank]
            self._fail()
            if event.without:
                self._left_out.add(event.without)
            next_step = "given up" if self._failures >= FAILURES_MAX else "tried again"
            logger.info("warm spare of local rank %d: %s; %s", local_rank, event.why, next_step)
        if self._running:
            self.due_s = time.monotonic()

    def _on_probe(self, event: SpareReady | SpareGone) -> None:
        self._guard.drop(self._probe)
        self._probe = ""
        if isinstance(event, SpareReady):
            self._gated |= self._running.keys()
            self.due_s = time.monotonic()
        else:
            logger.info("no warm spares: %s", event.why)
            self._fail()
            self.on_ranks_ended()

    def act(self) -> None:
        """Make the next spare that is missing, one at a time; ``due_s`` says when to call again."""
        self.due_s = None
        if self._probe:
            return
        if self._expecting and not self._gated & self._running.keys():
            spec, _ = next(iter(self._running.values()))
            self._probe = f"probe.{next(self._names)}"
            probe = RankSpec(
                spec.local_rank, probe_command(spec.argv), early_env(spec.env), "", "", "hold plain"
            )
            self._guard.hold(self._probe, probe)
            return
        for local_rank, spare in list(self._spares.items()):
            if spare.held:
                continue
            if time.monotonic() < spare.started_s + HOLD_TIMEOUT_S:
                self.due_s = spare.started_s + HOLD_TIMEOUT_S
                return
            self._guard.drop(spare.name)
            del self._spares[local_rank]
            self._fail()
            logger.info("warm spare of local rank %d: not ready in %g s", local_rank, HOLD_TIMEOUT_S)
        missing = sorted(self._running.keys() & self._gated - self._spares.keys())
        if not missing or self._failures >= FAILURES_MAX:
            return
        free, needed = self._free_memory(), memory_needed(len(missing))
        if self._check_memory and free < needed:
            logger.info("no warm spares: %.1f GiB free, want %.1f", free / (1 << 30), needed / (1 << 30))
            return
        self._hold(missing[0])

    def _hold(self, local_rank: int) -> None:
        spec, pid = self._running[local_rank]
        # ranks that don't run yet are taken to use torch
        libraries = "torch" if self._expecting or uses_torch(pid) else "plain"
        gate = f"hold {libraries} {','.join(sorted(self._left_out))}".rstrip()
        name = f"{local_rank}.{next(self._names)}"
        held = spec._replace(env=early_env(spec.env), gate=gate, spare="", late={})
        self._spares[local_rank] = _Spare(name, held, time.monotonic())
        self._guard.hold(name, held)
        self.due_s = time.monotonic() + HOLD_TIMEOUT_S

    def _fail(self) -> None:
        self._failures += 1
        self._failed_s = time.monotonic()

    def on_ranks_ended(self) -> None:
        """The ranks are being stopped: no new spares until the next start."""
        self._running.clear()
        self._expecting = False
        self.due_s = None
        if self._probe:
            self._guard.drop(self._probe)
            self._probe = ""

    def on_new_guard(self, guard: GuardClient) -> None:
        """There is a new guard: the spares ended with the old one."""
        self._guard = guard
        self._spares.clear()
        self._probe = ""


def _difference(spare: _Spare, spec: RankSpec) -> str:
    if not spare.held:
        return "it was not ready"
    if spare.spec.argv != spec.argv:
        return "the command line is another"
    now = early_env(spec.env)
    keys = sorted(key for key in spare.spec.env.keys() | now if spare.spec.env.get(key) != now.get(key))
    return f"{', '.join(keys)} changed"
