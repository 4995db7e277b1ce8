"""The report of a job: what happened, by whose fault, what it cost. Built from the journal alone.

`build` follows the journal through `step` (`journal.walk`) and watches what changes. Who was the root of an
incarnation's end is what the machine attributed; every other failure of that incarnation is its consequence.
Times are the master's (the journal's `t`), but a failure's own `time` is the node's and durations are as
measured there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from aegis_elastic.core.accounts.journal import Line, Walked, walk
from aegis_elastic.core.accounts.post_mortem import PostMortem
from aegis_elastic.core.accounts.status_view import WorkerView, worker_views
from aegis_elastic.core.diagnosis.attribution import Role, role_of, signature_of
from aegis_elastic.core.diagnosis.evidence import Conclusion
from aegis_elastic.core.events import Error, Finish, Independent, Join, Lost, Noted, Started
from aegis_elastic.core.model import RECOVERING, CheckResult, ErrorNode, Failure, Phase, Status

AGENT_LOST = "agent lost"
# What desks note of ranks that ended with code 0 and may not have trained to the end.
FALSE_SUCCESS, ENDED_EARLY = "success.false", "rank.ended_early"
DOUBTS = (FALSE_SUCCESS, ENDED_EARLY)
_CONSEQUENCE = Conclusion("", 0, "", "", "")
_CHECKING = {Phase.BOOT_CHECKING: "bootcheck", Phase.TROUBLESHOOTING: "troubleshoot"}
_OUTCOME = {Phase.SUCCEED: "succeeded", Phase.FAILED: "failed"}


class Incarnation(msgspec.Struct, frozen=True, rename="camel"):
    """One start of all training processes; `cause` is what ended it. `ended_at` None: it is running."""

    n: int
    started_at: float
    ended_at: float | None
    cause: str


class FailureEntry(msgspec.Struct, frozen=True, rename="camel"):
    """One process that failed, or (without a rank) an agent that was lost.

    `fault_class` and `level`: what its recovery found and did (a consequence needs none: "", 0); "unknown", 0
    while nothing has been concluded. `reason` ends with the signature of what the process said, where it is
    known, and the root's with what all evidence together came to (`core.diagnosis.evidence`).
    `time`: wall seconds on its node.
    """

    worker: str
    node: str
    rank: int | None
    exit_code: int | None
    signal: str | None
    exception: str | None
    last_lines: tuple[str, ...]
    role: Role
    fault_class: str = msgspec.field(name="class")
    level: int
    reason: str
    time: float


class Recovery(msgspec.Struct, frozen=True):
    """How long one recovery took, in seconds by segment; None where nobody measured it.

    `decide_s`: the master's own time, from the report to the first order and from the last Finish to the
    last. `total_s`: from the death of the process to the start of the last one of the next incarnation.
    """

    detect_s: float | None
    diagnose_s: float | None
    decide_s: float | None
    stop_s: float | None
    rendezvous_s: float | None
    start_s: float | None
    first_step_s: float | None = msgspec.field(name="firstStep_s")
    total_s: float | None


class CheckEntry(msgspec.Struct, frozen=True, rename="camel"):
    """What one check of one worker found, and when: `phase` "bootcheck" or "troubleshoot"."""

    worker: str
    phase: str
    incarnation: int
    check_type: str
    passed: bool = msgspec.field(name="pass")
    result: str
    time_stamp: float
    duration_s: float = msgspec.field(name="duration_s")
    finding: str
    scope: str


class Report(msgspec.Struct, frozen=True, rename="camel"):
    """`report.json`. `outcome`: "succeeded", "failed" or "unfinished".

    `doubts`: why a success may be none, though every rank ended with code 0.
    """

    outcome: str
    phase: str
    fail_reason: str
    max_retry: int
    recover_count: int
    workers: tuple[WorkerView, ...]
    incarnations: tuple[Incarnation, ...]
    failures: tuple[FailureEntry, ...]
    recoveries: tuple[Recovery, ...]
    checks: tuple[CheckEntry, ...]
    error_nodes: tuple[ErrorNode, ...]
    reschedules: int
    summary: str
    doubts: tuple[str, ...] = ()


def build(lines: Iterable[Line], final: Status) -> Report:
    """The report of the job whose journal this is and whose last status is `final`. Raises BadJournal."""
    story = _Story()
    for walked in walk(lines):
        story.follow(walked)
    spec = final.spec
    used = min(final.recover_count, spec.max_retry)
    return Report(
        outcome=_OUTCOME.get(final.phase, "unfinished"),
        phase=final.phase.value,
        fail_reason=final.fail_reason,
        max_retry=spec.max_retry,
        recover_count=final.recover_count,
        workers=worker_views(final),
        incarnations=tuple(
            Incarnation(end.n, end.started_at, end.ended_at, end.cause)
            for end in story.ends.values()
            if end.started_at is not None
        ),
        failures=tuple(entry for end in story.ends.values() for entry in _failures(end)),
        recoveries=tuple(_recovery(mend) for mend in story.mends if mend.ran_at is not None),
        checks=tuple(story.checks),
        error_nodes=final.error_nodes,
        reschedules=final.reschedules,
        summary=(
            f"at most {spec.max_retry} restarts, {used} used; {final.reschedules} reschedules for hardware"
            + _evicted(final)
        ),
        doubts=story.doubts(final),
    )


def _evicted(final: Status) -> str:
    """How often a node left although nothing of it was broken; "" for never."""
    if not final.evictions:
        return ""
    kinds = {"slow": "slowness", "hang": "hangs"}
    why = " and ".join(why for kind, why in kinds.items() if any(n.kind == kind for n in final.error_nodes))
    return f", {final.evictions} for {why or 'slowness'}"


@dataclass
class _Trouble:
    """One worker's part in the end of an incarnation: its Error, or (without failures) its agent's loss."""

    worker: str
    node: str
    t: float
    reason: str
    failures: tuple[Failure, ...] = ()


@dataclass
class _End:
    """An incarnation and all that is known of its end. Number 0 is before any training."""

    n: int
    started_at: float | None = None
    ended_at: float | None = None
    cause: str = ""
    root: str = ""
    errors: dict[str, _Trouble] = field(default_factory=dict)
    losses: dict[str, _Trouble] = field(default_factory=dict)
    verdict: Conclusion | None = None


@dataclass
class _Mend:
    """One recovery, from the fact that ended incarnation `n` to the start of the next one."""

    n: int
    noticed_at: float
    left_at: float
    detect_s: float | None
    timings_s: dict[str, float] = field(default_factory=dict)
    finished_at: float | None = None
    ran_at: float | None = None
    started_at: float | None = None


class _Story:
    """What the journal tells so far."""

    def __init__(self) -> None:
        self.ends: dict[int, _End] = {}
        self.mends: list[_Mend] = []
        self.checks: list[CheckEntry] = []
        self._doubts: list[tuple[int, str]] = []
        self._inquest = PostMortem()
        self._detect_s: dict[tuple[int, str], float] = {}
        self._started: set[tuple[int, str]] = set()

    def follow(self, walked: Walked) -> None:
        line, before, after = walked.line, walked.before, walked.made.status
        if before is not None:
            self._note(walked, before, after)
            concluded = self._inquest.follow(line.event, before, walked.made)
            if concluded is not None:
                self._end(before.incarnation).verdict = concluded
            if before.phase is Phase.RUN_COMMAND and after.phase is not Phase.RUN_COMMAND:
                self._leave_run(line, before, after, walked.made.reason)
            elif walked.made.name == "merged":
                self._close(before.incarnation, line.t, walked.made.reason)
            if after.phase is Phase.FAILED and walked.made.name == "independent_end":
                self._end(before.incarnation).root = before.root
        if after.incarnation > (before.incarnation if before else 0):
            self._end(after.incarnation).started_at = line.t
            if self.mends and self.mends[-1].ran_at is None:
                self.mends[-1].ran_at = line.t

    def doubts(self, final: Status) -> tuple[str, ...]:
        """What is odd about a success: noted in the incarnation with which the job ended."""
        if final.phase is not Phase.SUCCEED:
            return ()
        return tuple(text for incarnation, text in self._doubts if incarnation == final.incarnation)

    def _end(self, n: int) -> _End:
        return self.ends.setdefault(n, _End(n))

    def _close(self, n: int, t: float, cause: str) -> _End:
        end = self._end(n)
        if end.ended_at is None:  # what ended while the plane was away may have been seen to end before
            end.ended_at, end.cause = t, cause
        return end

    def _note(self, walked: Walked, before: Status, after: Status) -> None:
        event, t = walked.line.event, walked.line.t
        if isinstance(event, Error):
            self._error(event, t, before)
            if walked.made.name == "failed":
                self._end(event.incarnation).root = event.worker
        elif isinstance(event, Independent) and walked.made.name == "merged":
            end = self._end(event.incarnation)
            end.root = end.root or event.worker
            end.errors.setdefault(event.worker, self._trouble(event, t, before))
        elif isinstance(event, (Lost, Join)):
            self._losses(before, after, t)
        elif isinstance(event, Finish) and after is not before:
            self._finish(event, t, before)
        elif isinstance(event, Started):
            self._start(event, t)
        elif isinstance(event, Noted) and event.code in DOUBTS:
            self._doubts.append((before.incarnation, f"{event.worker}: {event.detail}"))

    def _trouble(self, event: Error | Independent, t: float, status: Status) -> _Trouble:
        worker = status.worker(event.worker)
        return _Trouble(event.worker, worker.node_name if worker else "", t, event.reason, event.failures)

    def _error(self, event: Error, t: float, before: Status) -> None:
        errors = self._end(event.incarnation).errors
        if event.worker not in errors:  # a repeated report is no second failure
            errors[event.worker] = self._trouble(event, t, before)
            if "detect_s" in event.timings_s:
                self._detect_s[event.incarnation, event.worker] = event.timings_s["detect_s"]

    def _losses(self, before: Status, after: Status, t: float) -> None:
        missed = {worker.name for worker in before.workers if worker.restarted}
        counted = before.phase is Phase.RUN_COMMAND
        reason = AGENT_LOST if counted else f"{AGENT_LOST} in {before.phase.value}: not counted"
        for worker in after.workers:
            if worker.restarted and worker.name not in missed:
                old = before.worker(worker.name)
                node = old.node_name if old else worker.node_name
                losses = self._end(before.incarnation).losses
                losses.setdefault(worker.name, _Trouble(worker.name, node, t, reason))

    def _leave_run(self, line: Line, before: Status, after: Status, reason: str) -> None:
        end = self._close(before.incarnation, line.t, reason)
        missing = [worker.name for worker in before.workers if worker.restarted]
        if missing and not before.should_quit:
            end.root = next((name for name in end.losses if name in missing), missing[0])
        elif after.phase is Phase.TROUBLESHOOTING:
            failed = after.worker(end.root or after.root)
            if failed:
                end.root, why = failed.name, failed.last_failed_reason
                end.cause = f"{failed.name} failed: {why}"
                # Its Error is missing if a master died before it wrote the line and another adopted the job.
                end.errors.setdefault(failed.name, _Trouble(failed.name, failed.node_name, line.t, why))
        if after.phase in RECOVERING:
            trouble = end.losses.get(end.root) or end.errors.get(end.root)
            noticed = trouble.t if trouble else line.t
            detect_s = self._detect_s.get((end.n, end.root))
            self.mends.append(_Mend(end.n, noticed, line.t, detect_s))

    def _finish(self, event: Finish, t: float, before: Status) -> None:
        phase = _CHECKING.get(before.phase)
        if phase:
            self.checks += [_check(event, phase, check) for check in event.checks]
        mend = self.mends[-1] if self.mends else None
        if mend is None or mend.ran_at is not None:
            return
        mend.finished_at = t
        _keep_longest(mend.timings_s, event.timings_s)

    def _start(self, event: Started, t: float) -> None:
        key = (event.incarnation, event.worker)
        mend = next((mend for mend in self.mends if mend.n + 1 == event.incarnation), None)
        if mend is not None and "first_step_s" in event.timings_s:  # told later, and of all ranks at once
            _keep_longest(mend.timings_s, event.timings_s)
            return
        if mend is None or key in self._started:
            return
        self._started.add(key)
        mend.started_at = t
        _keep_longest(mend.timings_s, event.timings_s)


def _keep_longest(timings_s: dict[str, float], more_s: dict[str, float]) -> None:
    """Everybody waits for the slowest worker, so a segment lasts as long as its longest part."""
    for name, seconds in more_s.items():
        timings_s[name] = max(seconds, timings_s.get(name, 0.0))


def _check(event: Finish, phase: str, check: CheckResult) -> CheckEntry:
    return CheckEntry(
        event.worker, phase, event.incarnation, check.check_type, check.passed, check.result,
        check.time_stamp, check.duration_s, check.finding, check.scope,
    )  # fmt: skip


def _recovery(mend: _Mend) -> Recovery:
    ran_at = mend.ran_at if mend.ran_at is not None else mend.left_at
    decide_s = mend.left_at - mend.noticed_at
    if mend.finished_at is not None:
        decide_s += ran_at - mend.finished_at
    over = ran_at if mend.started_at is None else mend.started_at
    first_step_s = mend.timings_s.get("first_step_s")
    return Recovery(
        detect_s=mend.detect_s,
        diagnose_s=mend.timings_s.get("diagnose_s"),
        decide_s=decide_s,
        stop_s=mend.timings_s.get("stop_s"),
        rendezvous_s=mend.timings_s.get("rendezvous_s"),
        start_s=mend.timings_s.get("start_s"),
        first_step_s=first_step_s,
        total_s=(mend.detect_s or 0.0) + over - mend.noticed_at + (first_step_s or 0.0),
    )


def _failures(end: _End) -> list[FailureEntry]:
    """The failures of one incarnation, its root first: exactly one if a failure ended it, else none."""
    troubles = [*end.errors.values()]
    troubles += [loss for loss in end.losses.values() if loss.worker not in end.errors]
    entries: list[FailureEntry] = []
    for trouble in sorted(troubles, key=lambda trouble: (trouble.worker != end.root, trouble.t)):
        ordered = sorted(trouble.failures, key=lambda failure: (role_of(failure) != "root", failure.time))
        for failure in ordered or (None,):
            is_root = trouble.worker == end.root and not entries
            entries.append(_entry(trouble, failure, end.verdict if is_root else _CONSEQUENCE, is_root))
    return entries


def _entry(
    trouble: _Trouble, failure: Failure | None, verdict: Conclusion | None, is_root: bool
) -> FailureEntry:
    signature = signature_of(failure) if failure else None
    told = verdict.reason if verdict else ""
    if signature and signature.fault_class not in told:
        told = "; ".join(filter(None, [f"signature {signature.fault_class}", told]))
    return FailureEntry(
        worker=trouble.worker,
        node=trouble.node,
        rank=failure.rank if failure else None,
        exit_code=failure.exit_code if failure else None,
        signal=failure.signal if failure else None,
        exception=failure.exception if failure else None,
        last_lines=failure.last_lines if failure else (),
        role="root" if is_root else "consequence",
        fault_class=verdict.fault_class if verdict else "unknown",
        level=verdict.level if verdict else 0,
        reason=f"{trouble.reason} ({told})" if told else trouble.reason,
        time=failure.time if failure else trouble.t,
    )
