"""One of four ranks takes a third longer: by what it is found, and by what it can't be; and healthy runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from aegis_elastic.core.detection.anomalies import NETWORK_DROPS
from aegis_elastic.core.events import Act, Error, Evict, Mark, Noted
from aegis_elastic.core.model import Verdict
from tests.integration.harness import Job, hosts, wait_for
from tests.integration.plane.test_standalone import PORT
from tests.integration.progress.test_hang import marks
from tests.integration.trainings import beside, steps_of, write_training

FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")
AT = 40
WITHIN_STEPS = 50
CGROUP = Path("/sys/fs/cgroup/cpu")
RUNS_A_PART = 5
NOISE = """
import random, sys, time
chance = random.Random({seed} * 100 + int(sys.argv[1]))
while True:
    until = time.monotonic() + chance.uniform(0.02, 2.0)
    while time.monotonic() < until: pass
    time.sleep(chance.uniform(0.02, 2.0))
"""


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


def wait_slow(job: Job, folder: Path, since: int, rank: int = 2) -> Mark:
    wait_for(lambda: any(mark.verdict is Verdict.SLOW for mark in marks(job)), "a mark slow")
    took = steps_of(folder) - since
    mark = marks(job)[0]
    print(f"marked within {took} steps: {mark.reason}")
    assert mark.reason.startswith(f"rank {rank} takes"), mark.reason
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
def test_a_stage_of_a_pipeline_that_has_more_to_do_hides_nobody_and_is_not_slow(tmp_path: Path) -> None:
    """Two stages of three ranks; the second has four times the work of the first, to which rank 1 belongs."""
    with Job(tmp_path, nproc=6, flags=FLAGS) as job:
        launch = job.start(write_training(tmp_path), str(tmp_path), "slow stage", "1", "70", "0.05")
        wait_for(lambda: steps_of(tmp_path) >= 70, "step 70")
        assert not marks(job)
        wait_slow(job, tmp_path, 70, rank=1)
        (tmp_path / "end").touch()
        assert launch.wait() == 0


@pytest.mark.full
@pytest.mark.parametrize("share", [0.2, 0.08])
def test_a_rank_that_is_throttled_is_marked(
    tmp_path: Path, share: float, unmet: Callable[[str], None]
) -> None:
    """To a fifth of a core, where its steps need about a quarter; and to much less."""
    with Job(tmp_path, nproc=4, flags=FLAGS) as job:
        launch = job.start(write_training(tmp_path), str(tmp_path), "compute", "all", "0", "0.04")
        wait_for(lambda: steps_of(tmp_path) >= AT, f"step {AT}")
        rank = job.ranks()[2].pid
        with throttled(rank, share, unmet):
            assert "starved, throttled" in wait_slow(job, tmp_path, steps_of(tmp_path)).reason
        (tmp_path / "end").touch()
        assert launch.wait() == 0


@pytest.mark.full
@pytest.mark.netns
@pytest.mark.timeout(400)
def test_a_slow_link_is_nobodys_slow_work_and_what_is_delivered_names_the_rank(
    tmp_path: Path, unmet: Callable[[str], None]
) -> None:
    """It slows the collective for everybody, so no rank is marked slow: own work doesn't tell, nor do steps.
    What a rank's connections deliver while it has something to send does.
    """
    interval = ("--aegis-monitor-interval-s", "0.2")
    with hosts(4, tmp_path, unmet) as net:
        endpoint = f"{net.hosts[0].address}:{PORT}"
        with Job(tmp_path, nnodes="4", endpoint=endpoint, flags=(*FLAGS, *interval)) as job:
            script = write_training(tmp_path)
            for host in net.hosts:
                job.start(script, str(tmp_path), "wide", "all", "0", "0", host=host)
            wait_for(lambda: steps_of(tmp_path) >= AT + 200, f"step {AT + 200}", 150.0)
            net.hosts[2].throttle(10)
            before = steps_of(tmp_path)
            wait_for(lambda: steps_of(tmp_path) >= before + 50, "50 steps more", 200.0)
            noted = [line.event for line in job.journal() if isinstance(line.event, Noted)]
            dropped = {each.node_name: each.detail for each in noted if each.code == NETWORK_DROPS}
            print(f"slow link of {net.hosts[2].name}: {dropped}")
            assert not marks(job)
            assert net.hosts[2].name in dropped
            (tmp_path / "end").touch()
            assert [launch.wait() for launch in job.launches] == [0] * 4


@contextmanager
def noise(count: int, seed: int) -> Iterator[None]:
    """Processes that want a core, now and then, for a while."""
    text = NOISE.format(seed=seed)
    with beside(*((text, str(number)) for number in range(count))):
        yield


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
def test_healthy_runs_mark_nobody_whatever_the_load(tmp_path: Path, part: int) -> None:
    """Twenty in all, two at a time: eight ranks and what else wants the cores disturb each other."""
    for first in (1, 3, 5):
        names = [f"job{part}-{number}" for number in (first, first + 1) if number <= RUNS_A_PART]
        with noise(2, seed=10 * part + first), ExitStack() as stack:
            jobs = [stack.enter_context(Job(tmp_path / name, name, nproc=4, flags=FLAGS)) for name in names]
            for job in jobs:
                job.start(write_training(job.folder), str(job.folder), "nothing", "all", "0", "0")
            for job in jobs:
                folder = job.folder
                wait_for(lambda folder=folder: steps_of(folder) >= 120, "120 steps", 200.0)  # type: ignore[misc]
            for job in jobs:
                (job.folder / "end").touch()
                assert job.launches[0].wait() == 0
                marked = [mark.reason for mark in marks(job)]
                print(f"{job.name}: {steps_of(job.folder)} steps, marks: {marked}")
                assert not marked
                assert not [line for line in job.journal() if isinstance(line.event, (Act, Evict, Error))]
