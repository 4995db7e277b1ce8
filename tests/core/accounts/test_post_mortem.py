"""Evidence is gathered as events come, and a failure has its conclusion when its recovery is over."""

from __future__ import annotations

from aegis_elastic.core.accounts.post_mortem import PostMortem
from aegis_elastic.core.diagnosis.evidence import Conclusion
from aegis_elastic.core.events import (
    Error,
    Finding,
    Finish,
    Independent,
    Join,
    Lost,
    Progress,
    Quit,
    Reconcile,
)
from aegis_elastic.core.machine import create, step
from aegis_elastic.core.model import CheckResult, Failure, JobSpec, Phase

BUG = Failure(0, 0, 9.0, 1, None, "MyError: sample 7", frame="train.py:3 load")
CHECK = CheckResult("gpu", True, "fine", 0.0, 0.1)


class Told:
    """A job that is followed: what is told to it, and what was concluded."""

    def __init__(self, workers: int = 2, max_retry: int = 3) -> None:
        self.inquest = PostMortem()
        self.concluded: list[Conclusion] = []
        self.status = create(JobSpec("job", "default", workers, workers, max_retry), 0.0)
        for n in range(workers):
            self.tell(Join(f"w{n}", f"w{n}/1", f"node{n}", "10.0.0.1", 1))
        self.settle()
        while self.status.phase is not Phase.RUN_COMMAND:
            self.finish()

    def tell(self, event: object) -> bool:
        made = step(self.status, event, 0.0)  # type: ignore[arg-type]
        concluded = self.inquest.follow(event, self.status, made)
        self.concluded += [concluded] if concluded else []
        changed = made.status is not self.status
        self.status = made.status
        return changed

    def settle(self) -> None:
        while self.tell(Reconcile()):
            pass

    def finish(self, **findings: tuple[Finding, ...]) -> None:
        for worker in self.status.workers:
            ids = (worker.name, worker.uid, self.status.incarnation, self.status.seq_num)
            self.tell(Finish(*ids, findings.get(worker.name, ()), "", (CHECK,)))
        self.settle()

    def error(self, name: str, *failures: Failure, clock: tuple[float, float] | None = None) -> None:
        worker = self.status.worker(name)
        assert worker is not None
        seq_num = self.status.seq_num
        self.tell(Error(name, worker.uid, self.status.incarnation, seq_num, "failed", failures, clock=clock))


def test_a_failure_is_concluded_when_all_start_again() -> None:
    job = Told()
    job.error("w1", BUG)
    job.settle()
    assert job.concluded == []
    job.finish()
    ((one),) = job.concluded
    assert (one.fault_class, one.level, one.worker) == ("process", 1, "w1")
    assert one.first == "rank 0 of w1"


def test_checks_over_several_rounds_of_one_recovery_are_one_case() -> None:
    job = Told()
    job.error("w1", BUG)
    job.settle()
    job.finish(w0=(Finding("gpu", "gpu.ecc", "hardware"),))
    assert job.status.phase is Phase.RESTARTING and job.concluded == []
    job.tell(Join("w0", "w0/2", "node9", "10.0.0.9", 1))
    job.settle()
    job.finish()
    job.finish()
    assert job.status.phase.value == "RunCommand"
    ((one),) = job.concluded
    assert (one.fault_class, one.level, one.worker) == ("hardware", 3, "w0")


def test_an_error_of_another_incarnation_or_said_again_adds_nothing() -> None:
    job = Told()
    job.error("w1", BUG)
    job.settle()
    job.error("w1", Failure(0, 0, 1.0, None, "SIGKILL"))
    job.tell(Error("w0", "w0/1", 7, 1, "late", (BUG,)))
    job.finish()
    assert job.concluded[0].first == "rank 0 of w1"
    assert "undecided" not in job.concluded[0].reason


def test_a_lost_agent_and_what_its_peers_say_later() -> None:
    job = Told()
    job.tell(Lost((("w0", "w0/1"),), "its connection is gone"))
    job.settle()
    job.tell(Join("w0", "w0/2", "node0", "10.0.0.1", 1))
    job.settle()
    job.finish()
    job.finish()
    ((one),) = job.concluded
    assert (one.worker, one.code) == ("w0", "agent.lost")


def test_the_user_s_bug_needs_the_same_failure_twice_with_nothing_in_between() -> None:
    job = Told()
    job.tell(Progress(40))
    job.error("w1", BUG)
    job.settle()
    assert job.inquest.users() == ""
    job.finish()
    job.error("w0", Failure(1, 0, 9.0, 1, None, "MyError: sample 99", frame="train.py:3 load"))
    job.settle()
    assert "no further than step 40" in job.inquest.users()
    job.finish()
    job.error("w0", Failure(1, 0, 9.0, None, "SIGKILL"))
    job.settle()
    job.finish()
    job.error("w0", BUG)
    job.settle()
    job.finish()
    assert [one.fault_class for one in job.concluded[:2]] == ["process", "user bug"]
    assert "user bug" not in [one.fault_class for one in job.concluded[2:]], "something else was in between"


def test_progress_in_between_makes_it_no_bug() -> None:
    job = Told()
    job.tell(Progress(40))
    job.error("w1", BUG)
    job.settle()
    job.finish()
    job.tell(Progress(41))
    job.error("w1", BUG)
    job.settle()
    job.finish()
    assert [one.fault_class for one in job.concluded] == ["process", "process"]
    assert "training got from step 40 to 41" in job.concluded[1].reason


def test_what_ends_the_job_is_concluded_too_and_a_quit_alone_is_no_failure() -> None:
    job = Told(max_retry=0)
    job.error("w1", BUG)
    job.settle()
    job.finish()
    assert job.status.phase is Phase.FAILED
    assert [one.worker for one in job.concluded] == ["w1"]
    asked = Told()
    asked.tell(Quit("enough"))
    asked.settle()
    assert asked.status.phase is Phase.FAILED and asked.concluded == []


def test_what_the_agents_ended_among_themselves_was_checked_by_nobody() -> None:
    job = Told()
    job.tell(Independent("w1", job.status.incarnation, "failed", (BUG,)))
    ((one),) = job.concluded
    assert "nothing was checked" in one.reason
