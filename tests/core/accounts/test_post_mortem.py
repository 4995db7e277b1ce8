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


class FollowedJob:
    """A job whose events a post-mortem follows, and its conclusions."""

    def __init__(self, workers: int = 2, max_retry: int = 3) -> None:
        self.post_mortem = PostMortem()
        self.conclusions: list[Conclusion] = []
        self.status = create(JobSpec("job", "default", workers, workers, max_retry), 0.0)
        for n in range(workers):
            self.feed(Join(f"w{n}", f"w{n}/1", f"node{n}", "10.0.0.1", 1))
        self.settle()
        while self.status.phase is not Phase.RUN_COMMAND:
            self.finish()

    def feed(self, event: object) -> bool:
        made = step(self.status, event, 0.0)  # type: ignore[arg-type]
        conclusion = self.post_mortem.follow(event, self.status, made)
        self.conclusions += [conclusion] if conclusion else []
        changed = made.status is not self.status
        self.status = made.status
        return changed

    def settle(self) -> None:
        while self.feed(Reconcile()):
            pass

    def finish(self, **findings: tuple[Finding, ...]) -> None:
        for worker in self.status.workers:
            ids = (worker.name, worker.uid, self.status.incarnation, self.status.seq_num)
            self.feed(Finish(*ids, findings.get(worker.name, ()), "", (CHECK,)))
        self.settle()

    def error(self, name: str, *failures: Failure, clock: tuple[float, float] | None = None) -> None:
        worker = self.status.worker(name)
        assert worker is not None
        seq_num = self.status.seq_num
        self.feed(Error(name, worker.uid, self.status.incarnation, seq_num, "failed", failures, clock=clock))


def test_a_failure_is_concluded_when_all_start_again() -> None:
    job = FollowedJob()
    job.error("w1", BUG)
    job.settle()
    assert job.conclusions == []
    job.finish()
    ((one),) = job.conclusions
    assert (one.fault_class, one.level, one.worker) == ("process", 1, "w1")
    assert one.first == "rank 0 of w1"


def test_checks_over_several_rounds_of_one_recovery_are_one_case() -> None:
    job = FollowedJob()
    job.error("w1", BUG)
    job.settle()
    job.finish(w0=(Finding("gpu", "gpu.ecc", "hardware"),))
    assert job.status.phase is Phase.RESTARTING and job.conclusions == []
    job.feed(Join("w0", "w0/2", "node9", "10.0.0.9", 1))
    job.settle()
    job.finish()
    job.finish()
    assert job.status.phase.value == "RunCommand"
    ((one),) = job.conclusions
    assert (one.fault_class, one.level, one.worker) == ("hardware", 3, "w0")


def test_an_error_of_another_incarnation_or_said_again_adds_nothing() -> None:
    job = FollowedJob()
    job.error("w1", BUG)
    job.settle()
    job.error("w1", Failure(0, 0, 1.0, None, "SIGKILL"))
    job.feed(Error("w0", "w0/1", 7, 1, "late", (BUG,)))
    job.finish()
    assert job.conclusions[0].first == "rank 0 of w1"
    assert "undecided" not in job.conclusions[0].reason


def test_a_lost_agent_and_what_its_peers_say_later() -> None:
    job = FollowedJob()
    job.feed(Lost((("w0", "w0/1"),), "its connection is gone"))
    job.settle()
    job.feed(Join("w0", "w0/2", "node0", "10.0.0.1", 1))
    job.settle()
    job.finish()
    job.finish()
    ((one),) = job.conclusions
    assert (one.worker, one.code) == ("w0", "agent.lost")


def test_the_user_s_bug_needs_the_same_failure_twice_with_nothing_in_between() -> None:
    job = FollowedJob()
    job.feed(Progress(40))
    job.error("w1", BUG)
    job.settle()
    assert job.post_mortem.user_error() == ""
    job.finish()
    job.error("w0", Failure(1, 0, 9.0, 1, None, "MyError: sample 99", frame="train.py:3 load"))
    job.settle()
    assert "no further than step 40" in job.post_mortem.user_error()
    job.finish()
    job.error("w0", Failure(1, 0, 9.0, None, "SIGKILL"))
    job.settle()
    job.finish()
    job.error("w0", BUG)
    job.settle()
    job.finish()
    assert [one.fault_class for one in job.conclusions[:2]] == ["process", "user bug"]
    assert "user bug" not in [one.fault_class for one in job.conclusions[2:]], "something else was in between"


def test_progress_in_between_makes_it_no_bug() -> None:
    job = FollowedJob()
    job.feed(Progress(40))
    job.error("w1", BUG)
    job.settle()
    job.finish()
    job.feed(Progress(41))
    job.error("w1", BUG)
    job.settle()
    job.finish()
    assert [one.fault_class for one in job.conclusions] == ["process", "process"]
    assert "training got from step 40 to 41" in job.conclusions[1].reason


def test_what_ends_the_job_is_concluded_too_and_a_quit_alone_is_no_failure() -> None:
    job = FollowedJob(max_retry=0)
    job.error("w1", BUG)
    job.settle()
    job.finish()
    assert job.status.phase is Phase.FAILED
    assert [one.worker for one in job.conclusions] == ["w1"]
    asked = FollowedJob()
    asked.feed(Quit("enough"))
    asked.settle()
    assert asked.status.phase is Phase.FAILED and asked.conclusions == []


def test_what_the_agents_ended_among_themselves_was_checked_by_nobody() -> None:
    job = FollowedJob()
    job.feed(Independent("w1", job.status.incarnation, "failed", (BUG,)))
    ((one),) = job.conclusions
    assert "nothing was checked" in one.reason
