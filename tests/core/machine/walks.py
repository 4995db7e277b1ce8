"""Random runs of the machine: any event at any time, biased so that runs also get somewhere.

A walk is a list of small integers, so hypothesis can shrink a failing one to a few events and print it. What
an integer means depends on the status of the moment (a Finish is of the present order, or of an old one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hypothesis import strategies as st

from aegis_elastic.core.accounts.journal import Create, Line, begin, line_of
from aegis_elastic.core.events import (
    Act,
    Error,
    Event,
    Evict,
    Finding,
    Finish,
    Fit,
    Hold,
    Independent,
    Join,
    Lost,
    Mark,
    Noted,
    Offer,
    Progress,
    Quit,
    Reconcile,
    Release,
    Relieve,
    Saved,
    Started,
    Taint,
    Unmark,
    Untaint,
)
from aegis_elastic.core.machine import Transition, step
from aegis_elastic.core.model import CheckResult, Failure, JobSpec, Phase, Status, Verdict, Worker

NAMES = ("w0", "w1", "w2", "w3", "w4")
KINDS = (
    *("forward",) * 8, *("reconcile",) * 4, *("join",) * 3, *("finish",) * 3, *("lost",) * 2, *("error",) * 3,
    "lost_together", *("finding",) * 4, "offer", "started", "independent", "late", "quit",
    "slow", "allow", "saved", "unmark", "act", "fit", "relieve", "taint", "untaint", "hold", "hold",
    "release", "progress", "noted", "boundary", "boundary",
)  # fmt: skip
SCOPES = ("hardware", "node", "network", "slow", "software", "unknown")
CHECKS = ("gpu", "rdma", "io", "runtime", "health", "allreduce_connection")


class Step(NamedTuple):
    """One step of a walk."""

    before: Status
    event: Event
    made: Transition
    now: float


Choice = tuple[int, int, int]
choices = st.tuples(st.integers(0, len(KINDS) - 1), st.integers(0, len(NAMES) - 1), st.integers(0, 11))
# Without the lower bound hypothesis makes lists of about five.
moves = st.lists(choices, min_size=20, max_size=70)


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    """Small jobs of every kind."""
    workers = draw(st.integers(1, 4))
    return JobSpec(
        "job", "default", workers,
        min_worker_num=draw(st.integers(1, workers)),
        max_retry=draw(st.integers(0, 5)),
        recovery_budget=draw(st.integers(1, 4)),
        bootcheck=draw(st.sampled_from(("off", "env", "full"))),
        troubleshoot=draw(st.sampled_from(("adaptive", "full", "off"))),
    )  # fmt: skip


class Walk:
    """A job under arbitrary events, with its journal. Every step takes a second."""

    def __init__(self, spec: JobSpec, walk: list[Choice], start: float = 1000.0) -> None:
        self.now = start
        made = begin(spec, start)
        self.status = made.status
        self.steps: list[Step] = []
        self.lines: list[Line] = [line_of(start, 1, Create(spec), made)]
        for kind, who, how in walk:
            for event in self._events(KINDS[kind], NAMES[who], how):
                self.tell(event)

    def tell(self, event: Event) -> Transition:
        """Give this event to the machine."""
        self.now += 1.0
        made = step(self.status, event, self.now)
        self.steps.append(Step(self.status, event, made, self.now))
        self.lines.append(line_of(self.now, len(self.lines) + 1, event, made))
        self.status = made.status
        return made

    def _events(self, kind: str, name: str, how: int) -> Iterator[Event]:
        s = self.status
        if kind == "forward":
            # Everybody does what is ordered, and the controller has its turns: how runs get somewhere.
            if s.phase is Phase.PENDING and not s.workers:
                yield from (self._join(name, how) for name in NAMES[: s.spec.worker_num])
                yield from (Reconcile() for _ in NAMES)
            if s.phase is Phase.RUN_COMMAND and how < 10:  # a run that succeeds has nothing more to tell
                yield self._one("error", s.workers[how % len(s.workers)], 9)
            else:
                yield from [self._finish(worker, 11) for worker in self.status.workers]
            yield from (Reconcile(), Reconcile())
        elif kind == "boundary" and s.phase is Phase.RUN_COMMAND:
            # All that it takes to evict a node, in an order that leads there.
            worst = s.workers[how % len(s.workers)]
            yield from (Fit(spare.name, spare.uid, how < 9) for spare in s.spares)
            yield Mark(worst.node_name, worst.name, Verdict.SLOW, "behind")
            yield Evict(worst.node_name, "persisted")
            yield from (_OF_NODES["saved"](self, worst, how), Reconcile())
        elif kind == "relieve" and s.phase is Phase.RUN_COMMAND:
            # Likewise, to have a spare take the place of one that fails.
            worst = s.workers[how % len(s.workers)]
            yield from (Fit(spare.name, spare.uid, how < 9) for spare in s.spares)
            yield from (self._one("error", worst, 9), Reconcile())
            yield Relieve(worst.node_name, "failed too often today")
            yield from (self._finish(worker, 11) for worker in self.status.workers)
            yield Reconcile()
        elif kind == "late":
            self.now += 10.0 * 2**how
            yield Reconcile()
        elif kind == "quit":
            yield Quit("asked") if how == 0 else Reconcile()
        elif kind == "lost_together":
            yield Lost(tuple((worker.name, worker.uid) for worker in s.workers[how % 2 :]), "rack")
        else:
            worker = s.worker(name) or next(
                (spare for spare in s.spares if spare.name == name), _nobody(name)
            )
            yield self._one(kind, worker, how)

    def _one(self, kind: str, worker: Worker, how: int) -> Event:
        uid, incarnation, seq_num = self._ids(worker, how)
        if kind == "join":
            return self._join(worker.name, how)
        if kind == "lost":
            return Lost(((worker.name, uid),), "killed")
        if kind == "finish":
            return self._finish(worker, how)
        if kind == "finding":
            scope = SCOPES[how - 6] if how > 5 else "hardware"
            finding = Finding(CHECKS[how % 6], f"{CHECKS[how % 6]}.bad", scope)
            check = CheckResult(finding.check, False, "bad", self.now, 0.5, finding.finding, finding.scope)
            return Finish(
                worker.name,
                worker.uid,
                self.status.incarnation,
                self.status.seq_num,
                (finding,),
                checks=(check,),
            )
        if kind == "error":
            failures = (failure(worker, self.now, exit_code=1),) if how % 2 else ()
            return Error(
                worker.name, uid, incarnation, seq_num, "exit code 1", failures,
                ("network",) * (how % 3 == 0),
                timings_s={"detect_s": 0.01},
            )  # fmt: skip
        if kind == "offer":
            return Offer(worker.name, uid, f"10.0.0.1:{4000 + how}")
        if kind == "started":
            return Started(worker.name, uid, incarnation, {"start_s": 0.1 * how})
        if kind in ("slow", "unmark", "allow", "act"):
            return _of_mark(kind, worker, how)
        if kind in _OF_NODES:
            return _OF_NODES[kind](self, worker, how)
        if kind == "independent":
            failures = (failure(worker, self.now, signal="SIGKILL"),)
            return Independent(worker.name, incarnation, "SIGKILL", failures, ended=how == 11)
        return Reconcile()

    def _ids(self, worker: Worker, how: int) -> tuple[str, int, int]:
        """The identity of a message: mostly current, sometimes of what is over."""
        uid = "nobody" if how == 0 else worker.uid
        return uid, self.status.incarnation - (how == 1), self.status.seq_num - (how == 2)

    def _join(self, name: str, how: int) -> Join:
        known = self.status.worker(name)
        uid = known.uid if how == 3 and known and known.uid else f"{name}/{self.now:g}"
        node = "node-shared" if how in (4, 8, 10) else f"node-{name}-{how == 5}"
        return Join(name, uid, node, "10.0.0.1", 1 + how % 2, how - 6 if how > 6 else -1)

    def _finish(self, worker: Worker, how: int) -> Finish:
        uid, incarnation, seq_num = self._ids(worker, how)
        store = f"10.0.0.1:{seq_num}" if how > 5 else ""
        timings_s = {"stop_s": 0.1, "diagnose_s": 0.01 * how}
        return Finish(worker.name, uid, incarnation, seq_num, store=store, timings_s=timings_s)


def _of_mark(kind: str, worker: Worker, how: int) -> Event:
    verdict = Verdict.SLOW if how < 7 else Verdict.DESYNC
    if kind == "slow":
        return Mark(worker.node_name, worker.name, verdict, f"behind by {how}")
    if kind == "unmark":
        return Unmark(worker.node_name, verdict, "caught up")
    if kind == "allow":
        return Evict(worker.node_name, "persisted")
    return Act(worker.name, "manual" if how == 0 else verdict.value, "persisted")


# Nodes and dependencies are not what most runs are about: some are rarer still than their kind.
_OF_NODES: dict[str, Callable[[Walk, Worker, int], Event]] = {
    "saved": lambda walk, worker, how: Saved(
        walk.status.highest_step + how - 1, f"ckpt/{how}", "dcp", walk.now
    ),
    "fit": lambda walk, worker, how: Fit(worker.name, worker.uid, how > 1, "gpu.slow"),
    "relieve": lambda walk, worker, how: Relieve(worker.node_name, "failed too often today"),
    "taint": lambda walk, worker, how: (
        Taint("node-shared", "bad", "manual", walk.now + 9.0 * how) if how < 3 else Reconcile()
    ),
    "untaint": lambda walk, worker, how: Untaint("node-shared", "repaired"),
    "hold": lambda walk, worker, how: Hold("storage is down", walk.now + 10.0 * how),
    "release": lambda walk, worker, how: Release("storage is back"),
    "progress": lambda walk, worker, how: Progress(10 * how),
    "noted": lambda walk, worker, how: Noted(
        worker.name, worker.node_name, "memory.leak", "12 MB/min", walk.now
    ),
}


def failure(worker: Worker, time: float, exit_code: int | None = None, signal: str | None = None) -> Failure:
    """One rank that failed."""
    return Failure(0, 0, time, exit_code, signal, last_lines=("last words of " + worker.name,))


def _nobody(name: str) -> Worker:
    return Worker(name, "nobody", "node-of-nobody", "10.0.0.1", 1, Phase.PENDING)
