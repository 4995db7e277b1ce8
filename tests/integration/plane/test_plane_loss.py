"""The control plane dies, in part or in whole: training goes on, and is protected again when it is back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.integration.harness import Job, Rank, wait_for
from tests.integration.planes import plane_processes, steps_of, wait_plane, wait_successor, write_worker

FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")


def untouched(folder: Path, before: dict[int, Rank], job: Job) -> None:
    """The same ranks run, and their steps go on."""
    assert {rank.pid for rank in job.ranks().values()} == {rank.pid for rank in before.values()}
    seen = {rank: steps_of(folder, rank) for rank in before}
    wait_for(lambda: all(steps_of(folder, rank) > seen[rank] for rank in before), "steps of every rank")


def test_training_never_stops_when_the_plane_is_killed_part_by_part_and_whole(tmp_path: Path) -> None:
    script = write_worker(tmp_path)
    with Job(tmp_path, nproc=2, max_restarts=2, flags=FLAGS) as job:
        launch = job.start(script, str(tmp_path))
        job.wait_phase("RunCommand", 1)
        ranks = job.wait_ranks(2, restart_count=0)
        for part in ("nats", "master", "supervisor"):
            old = plane_processes(job)[part]
            os.kill(old, signal.SIGKILL)
            wait_successor(job, part, old)
            wait_plane(job)
            untouched(tmp_path, ranks, job)
        assert "starting it again; training is not touched" in launch.output
        assert job.status()["recoverCount"] == 0
        # Protected again: a rank's death is seen, counted and made good.
        os.kill(ranks[1].pid, signal.SIGKILL)
        job.wait_phase("RunCommand", 2)
        job.wait_ranks(2, restart_count=1)
        assert job.status()["recoverCount"] == 1
        (tmp_path / "end").touch()
        assert launch.wait() == 0
        assert job.report()["recoverCount"] == 1


def test_gone_for_good_the_nodes_restart_together_by_themselves(tmp_path: Path) -> None:
    script = write_worker(tmp_path)
    flags = (*FLAGS, "--aegis-plane-restarts", "0")
    with Job(tmp_path, nnodes="2", max_restarts=1, flags=flags) as job:
        launches = [job.start(script, str(tmp_path), worker=worker) for worker in "ab"]
        job.wait_phase("RunCommand", 1)
        ranks = job.wait_ranks(2, restart_count=0)
        os.kill(plane_processes(job)["supervisor"], signal.SIGKILL)
        for launch in launches:
            launch.wait_output("is not started again; training is not touched")
        untouched(tmp_path, ranks, job)
        os.kill(ranks[1].pid, signal.SIGKILL)
        job.wait_ranks(2, restart_count=1)
        for launch in launches:
            assert "all nodes restart together without it" in launch.output
            assert launch.output.count("NO JOIN SECRET") == 1
        (tmp_path / "end").touch()
        assert [launch.wait() for launch in launches] == [0, 0]


def test_gone_for_good_the_last_retry_ends_the_job_as_torchelastic_would(tmp_path: Path) -> None:
    script = write_worker(tmp_path)
    flags = (*FLAGS, "--aegis-plane-restarts", "0")
    with Job(tmp_path, nnodes="2", max_restarts=0, flags=flags) as job:
        launches = [job.start(script, str(tmp_path), worker=worker) for worker in "ab"]
        job.wait_phase("RunCommand", 1)
        ranks = job.wait_ranks(2, restart_count=0)
        os.kill(plane_processes(job)["supervisor"], signal.SIGKILL)
        launches[0].wait_output("is not started again")
        os.kill(ranks[0].pid, signal.SIGKILL)
        assert [launch.wait() for launch in launches] == [1, 1]
        for launch in launches:
            assert "retries used up" in launch.output


def test_launcher_killed_on_the_only_node_and_nothing_stays(tmp_path: Path) -> None:
    script = write_worker(tmp_path)
    with Job(tmp_path, nproc=2, flags=FLAGS) as job:
        launch = job.start(script, str(tmp_path))
        job.wait_phase("RunCommand", 1)
        job.wait_ranks(2)
        launch.kill()
        wait_for(lambda: not job.processes(), "the end of ranks, guard and plane", 10.0)
