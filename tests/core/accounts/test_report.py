"""The report: told from the journal, with one root for each end and the time that each part took."""

from __future__ import annotations

import json
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings

from aegis_elastic.core.accounts.journal import Adopt, Create, Line, adopted, begin, line_of
from aegis_elastic.core.accounts.report import AGENT_LOST, FALSE_SUCCESS, Report, build
from aegis_elastic.core.events import (
    Error,
    Finding,
    Finish,
    Independent,
    Join,
    Lost,
    Noted,
    Quit,
    Reconcile,
    Started,
)
from aegis_elastic.core.machine import step
from aegis_elastic.core.model import TERMINAL, CheckResult, Failure, JobSpec, Phase
from tests.core.machine.walks import Choice, Walk, moves, specs

FAILED = "exit code 1 (every check passed: the processes failed, not the machine)"


class Run:
    """A job that is told what happens, second by second."""

    def __init__(self, workers: int = 2, max_retry: int = 2) -> None:
        self.now = 0.0
        self.spec = JobSpec("job", "default", workers, workers, max_retry)
        made = begin(self.spec, self.now)
        self.status = made.status
        self.lines: list[Line] = [line_of(0.0, 1, Create(self.spec), made)]
        for n in range(workers):
            self.tell(Join(f"w{n}", f"w{n}/1", f"node{n}", "10.0.0.1", 2))
        self.settle()
        for _ in range(2):
            self.finish_all()

    def tell(
        self, event: Join | Lost | Error | Finish | Started | Independent | Quit | Noted | Reconcile
    ) -> str:
        made = step(self.status, event, self.now)
        self.status = made.status
        self.lines.append(line_of(self.now, len(self.lines) + 1, event, made))
        return made.name

    def settle(self) -> None:
        while self.tell(Reconcile()) not in ("wait", "ended"):
            pass

    def finish_all(self, **told: tuple[Finding, ...]) -> None:
        for n, worker in enumerate(self.status.workers):
            check = CheckResult("gpu", worker.name not in told, "looked", self.now, 0.1)
            parts = {"stop_s": 0.2 + n, "diagnose_s": 0.05 + n}
            ids = (worker.name, worker.uid, self.status.incarnation, self.status.seq_num)
            self.tell(Finish(*ids, told.get(worker.name, ()), "", (check,), parts))
        self.settle()

    def error(self, name: str, *failures: Failure, reason: str = "exit code 1") -> None:
        worker = self.status.worker(name)
        assert worker
        seq_num, parts = self.status.seq_num, {"detect_s": 0.01}
        self.tell(
            Error(name, worker.uid, self.status.incarnation, seq_num, reason, failures, timings_s=parts)
        )

    def started_all(self) -> None:
        for n, worker in enumerate(self.status.workers):
            parts = {"rendezvous_s": 0.1 + n, "start_s": 1.0 + n}
            self.tell(Started(worker.name, worker.uid, self.status.incarnation, parts))

    def report(self) -> Report:
        return build(self.lines, self.status)


def died(rank: int, time: float, **how: object) -> Failure:
    return Failure(rank, rank % 2, time, **how)  # type: ignore[arg-type]


def test_the_fields_are_those_of_the_interface() -> None:
    run = Run()
    run.error("w1", died(2, 9.0, exit_code=1, exception="ValueError: no", last_lines=("so",)))
    run.settle()
    run.finish_all()
    wire = json.loads(msgspec.json.encode(run.report()))
    assert list(wire) == [
        "outcome", "phase", "failReason", "maxRetry", "recoverCount", "workers", "incarnations", "failures",
        "recoveries", "checks", "errorNodes", "reschedules", "summary", "doubts",
    ]  # fmt: skip
    assert list(wire["incarnations"][0]) == ["n", "startedAt", "endedAt", "cause"]
    assert list(wire["failures"][0]) == [
        "worker", "node", "rank", "exitCode", "signal", "exception", "lastLines", "role", "class", "level",
        "reason", "time",
    ]  # fmt: skip
    assert list(wire["recoveries"][0]) == [
        "detect_s", "diagnose_s", "decide_s", "stop_s", "rendezvous_s", "start_s", "firstStep_s", "total_s",
    ]  # fmt: skip
    assert wire["failures"][0]["reason"] == (
        "exit code 1 (signature user_value_error: an error of the user's own, it seems)"
    )
    assert wire["recoveries"][0]["firstStep_s"] is None
    assert wire["checks"][0]["pass"] is True
    assert msgspec.json.decode(msgspec.json.encode(run.report()), type=Report) == run.report()


def test_a_crash_its_consequences_and_its_recovery_by_segment() -> None:
    run = Run()
    run.started_all()
    run.now = 100.0
    root = died(3, 99.99, signal="SIGKILL")
    peer = died(2, 99.995, exit_code=1, exception="RuntimeError: [gloo] Connection closed by peer")
    run.error("w1", peer, root, reason="rank 3 died of SIGKILL")
    run.now = 100.5
    run.settle()
    run.error("w0", died(0, 100.0, exit_code=1), reason="Connection closed by peer")
    run.now = 104.0
    run.finish_all()
    run.now = 107.0
    run.started_all()
    run.started_all()
    report = run.report()
    assert [(f.worker, f.rank, f.role, f.fault_class, f.level) for f in report.failures] == [
        ("w1", 3, "root", "process", 1), ("w1", 2, "consequence", "", 0), ("w0", 0, "consequence", "", 0),
    ]  # fmt: skip
    assert [(i.n, i.started_at, i.ended_at, i.cause) for i in report.incarnations] == [
        (1, 0.0, 100.5, "w1 failed: rank 3 died of SIGKILL"), (2, 104.0, None, ""),
    ]  # fmt: skip
    (mend,) = report.recoveries
    assert (mend.detect_s, mend.stop_s, mend.diagnose_s) == (0.01, 1.2, 1.05)
    assert (mend.rendezvous_s, mend.start_s, mend.first_step_s) == (1.1, 2.0, None)
    assert mend.decide_s == pytest.approx(0.5)
    assert mend.total_s == pytest.approx(7.01)
    assert report.outcome == "unfinished"
    assert report.summary == "at most 2 restarts, 1 used; 0 reschedules for hardware"
    run.now = 109.0
    run.tell(Started("w1", "w1/1", 2, {"first_step_s": 1.5}))
    (mend,) = run.report().recoveries
    assert (mend.first_step_s, mend.rendezvous_s) == (1.5, 1.1)
    assert mend.total_s == pytest.approx(8.51)


def test_the_worked_example_as_a_report() -> None:
    run = Run(workers=3)
    run.tell(Lost((("w0", "w0/1"),), "connection closed"))
    run.settle()
    run.tell(Join("w0", "w0/2", "node0", "10.0.0.1", 2))
    run.finish_all()
    run.finish_all()
    run.error("w1", died(2, 1.0, exit_code=1))
    run.settle()
    run.finish_all()
    run.error("w2", died(4, 2.0, exit_code=1))
    run.settle()
    run.finish_all()
    report = run.report()
    assert (report.outcome, report.phase) == ("failed", "Failed")
    assert [worker.retries for worker in report.workers] == [2, 2, 3]
    assert [(f.worker, f.reason, f.role, f.rank) for f in report.failures] == [
        ("w0", AGENT_LOST, "root", None), ("w1", FAILED, "root", 2), ("w2", FAILED, "root", 4),
    ]  # fmt: skip
    assert [i.n for i in report.incarnations] == [1, 2, 3]
    assert all(i.ended_at is not None and i.cause for i in report.incarnations)
    assert len(report.recoveries) == 2, "the third failure was not recovered from"
    assert report.summary == "at most 2 restarts, 2 used; 0 reschedules for hardware"


def test_faulty_hardware_is_the_class_and_counts_as_a_reschedule() -> None:
    run = Run()
    run.tell(Join("w9", "w9/1", "node9", "10.0.0.1", 2))
    run.error("w0", died(0, 1.0, exit_code=1))
    run.settle()
    run.finish_all(w1=(Finding("gpu", "gpu.lost", "hardware"),))
    run.finish_all()
    run.finish_all()
    report = run.report()
    assert [(f.worker, f.fault_class, f.level) for f in report.failures] == [("w0", "hardware", 3)]
    assert [node.node_name for node in report.error_nodes] == ["node1"]
    assert report.summary == "at most 2 restarts, 1 used; 1 reschedules for hardware"
    failed = [(check.worker, check.phase, check.incarnation) for check in report.checks if not check.passed]
    assert failed == [("w1", "troubleshoot", 1)]


def test_several_agents_lost_at_once_have_one_root() -> None:
    run = Run(workers=3)
    run.error("w2", died(4, 1.0, exit_code=1), reason="Connection closed by peer")
    run.tell(Lost((("w0", "w0/1"), ("w1", "w1/1")), "rack"))
    run.settle()
    report = run.report()
    assert Counter(f.role for f in report.failures) == {"root": 1, "consequence": 2}
    assert (report.failures[0].worker, report.failures[0].reason) == ("w0", AGENT_LOST)


def test_an_end_while_the_plane_was_away_is_told_once() -> None:
    run = Run()
    for _ in range(2):
        run.tell(Independent("w1", 1, "SIGKILL", (died(2, 5.0, signal="SIGKILL"),)))
    report = run.report()
    assert [(f.worker, f.signal, f.role) for f in report.failures] == [("w1", "SIGKILL", "root")]
    assert [(i.n, i.ended_at) for i in report.incarnations] == [(1, 0.0), (2, None)]
    assert report.summary == "at most 2 restarts, 1 used; 0 reschedules for hardware"


def test_a_job_that_was_closed_from_outside_has_no_root() -> None:
    run = Run()
    run.tell(Quit("maintenance"))
    run.settle()
    report = run.report()
    assert (report.outcome, report.fail_reason, report.failures) == ("failed", "maintenance", ())
    assert report.incarnations[0].cause == "maintenance"


def test_a_clean_run() -> None:
    run = Run()
    run.finish_all()
    report = run.report()
    assert (report.outcome, report.failures, report.recoveries) == ("succeeded", (), ())
    assert report.incarnations[0].cause == "every worker finished"
    assert {check.phase for check in report.checks} == {"bootcheck"}


def test_the_report_goes_on_over_a_change_of_master() -> None:
    run = Run()
    run.error("w1", died(2, 1.0, exit_code=1))
    failed = run.lines.pop()  # the old master died before it wrote the line
    run.lines.append(line_of(1.0, failed.seq + 1, Adopt(run.status), adopted(run.status)))
    run.settle()
    run.finish_all()
    report = run.report()
    assert [(f.worker, f.rank, f.role) for f in report.failures] == [("w1", None, "root")]
    assert report.incarnations[0].cause == "w1 failed: exit code 1"
    assert len(report.recoveries) == 1


@given(specs(), moves)
@settings(max_examples=60)
def test_any_run_has_a_report_with_one_root_for_each_failure(spec: JobSpec, walk: list[Choice]) -> None:
    run = Walk(spec, walk)
    report = build(run.lines, run.status)
    msgspec.json.encode(report)
    roots = sum(failure.role == "root" for failure in report.failures)
    ended = [i for i in report.incarnations if i.ended_at is not None]
    restarts = sum(1 for i in report.incarnations if i.n > 1)
    assert roots >= restarts, "every restart has its root"
    assert roots <= len(report.incarnations) + 1, "and none has two (independent mode has no incarnation)"
    assert len(report.incarnations) == run.status.incarnation
    assert (run.status.phase in TERMINAL) == (report.outcome != "unfinished")
    assert [i.n for i in report.incarnations] == sorted(i.n for i in report.incarnations)
    assert all(i.cause for i in ended)
    assert run.status.phase is not Phase.RUN_COMMAND or len(ended) == len(report.incarnations) - 1


def test_a_success_may_be_doubted_by_what_was_noted_in_its_last_incarnation() -> None:
    run = Run()
    run.tell(Noted("w0", "node0", "rank.ended_early", "rank 0 ended after step 3; others are at step 9", 1.0))
    run.error("w1", died(2, 9.0, exit_code=1))
    run.settle()
    run.finish_all()  # troubleshooting; then all run again
    assert run.status.incarnation == 2
    run.tell(Noted("w1", "node1", FALSE_SUCCESS, "its tracker can't be read", 2.0))
    run.tell(Noted("w1", "node1", "memory.growth", "no matter of success", 2.0))
    assert run.report().doubts == (), "as long as it is no success"
    run.finish_all()
    assert run.status.phase is Phase.SUCCEED
    assert run.report().doubts == ("w1: its tracker can't be read",)
