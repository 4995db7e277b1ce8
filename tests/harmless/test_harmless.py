"""Do no harm: what looks like a failure and isn't one has no consequence.

Detectors may report and mark; no rank may be restarted, no node may leave, no retry may be counted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from aegis_elastic.core.events import Act, Error, Evict, Hold, Lost, Mark
from aegis_elastic.core.model import Verdict
from aegis_elastic.testing.netns import Net
from tests.harmless.clock import JumpingClock
from tests.integration.harness import Job, hosts, stays, wait_for
from tests.integration.plane.test_standalone import PORT, cut_off
from tests.integration.trainings import beside, steps_of, write_training

# Short limits, so that a supposed deadlock would be acted upon before the test is over.
FLAGS = (
    *("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off", "--aegis-hang-after-s", "3"),
    *("--aegis-guard-persistence-s", "2", "--aegis-guard-look-s", "1"),
)
AT = 15
HOUR_S = 3600


def hogs(count: int) -> AbstractContextManager[None]:
    """So many processes that use a whole core each."""
    return beside(*[("while True: pass",)] * count)


def train_on_and_end(job: Job, folder: Path, more: int) -> None:
    """Let it train some more steps, then end; no action may have been taken."""
    pids = {rank.pid for rank in job.ranks().values()}
    reached = steps_of(folder)
    wait_for(lambda: steps_of(folder) >= reached + more, f"{more} steps more")
    assert {rank.pid for rank in job.ranks().values()} == pids
    (folder / "end").touch()
    assert [launch.wait() for launch in job.launches] == [0] * len(job.launches)
    report = job.report()
    assert (report["recoverCount"], len(report["incarnations"]), report["failures"]) == (0, 1, [])
    done = [line.event for line in job.journal()]
    assert not [event for event in done if isinstance(event, (Act, Evict, Error, Lost, Hold))]
    marked = {event.verdict for event in done if isinstance(event, Mark)}
    print(f"marks: {sorted(verdict.value for verdict in marked)}")
    assert marked <= {Verdict.STALLED, Verdict.UNREACHABLE}


def test_a_long_save_while_the_clock_jumps(tmp_path: Path, unmet: Callable[[str], None]) -> None:
    """Rank 0 saves for three times as long as any pause before, and its peer waits for it in a collective."""
    try:
        clock = JumpingClock(tmp_path)
    except FileNotFoundError as error:
        unmet(str(error))
    with Job(tmp_path, nproc=2, flags=FLAGS, env=clock.environment) as job:
        job.start(write_training(tmp_path), str(tmp_path), "save", "0", str(AT), "9")
        wait_for(lambda: steps_of(tmp_path) >= 5, "steps")
        clock.jump(HOUR_S)
        wait_for(lambda: steps_of(tmp_path) >= AT, "more of them")
        clock.jump(-HOUR_S)
        train_on_and_end(job, tmp_path, 5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "who"),
    [("save", "0"), ("compile", "all"), ("evaluate", "all"), ("evaluate", "0"), ("score", "0")],
)
def test_a_pause_ten_times_as_long_as_any_before(tmp_path: Path, what: str, who: str) -> None:
    """Saving, compiling while the interpreter is held, evaluating: on all ranks, on one, in one long call."""
    with Job(tmp_path, nproc=4, flags=FLAGS) as job:
        job.start(write_training(tmp_path), str(tmp_path), what, who, str(AT), "30")
        wait_for(lambda: steps_of(tmp_path) > AT, "the end of the pause", 120.0)
        train_on_and_end(job, tmp_path, 10)


@pytest.mark.full
def test_cores_that_other_processes_use_too(tmp_path: Path) -> None:
    with Job(tmp_path, nproc=4, flags=FLAGS) as job:
        job.start(write_training(tmp_path), str(tmp_path), "nothing", "all", "0", "0")
        wait_for(lambda: steps_of(tmp_path) >= AT, "steps")
        with hogs(8):
            goal = steps_of(tmp_path) + 60
            wait_for(lambda: steps_of(tmp_path) >= goal, "steps on busy cores", 300.0)
        train_on_and_end(job, tmp_path, 10)


@pytest.mark.full
def test_wall_clocks_that_jump_back_and_forth(tmp_path: Path, unmet: Callable[[str], None]) -> None:
    try:
        clock = JumpingClock(tmp_path)
    except FileNotFoundError as error:
        unmet(str(error))
    with Job(tmp_path, nproc=4, flags=FLAGS, env=clock.environment) as job:
        job.start(write_training(tmp_path), str(tmp_path), "nothing", "all", "0", "0")
        for by in (0, 24 * HOUR_S, -24 * HOUR_S, 300, 0):
            clock.jump(by)
            reached = steps_of(tmp_path)
            wait_for(lambda reached=reached: steps_of(tmp_path) >= reached + 20, f"steps at {by} s")  # type: ignore[misc]
        train_on_and_end(job, tmp_path, 10)


@pytest.mark.full
@pytest.mark.netns
@pytest.mark.timeout(400)
def test_a_management_network_that_is_cut_off(tmp_path: Path, unmet: Callable[[str], None]) -> None:
    """Neither bus nor first contact for two minutes; the training network is another one."""
    with hosts(2, tmp_path, unmet) as net:
        _cut_and_restore(net, tmp_path)


def _cut_and_restore(net: Net, folder: Path) -> None:
    near, far = net.hosts
    flags = (*FLAGS, "--aegis-lost-timeout-s", "5")
    with Job(folder, nnodes="2", nproc=2, endpoint=f"{near.address}:{PORT}", flags=flags) as job:
        script = write_training(folder)
        for host in net.hosts:
            job.start(script, str(folder), "nothing", "all", "0", "0", host=host)
        job.wait_ranks(4)
        wait_for(lambda: steps_of(folder) >= AT, "steps")
        cut_off(far, job, near)
        stays(lambda: len(job.ranks()) == 4, 120.0)
        far.unblock()
        train_on_and_end(job, folder, 10)
