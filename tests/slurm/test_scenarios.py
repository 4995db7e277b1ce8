"""What happens to trainings in a real Slurm, each with the job's state, exit code and accounts at the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import BatchJob

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, nodes=5) as cluster:
        yield cluster


def test_a_rank_is_killed_and_the_job_completes_with_one_restart_for_all(slurm: Cluster) -> None:
    job = BatchJob(slurm, nodes=3, seats="3")
    job.wait_step(5)
    os.kill(job.pid_of(1), signal.SIGKILL)
    ended = job.wait()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), job.said
    report = job.report()
    assert [worker["retries"] for worker in report["workers"]] == [1, 1, 1]
    assert [(host, rank) for _, host, rank, *_ in sorted(job.starts(), key=lambda s: (s[4], s[2]))] == [
        ("n1", 0), ("n2", 1), ("n3", 2), ("n1", 0), ("n2", 1), ("n3", 2),
    ]  # fmt: skip
    job.replays()


def test_a_node_loses_power_and_a_spare_takes_its_seat(slurm: Cluster) -> None:
    job = BatchJob(slurm, nodes=4, seats="3")
    job.wait_step(5)
    gone = job.host_of(1)
    slurm.power_off(gone)
    job.wait_said(r"init rank \d+ of 3 start 1", 3)
    assert gone not in {host for _, host, _, _, start, _ in job.starts() if start == 1}
    ended = job.wait()
    # Slurm itself calls a job that lost a node NODE_FAIL or not, by --no-kill; ours has done its work.
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), job.said
    assert job.report()["recoverCount"] == 1
    job.replays()


def test_scancel_leaves_nothing_running(slurm: Cluster) -> None:
    job = BatchJob(slurm, nodes=3, seats="3", steps=100000)
    job.wait_step(3)
    pids = [pid for *_, pid in job.starts()]
    slurm.command(["scancel", str(job.number)])
    ended = job.wait()
    assert ended["JobState"] == "CANCELLED", job.said
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
