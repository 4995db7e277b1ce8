"""Trainings of four ranks that stand still: each is called what it is, by its own evidence, and named."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from aegis_elastic.core.events import Act, Error, Evict, Lost, Mark, Noted, Unmark
from aegis_elastic.core.model import Verdict
from tests.integration.harness import Job, wait_for
from tests.integration.trainings import steps_of, write_training

FLOOR_S = 3.0
FLAGS = (
    *("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off"),
    *("--aegis-hang-after-s", str(FLOOR_S)),
)
AT = 20


def marks(job: Job) -> list[Mark]:
    return [line.event for line in job.journal() if isinstance(line.event, Mark)]


def wait_mark(job: Job, folder: Path, verdict: Verdict) -> tuple[Mark, float]:
    """The first mark of that verdict, and how long after the patience had ended it came (seconds)."""
    wait_for(lambda: steps_of(folder) >= AT, f"step {AT}")

    def last_step_at() -> float:
        return max((folder / f"steps-{rank}").stat().st_mtime for rank in range(4))

    wait_for(lambda: any(mark.verdict is verdict for mark in marks(job)), f"a mark {verdict.value}")
    line = next(
        line for line in job.journal() if isinstance(line.event, Mark) and line.event.verdict is verdict
    )
    assert isinstance(line.event, Mark)
    return line.event, line.t - last_step_at() - FLOOR_S


@pytest.mark.parametrize(
    ("what", "rank", "place"),
    [
        ("loop", 2, "(spin), while 3 wait in"),
        pytest.param("mismatch", 1, "(seldom) in all_gather, while 3 wait in", marks=pytest.mark.full),
    ],
)
def test_a_deadlock_names_the_rank_and_the_line_that_it_stands_at(
    tmp_path: Path, what: str, rank: int, place: str
) -> None:
    with Job(tmp_path, nproc=4, flags=FLAGS) as job:
        launch = job.start(write_training(tmp_path), str(tmp_path), what, str(rank), str(AT), "0")
        mark, late_s = wait_mark(job, tmp_path, Verdict.DESYNC)
        print(f"desync {late_s:.1f} s after the learned threshold: {mark.reason}")
        assert f"rank {rank} of " in mark.reason
        assert place in mark.reason
        assert launch.output.count("): ranks of this node: ") == 1, "reported once on the node, too"
        launch.wait_output("the control plane says that training hangs, and nothing is stopped: desync: ")
        assert len(job.ranks()) == 4, "a mark kills nothing"


@pytest.mark.full
def test_a_deadlock_that_lasts_is_restarted_in_place_by_the_guard_and_counted_once(tmp_path: Path) -> None:
    impatient = ("--aegis-guard-persistence-s", "3", "--aegis-guard-look-s", "1")
    with Job(tmp_path, nproc=4, flags=(*FLAGS, *impatient)) as job:
        launch = job.start(write_training(tmp_path), str(tmp_path), "loop", "2", str(AT), "0")
        job.wait_phase("RunCommand", 2)
        job.wait_ranks(4, restart_count=1)
        (tmp_path / "end").touch()
        assert launch.wait() == 0
        events = [line.event for line in job.journal() if line.transition in ("marked", "failed", "unmarked")]
        assert [type(event) for event in events] == [Mark, Act, Unmark]
        report = job.report()
        assert report["recoverCount"] == 1
        assert report["recoveries"][0]["firstStep_s"] > 0


@pytest.mark.full
def test_a_stopped_rank_is_frozen_and_moving_again_it_isnt(tmp_path: Path) -> None:
    with Job(tmp_path, nproc=4, flags=FLAGS) as job:
        launch = job.start(write_training(tmp_path), str(tmp_path), "nothing", "all", "0", "0")
        ranks = job.wait_ranks(4)
        wait_for(lambda: steps_of(tmp_path) >= AT, f"step {AT}")
        os.kill(ranks[3].pid, signal.SIGSTOP)
        mark, late_s = wait_mark(job, tmp_path, Verdict.FROZEN)
        print(f"frozen {late_s:.1f} s after the learned threshold: {mark.reason}")
        assert mark.reason.startswith("rank 3 is stopped (SIGSTOP)")
        os.kill(ranks[3].pid, signal.SIGCONT)
        wait_for(lambda: any(isinstance(line.event, Unmark) for line in job.journal()), "the end of the mark")
        (tmp_path / "end").touch()
        assert launch.wait() == 0
        assert job.report()["recoverCount"] == 0


@pytest.mark.full
def test_a_long_evaluation_is_stalled_and_nothing_is_restarted(tmp_path: Path) -> None:
    with Job(tmp_path, nproc=4, flags=FLAGS) as job:
        launch = job.start(write_training(tmp_path), str(tmp_path), "evaluate", "all", str(AT), "60")
        mark, late_s = wait_mark(job, tmp_path, Verdict.STALLED)
        print(f"stalled {late_s:.1f} s after the learned threshold: {mark.reason}")
        assert "(evaluate)" in mark.reason
        wait_for(lambda: any(isinstance(line.event, Unmark) for line in job.journal()), "the end of it")
        (tmp_path / "end").touch()
        assert launch.wait() == 0
        assert {mark.verdict for mark in marks(job)} == {Verdict.STALLED}
        assert not [line for line in job.journal() if isinstance(line.event, (Act, Evict, Error))]


@pytest.mark.full
def test_a_rank_that_ends_early_is_said_and_not_taken_for_success(tmp_path: Path) -> None:
    with Job(tmp_path, nproc=4, flags=FLAGS, max_restarts=0) as job:
        launch = job.start(write_training(tmp_path), str(tmp_path), "end", "3", str(AT), "0")
        code = launch.wait()
        events = [line.event for line in job.journal() if isinstance(line.event, (Noted, Error))]
        assert events, "gloo's survivors raise, or are reported without it"
        assert code != 0


@pytest.mark.full
@pytest.mark.timeout(600)
def test_training_that_moves_for_five_minutes_without_a_bus_is_unreachable_and_not_touched(
    tmp_path: Path, unmet: object
) -> None:
    from tests.integration.harness import hosts
    from tests.integration.plane.test_standalone import PORT, cut_off

    with hosts(2, tmp_path, unmet) as net:  # type: ignore[arg-type]
        near, far = net.hosts
        flags = (*FLAGS, "--aegis-lost-timeout-s", "5")
        with Job(tmp_path, nnodes="2", nproc=2, endpoint=f"{near.address}:{PORT}", flags=flags) as job:
            script = write_training(tmp_path)
            launches = [
                job.start(script, str(tmp_path), "nothing", "all", "0", "0", host=h) for h in net.hosts
            ]
            ranks = job.wait_ranks(4)
            wait_for(lambda: steps_of(tmp_path) >= AT, f"step {AT}")
            cut_off(far, job, near)
            cut_at = time.monotonic()
            wait_for(lambda: any(mark.verdict is Verdict.UNREACHABLE for mark in marks(job)), "a mark")
            print(f"unreachable {time.monotonic() - cut_at:.1f} s after the cut: {marks(job)[-1].reason}")
            before = steps_of(tmp_path)
            wait_for(lambda: time.monotonic() > cut_at + 300.0, "five minutes", 320.0)
            assert steps_of(tmp_path) > before + 500
            far.unblock()
            wait_for(lambda: any(isinstance(line.event, Unmark) for line in job.journal()), "the end of it")
            assert {rank.pid for rank in job.ranks().values()} == {rank.pid for rank in ranks.values()}
            (tmp_path / "end").touch()
            assert [launch.wait() for launch in launches] == [0, 0]
            assert job.report()["recoverCount"] == 0
            assert not [line for line in job.journal() if isinstance(line.event, (Act, Evict, Error, Lost))]
            assert {mark.verdict for mark in marks(job)} == {Verdict.UNREACHABLE}
