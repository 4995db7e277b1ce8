"""The job report: what happened, the root causes, the cost. Built from the journal alone.

`build` replays the journal through `step` (`journal.walk`) and records what changes. The root of an
incarnation's end is the one that the machine attributed; all other failures of it are its consequences.
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
# Notes of controllers about ranks that ended with code 0 and may not have trained to the end.
FALSE_SUCCESS, ENDED_EARLY = "success.false", "rank.ended_early"
DOUBTS = (FALSE_SUCCESS, ENDED_EARLY)
_CONSEQUENCE = Conclusion("", 0, "", "", "")
_CHECKING = {Phase.BOOT_CHECKING: "bootcheck", Phase.TROUBLESHOOTING: "troubleshoot"}
_OUTCOME = {Phase.SUCCEED: "succeeded", Phase.FAILED: "failed"}


class Incarnation(msgspec.Struct, frozen=True, rename="camel"):
    """One start of training; `cause` is what ended it. `ended_at` None: it is running."""

    n: int
    started_at: float
    ended_at: float | None
    cause: str


class FailureEntry(msgspec.Struct, frozen=True, rename="camel"):
    """One process that failed, or (without a rank) an agent that was lost.

    `fault_class` and `level`: what its recovery found and did (a consequence has none: "", 0); "unknown", 0
    before the conclusion. `reason` ends with the signature of the process's output, where it is known, and
    the root's with the conclusion from all evidence (`core.diagnosis.evidence`).
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
    """How long one recovery took, in seconds by segment; None where it wasn't measured.

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

    `doubts`: why a success may be false, though every rank ended with code 0.
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
    timeline = _Timeline()
    for walked in walk(lines):
        timeline.follow(walked)
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
            for end in timeline.ends.values()
            if end.started_at is not None
        ),
        failures=tuple(entry for end in timeline.ends.values() for entry in _failures(end)),
        recoveries=tuple(_recovery(times) for times in timeline.recovery_times if times.ran_at is not None),
        checks=tuple(timeline.checks),
        error_nodes=final.error_nodes,
        reschedules=final.reschedules,
        summary=(
            f"at most {spec.max_retry} restarts, {used} used; {final.reschedules} reschedules for hardware"
            + _evicted(final)
        ),
        doubts=timeline.doubts(final),
    )


def _evicted(final: Status) -> str:
    """How often a node left although nothing of it was broken; "" for never."""
    if not final.evictions:
        return ""
    kinds = {"slow": "slowness", "hang": "hangs"}
    why = " and ".join(why for kind, why in kinds.items() if any(n.kind == kind for n in final.error_nodes))
    return f", {final.evictions} for {why or 'slowness'}"


@dataclass
class _WorkerFailure:
    """One worker's failure in an incarnation: its Error, or (without failures) its agent's loss."""

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
    errors: dict[str, _WorkerFailure] = field(default_factory=dict)
    losses: dict[str, _WorkerFailure] = field(default_factory=dict)
    conclusion: Conclusion | None = None


@dataclass
class _RecoveryTimes:
    """One recovery, from the fact that ended incarnation `n` to the start of the next one."""

    n: int
    noticed_at: float
    left_at: float
    detect_s: float | None
    timings_s: dict[str, float] = field(default_factory=dict)
    finished_at: float | None = None
    ran_at: float | None = None
    started_at: float | None = None


class _Timeline:
    """What the journal has shown so far."""

    def __init__(self) -> None:
        self.ends: dict[int, _End] = {}
        self.recovery_times: list[_RecoveryTimes] = []
        self.checks: list[CheckEntry] = []
        self._doubts: list[tuple[int, str]] = []
        self._post_mortem = PostMortem()
        self._detect_s: dict[tuple[int, str], float] = {}
        self._started: set[tuple[int, str]] = set()

    def follow(self, walked: Walked) -> None:
        line, before, after = walked.line, walked.before, walked.made.status
        if before is not None:
            self._take_in(walked, before, after)
            conclusion = self._post_mortem.follow(line.event, before, walked.made)
            if conclusion is not None:
                self._end(before.incarnation).conclusion = conclusion
            if before.phase is Phase.RUN_COMMAND and after.phase is not Phase.RUN_COMMAND:
                self._leave_run(line, before, after, walked.made.reason)
            elif walked.made.name == "merged":
                self._close(before.incarnation, line.t, walked.made.reason)
            if after.phase is Phase.FAILED and walked.made.name == "independent_end":
                self._end(before.incarnation).root = before.root
        if after.incarnation > (before.incarnation if before else 0):
            self._end(after.incarnation).started_at = line.t
            if self.recovery_times and self.recovery_times[-1].ran_at is None:
                self.recovery_times[-1].ran_at = line.t

    def doubts(self, final: Status) -> tuple[str, ...]:
        """What is odd about a success: notes of the incarnation with which the job ended."""
        if final.phase is not Phase.SUCCEED:
            return ()
        return tuple(text for incarnation, text in self._doubts if incarnation == final.incarnation)

    def _end(self, n: int) -> _End:
        return self.ends.setdefault(n, _End(n))

    def _close(self, n: int, t: float, cause: str) -> _End:
        end = self._end(n)
        if end.ended_at is None:  # an end while the plane was unreachable may have been recorded before
            end.ended_at, end.cause = t, cause
        return end

    def _take_in(self, walked: Walked, before: Status, after: Status) -> None:
        event, t = walked.line.event, walked.line.t
        if isinstance(event, Error):
            self._error(event, t, before)
            if walked.made.name == "failed":
                self._end(event.incarnation).root = event.worker
        elif isinstance(event, Independent) and walked.made.name == "merged":
            end = self._end(event.incarnation)
            end.root = end.root or event.worker
            end.errors.setdefault(event.worker, self._worker_failure(event, t, before))
        elif isinstance(event, (Lost, Join)):
            self._losses(before, after, t)
        elif isinstance(event, Finish) and after is not before:
            self._finish(event, t, before)
        elif isinstance(event, Started):
            self._start(event, t)
        elif isinstance(event, Noted) and event.code in DOUBTS:
            self._doubts.append((before.incarnation, f"{event.worker}: {event.detail}"))

    def _worker_failure(self, event: Error | Independent, t: float, status: Status) -> _WorkerFailure:
        worker = status.worker(event.worker)
        return _WorkerFailure(
            event.worker, worker.node_name if worker else "", t, event.reason, event.failures
        )

    def _error(self, event: Error, t: float, before: Status) -> None:
        errors = self._end(event.incarnation).errors
        if event.worker not in errors:  # a repeated report is no second failure
            errors[event.worker] = self._worker_failure(event, t, before)
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
                losses.setdefault(worker.name, _WorkerFailure(worker.name, node, t, reason))

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
                end.errors.setdefault(failed.name, _WorkerFailure(failed.name, failed.node_name, line.t, why))
        if after.phase in RECOVERING:
            failed_worker = end.losses.get(end.root) or end.errors.get(end.root)
            noticed = failed_worker.t if failed_worker else line.t
            detect_s = self._detect_s.get((end.n, end.root))
            self.recovery_times.append(_RecoveryTimes(end.n, noticed, line.t, detect_s))

    def _finish(self, event: Finish, t: float, before: Status) -> None:
        phase = _CHECKING.get(before.phase)
        if phase:
            self.checks += [_check(event, phase, check) for check in event.checks]
        times = self.recovery_times[-1] if self.recovery_times else None
        if times is None or times.ran_at is not None:
            return
        times.finished_at = t
        _keep_longest(times.timings_s, event.timings_s)

    def _start(self, event: Started, t: float) -> None:
        key = (event.incarnation, event.worker)
        times = next((each for each in self.recovery_times if each.n + 1 == event.incarnation), None)
        if times is not None and "first_step_s" in event.timings_s:  # comes later, for all ranks at once
            _keep_longest(times.timings_s, event.timings_s)
            return
        if times is None or key in self._started:
            return
        self._started.add(key)
        times.started_at = t
        _keep_longest(times.timings_s, event.timings_s)


def _keep_longest(timings_s: dict[str, float], more_s: dict[str, float]) -> None:
    """All wait for the slowest worker, so a segment lasts as long as its longest part."""
    for name, seconds in more_s.items():
        timings_s[name] = max(seconds, timings_s.get(name, 0.0))


def _check(event: Finish, phase: str, check: CheckResult) -> CheckEntry:
    return CheckEntry(
        event.worker, phase, event.incarnation, check.check_type, check.passed, check.result,
        check.time_stamp, check.duration_s, check.finding, check.scope,
    )  # fmt: skip


def _recovery(times: _RecoveryTimes) -> Recovery:
    ran_at = times.ran_at if times.ran_at is not None else times.left_at
    decide_s = times.left_at - times.noticed_at
    if times.finished_at is not None:
        decide_s += ran_at - times.finished_at
    over = ran_at if times.started_at is None else times.started_at
    first_step_s = times.timings_s.get("first_step_s")
    return Recovery(
        detect_s=times.detect_s,
        diagnose_s=times.timings_s.get("diagnose_s"),
        decide_s=decide_s,
        stop_s=times.timings_s.get("stop_s"),
        rendezvous_s=times.timings_s.get("rendezvous_s"),
        start_s=times.timings_s.get("start_s"),
        first_step_s=first_step_s,
        total_s=(times.detect_s or 0.0) + over - times.noticed_at + (first_step_s or 0.0),
    )


def _failures(end: _End) -> list[FailureEntry]:
    """The failures of one incarnation, its root first: exactly one if a failure ended it, else none."""
    failed_workers = [*end.errors.values()]
    failed_workers += [loss for loss in end.losses.values() if loss.worker not in end.errors]
    entries: list[FailureEntry] = []
    for failed in sorted(failed_workers, key=lambda each: (each.worker != end.root, each.t)):
        ordered = sorted(failed.failures, key=lambda failure: (role_of(failure) != "root", failure.time))
        for failure in ordered or (None,):
            is_root = failed.worker == end.root and not entries
            entries.append(_entry(failed, failure, end.conclusion if is_root else _CONSEQUENCE, is_root))
    return entries


def _entry(
    failed: _WorkerFailure, failure: Failure | None, conclusion: Conclusion | None, is_root: bool
) -> FailureEntry:
    signature = signature_of(failure) if failure else None
    reason = conclusion.reason if conclusion else ""
    if signature and signature.fault_class not in reason:
        reason = "; ".join(filter(None, [f"signature {signature.fault_class}", reason]))
    return FailureEntry(
        worker=failed.worker,
        node=failed.node,
        rank=failure.rank if failure else None,
        exit_code=failure.exit_code if failure else None,
        signal=failure.signal if failure else None,
        exception=failure.exception if failure else None,
        last_lines=failure.last_lines if failure else (),
        role="root" if is_root else "consequence",
        fault_class=conclusion.fault_class if conclusion else "unknown",
        level=conclusion.level if conclusion else 0,
        reason=f"{failed.reason} ({reason})" if reason else failed.reason,
        time=failure.time if failure else failed.t,
    )
