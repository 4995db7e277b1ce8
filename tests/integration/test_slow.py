"""One of four ranks takes a third longer: by what it is found, and by what it can't be; and healthy runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aegis_elastic.core.events import Act, Error, Evict, Mark
from aegis_elastic.core.model import Verdict
from tests.integration.harness import Job, hosts, wait_for
from tests.integration.test_hang import marks
from tests.integration.test_independent import PORT
from tests.integration.trainings import steps_of, write_training

FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")
AT = 40
WITHIN_STEPS = 50
CGROUP = Path("/sys/fs/cgroup/cpu")


@contextmanager
def throttled(pid: int, share: float, unmet: Callable[[str], None]) -> Iterator[None]:
    """Give a process that share of one core only."""
    group = CGROUP / f"aegis-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        unmet(f"no cgroup with a cpu quota can be made here: {error}")
    try:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text(str(int(share * 100000)))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        (CGROUP / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def wait_slow(job: Job, folder: Path, since: int) -> Mark:
    wait_for(lambda: any(mark.verdict is Verdict.SLOW for mark in marks(job)), "a mark slow")
    took = steps_of(folder) - since
    mark = marks(job)[0]
    print(f"marked within {took} steps: {mark.reason}")
    assert mark.reason.startswith("rank 2 takes"), mark.reason
    assert took <= WITHIN_STEPS
    return mark


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "seconds", "why"),
    [
        ("slow compute", "0.036", "it computes more"),
        ("slow loader", "0.36", "waiting for data"),
        ("slow backward", "0.036", "it computes more"),
        ("slow optimizer", "0.036", "it computes more"),
    ],
)
def test_more_work_or_a_slow_loader_is_marked_within_fifty_steps(
    tmp_path: Path, what: str, seconds: str, why: str
) -> None:
    with Job(tmp_path, nproc=4, flags=FLAGS) as job:
        launch = job.start(write_training(tmp_path), str(tmp_path), what, "2", str(AT), seconds)
        wait_for(lambda: steps_of(tmp_path) >= AT, f"step {AT}")
        assert why in wait_slow(job, tmp_path, AT).reason
        (tmp_path / "end").touch()
        assert launch.wait() == 0


@pytest.mark.full
def test_a_rank_that_is_throttled_is_marked(tmp_path: Path, unmet: Callable[[str], None]) -> None:
    with Job(tmp_path, nproc=4, flags=FLAGS) as job:
        launch = job.start(write_training(tmp_path), str(tmp_path), "compute", "all", "0", "0.04")
        wait_for(lambda: steps_of(tmp_path) >= AT, f"step {AT}")
        rank = job.ranks()[2].pid
        with throttled(rank, 0.08, unmet):
            assert "starved, throttled" in wait_slow(job, tmp_path, steps_of(tmp_path)).reason
        (tmp_path / "end").touch()
        assert launch.wait() == 0


@pytest.mark.full
@pytest.mark.netns
def test_a_slow_link_shows_in_nobodys_own_work(tmp_path: Path, unmet: Callable[[str], None]) -> None:
    """It slows the collective for everybody: for the performance check to find (docs/progress.md)."""
    with hosts(4, tmp_path, unmet) as net:
        endpoint = f"{net.hosts[0].address}:{PORT}"
        with Job(tmp_path, nnodes="4", endpoint=endpoint, flags=FLAGS) as job:
            script = write_training(tmp_path)
            for host in net.hosts:
                job.start(script, str(tmp_path), "nothing", "all", "0", "0", host=host)
            wait_for(lambda: steps_of(tmp_path) >= AT, f"step {AT}")
            net.hosts[2].throttle(2)
            wait_for(lambda: steps_of(tmp_path) >= AT + 150, "150 steps more", 240.0)
            assert not marks(job)
            (tmp_path / "end").touch()
            assert [launch.wait() for launch in job.launches] == [0] * 4


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_twenty_healthy_runs_mark_nobody(tmp_path: Path) -> None:
    for number in range(20):
        folder = tmp_path / str(number)
        with Job(folder, f"job{number}", nproc=4, flags=FLAGS) as job:
            launch = job.start(write_training(folder), str(folder), "nothing", "all", "0", "0")
            wait_for(lambda folder=folder: steps_of(folder) >= 150, "150 steps")  # type: ignore[misc]
            (folder / "end").touch()
            assert launch.wait() == 0
            assert not [mark.reason for mark in marks(job)]
            assert not [line for line in job.journal() if isinstance(line.event, (Act, Evict, Error))]
