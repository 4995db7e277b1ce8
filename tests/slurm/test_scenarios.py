"""What happens to trainings in a real Slurm, each with the job's state, exit code and accounts at the end.

`make test` runs the first; the others take their time, most of it Slurm's own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aegis_elastic.core.accounts import journal
from tests.checks.conftest import compiler as compiler
from tests.checks.conftest import libraries as libraries
from tests.slurm.cluster import CONTROLLER, Cluster
from tests.slurm.jobs import BatchJob

pytestmark = [pytest.mark.netns, pytest.mark.timeout(400)]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, nodes=5) as cluster:
        yield cluster


APART = ["--rdzv-id", "apart", "--aegis-plane", f"{CONTROLLER}:29700", "--rdzv-endpoint", "n1:29500"]


def standing(slurm: Cluster, *flags: str) -> subprocess.Popen[str]:
    """A master of three nodes outside of the allocation; launchers are given APART."""
    env = {**slurm.env, "XDG_STATE_HOME": str(slurm.root / "master-state")}
    command = [sys.executable, "-m", "aegis_elastic.launch.master", "--nnodes", "3", *APART, *flags]
    with open(slurm.root / "master.txt", "w") as output:
        return slurm.hosts[CONTROLLER].popen(
            command, env=env, cwd=slurm.root, stdout=output, stderr=subprocess.STDOUT
        )


def ended(job: BatchJob) -> tuple[str, str]:
    """The job's state and exit code, once it is over."""
    shown = job.wait()
    print(job.summary(shown))
    return shown["JobState"], shown["ExitCode"]


def test_a_rank_is_killed_then_a_node_loses_power_and_a_spare_takes_its_seat(slurm: Cluster) -> None:
    job = BatchJob(slurm, nodes=4, training_nodes="3", steps=60)
    job.wait_step(5)
    os.kill(job.pid_of(1), signal.SIGKILL)
    job.wait_logged(r"init rank \d+ of 3 start 1", 3)
    assert job.ctl("status", "--json")["recoverCount"] == 1, "from another host, as the guide says"
    before = {rank: host for _, host, rank, _, start, _ in job.starts() if start == 1}
    assert [before[rank] for rank in range(3)] == sorted(before.values()), "ranks in Slurm's order of nodes"
    # The control plane's node is another story.
    gone = before[1]
    slurm.power_off(gone)
    job.wait_logged(r"init rank \d+ of 3 start 2", 3)
    after = {rank: host for _, host, rank, _, start, _ in job.starts() if start == 2}
    (spare,) = {"n1", "n2", "n3", "n4"} - set(before.values())
    assert after == {**before, 1: spare}, "the spare has the lost node's rank"
    assert ended(job) == ("COMPLETED", "0:0"), job.log_text
    report = job.report()
    assert [worker["retries"] for worker in report["workers"]] == [2, 2, 2]
    job.replays()


@pytest.mark.full
def test_without_a_spare_the_world_shrinks(slurm: Cluster) -> None:
    job = BatchJob(
        slurm, nodes=3, training_nodes="2:3", steps=60, flags=["--rdzv-conf", "last_call_timeout=2"]
    )
    job.wait_step(5)
    slurm.power_off("n3")
    job.wait_logged(r"init rank \d of 2 start 1", 2)
    assert ended(job) == ("COMPLETED", "0:0"), job.log_text
    assert job.report()["recoverCount"] == 1
    job.replays()


@pytest.mark.full
def test_scancel_leaves_nothing_running(slurm: Cluster) -> None:
    job = BatchJob(slurm, nodes=3, training_nodes="3", steps=100000)
    job.wait_step(3)
    assert len(job.processes()) > 3
    slurm.command(["scancel", str(job.number)])
    assert ended(job)[0] == "CANCELLED", job.log_text
    job.wait_gone()


@pytest.mark.full
def test_the_step_alone_is_killed_and_leaves_nothing_running(slurm: Cluster) -> None:
    job = BatchJob(slurm, nodes=3, training_nodes="3", steps=100000)
    job.wait_step(3)
    assert len(job.processes()) > 3
    slurm.command(["scancel", "--signal=KILL", f"{job.number}.0"])
    state, code = ended(job)
    assert state == "FAILED" and code != "0:0", job.log_text
    job.wait_gone()


@pytest.mark.full
@pytest.mark.parametrize("signum", ["TERM", "INT", "HUP"])
def test_a_signal_to_the_whole_job_leaves_nothing_running(slurm: Cluster, signum: str) -> None:
    job = BatchJob(slurm, nodes=3, training_nodes="3", steps=100000)
    job.wait_step(3)
    slurm.command(["scancel", f"--signal={signum}", f"{job.number}.0"])
    state, code = ended(job)
    assert state == "FAILED" and code != "0:0", job.log_text
    job.wait_gone()


@pytest.mark.full
def test_a_launcher_that_is_killed_is_missed_and_leaves_nothing_behind(slurm: Cluster) -> None:
    job = BatchJob(slurm, nodes=4, training_nodes="3", steps=60)
    job.wait_step(3)
    before = set(job.processes())
    host = job.host_of(2)
    mine = [pid for pid in slurm.hosts[host].pids() if pid in before and "aegis-run" in job.processes()[pid]]
    (launcher,) = [pid for pid in mine if "srun" not in job.processes().get(pid, "srun")]
    os.kill(launcher, signal.SIGKILL)
    job.wait_logged(r"init rank \d of 3 start 1", 3)
    left = {pid for pid in before & set(slurm.hosts[host].pids()) if pid in job.processes()}
    assert not left, {pid: job.processes()[pid] for pid in left}
    state, _ = ended(job)
    assert job.report()["recoverCount"] == 1
    assert state == "FAILED", "srun returns the highest code, and the killed task's is 137"
    job.wait_gone()


@pytest.mark.full
def test_signals_of_the_user_reach_the_ranks_and_end_nobody(slurm: Cluster) -> None:
    trap = "trap 'echo batch script heard USR1' USR1"
    job = BatchJob(slurm, nodes=2, training_nodes="2", steps=60, before=trap)
    job.wait_step(3)
    slurm.command(["scancel", "--signal=USR1", str(job.number)])
    job.wait_logged("signal SIGUSR1", 2)
    slurm.command(["scancel", "--signal=USR2", f"{job.number}.0"])
    job.wait_logged("signal SIGUSR2", 2)
    assert ended(job) == ("COMPLETED", "0:0"), job.log_text
    assert job.report()["recoverCount"] == 0


@pytest.mark.full
def test_a_pulled_cable_that_is_plugged_in_again_restarts_nobody(slurm: Cluster) -> None:
    job = BatchJob(slurm, nodes=3, training_nodes="3", steps=80)
    job.wait_step(5)
    slurm.cut("n3")
    # Both of them wait: for what doesn't come. Shorter than any timeout, longer than any step.
    with pytest.raises(AssertionError):
        job.wait_for(lambda: f"step {len(job.starts()) and 80}" in job.log_text, "end of the training", 6)
    slurm.heal("n3")
    assert ended(job) == ("COMPLETED", "0:0"), job.log_text
    assert len(job.starts()) == 3
    assert job.report()["recoverCount"] == 0


@pytest.mark.full
def test_draining_a_node_does_not_touch_the_job_that_runs_there(slurm: Cluster) -> None:
    job = BatchJob(slurm, nodes=3, training_nodes="3", steps=60)
    job.wait_step(3)
    slurm.command(["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=maintenance"])
    assert ended(job) == ("COMPLETED", "0:0"), job.log_text
    assert len(job.starts()) == 3
    assert job.report()["recoverCount"] == 0


@pytest.mark.full
def test_preempted_and_requeued_it_goes_on_at_its_checkpoint_with_its_accounts(slurm: Cluster) -> None:
    job = BatchJob(slurm, nodes=5, training_nodes="5", steps=60)
    job.wait_step(3)
    os.kill(job.pid_of(1), signal.SIGKILL)
    job.wait_logged(r"init rank \d+ of 5 start 1", 5)
    slurm.submit("#!/bin/bash\nsrun hostname\n", "--partition=urgent", "--nodes=5", "--exclusive")
    job.wait_logged(r"init rank \d+ of 5 start 2", 5)
    slurm.wait(job.number, 60)  # its first run
    assert ended(job) == ("COMPLETED", "0:0"), job.log_text
    assert slurm.show(job.number)["Restarts"] == "1"
    assert job.report()["recoverCount"] == 1, "the rank's death counts, the scheduler's doing doesn't"
    assert "signal SIGTERM" in job.log_text, "the ranks heard it in time for a last checkpoint"
    job.replays()


@pytest.mark.full
def test_too_few_nodes_left_it_asks_for_a_requeue_and_goes_on_elsewhere(slurm: Cluster) -> None:
    job = BatchJob(slurm, nodes=3, training_nodes="3", steps=60, flags=["--aegis-rejoin-timeout-s", "3"])
    job.wait_step(5)
    slurm.power_off("n3")
    job.wait_logged(r"init rank \d of 3 start 1", 3)
    assert "srun: 75" in job.log_text
    places = {host for _, host, _, _, start, _ in job.starts() if start == 1}
    assert "n3" not in places
    slurm.wait(job.number, 60)  # its first run
    assert ended(job) == ("COMPLETED", "0:0"), job.log_text
    report = job.report()
    assert report["recoverCount"] == 1, "the lost node counts, the requeue doesn't"
    job.replays()


@pytest.mark.full
def test_the_time_limit_ends_it_after_a_signal_that_the_ranks_hear(slurm: Cluster) -> None:
    job = BatchJob(
        slurm,
        nodes=2,
        training_nodes="2",
        steps=100000,
        options=["--time=1", "--signal=USR1@55", "--no-requeue"],
    )
    job.wait_step(3)
    job.wait_logged("signal SIGUSR1", 2)
    shown = job.slurm.wait(job.number, 200)
    assert shown["JobState"] == "TIMEOUT", job.log_text
    assert not (job.run_dir() / "report.json").exists(), "it isn't over for us: the same name goes on"
    assert len(job.starts()) == 2


@pytest.mark.full
def test_two_nodes_with_broken_gpus_are_drained_one_after_the_other(slurm: Cluster, libraries: Path) -> None:
    nvidia = Path(shutil.copytree(libraries, slurm.root / "nvidia"))
    for name in ("n1", "n2", "n3", "n4", "n5"):
        (slurm.root / f"gpus-{name}").write_text("* count 8\n")
    state = f"FAKE_NVML_STATE={slurm.root}/gpus-$SLURMD_NODENAME"
    wrap = f"env LD_LIBRARY_PATH={nvidia} bash -c '{state} exec \"$@\"' -"
    flags = ["--aegis-gpus-per-node", "8", "--aegis-isolation", "slurm"]
    job = BatchJob(slurm, nodes=5, training_nodes="3", steps=120, flags=flags, wrap=wrap)
    job.wait_step(3)
    for start, (node, rank) in enumerate((("n2", 1), ("n3", 2)), 1):
        (slurm.root / f"gpus-{node}").write_text("* count 7\n")
        os.kill(job.pid_of(rank), signal.SIGKILL)
        job.wait_logged(rf"init rank \d of 3 start {start}\b", 3)
    assert {host for _, host, _, _, start, _ in job.starts() if start == 2} == {"n1", "n4", "n5"}

    def drained() -> bool:
        shown = slurm.command(["scontrol", "--oneliner", "show", "node", "n2,n3"]).stdout
        return shown.count("DRAIN") == shown.count("gpu.missing") == 2

    # Training doesn't wait for Slurm.
    job.wait_for(drained, "drain of both nodes", 30)
    assert ended(job) == ("COMPLETED", "0:0"), job.log_text
    report = job.report()
    assert [node["nodeName"] for node in report["errorNodes"]] == ["n2", "n3"]
    assert (report["recoverCount"], report["reschedules"]) == (2, 2)
    job.replays()


@pytest.mark.full
def test_a_standing_master_does_not_count_what_the_scheduler_takes_away(slurm: Cluster) -> None:
    master = standing(slurm, "--aegis-requeue", "on")
    job = BatchJob(slurm, nodes=3, training_nodes="3", steps=60, flags=APART)
    job.wait_step(3)
    # Longer than the master waits for agents to come back: it has missed them by the time they are requeued.
    slurm.submit("#!/bin/bash\nsrun sleep 20\n", "--partition=urgent", "--nodes=5", "--exclusive")
    job.wait_logged(r"init rank \d+ of 3 start 1", 3)
    slurm.wait(job.number, 60)  # its first run
    assert ended(job) == ("COMPLETED", "0:0"), job.log_text
    assert master.wait(120) == 0, (slurm.root / "master.txt").read_text()
    run = slurm.root / "master-state" / "aegis" / "default" / "apart" / "1"
    assert json.loads((run / "report.json").read_text())["recoverCount"] == 0
    decisions = [(line.transition, line.reason) for line in journal.read(run / "journal.jsonl")]
    assert any(name == "lost" and "counted" in reason for name, reason in decisions), decisions
    assert journal.replay(journal.read(run / "journal.jsonl")).ok


@pytest.mark.full
def test_the_head_node_is_lost_and_a_standing_master_leads_on(slurm: Cluster) -> None:
    master = standing(slurm)
    job = BatchJob(slurm, nodes=4, training_nodes="3", steps=60, flags=APART)
    job.wait_step(5)
    slurm.power_off("n1")
    job.wait_logged(r"init rank \d of 3 start 1", 3)
    assert "n1" not in {host for _, host, _, _, start, _ in job.starts() if start == 1}
    assert master.wait(120) == 0, (slurm.root / "master.txt").read_text()
    job.wait_logged(r"\bdone\b", 3)
    # Its batch script has gone with the node: Slurm is informed, as the guide says.
    slurm.command(["scancel", str(job.number)])
    job.wait()


@pytest.mark.full
def test_spares_wait_for_three_minutes_and_nobody_is_restarted(slurm: Cluster) -> None:
    job = BatchJob(slurm, nodes=5, training_nodes="3", steps=100000)
    job.wait_step(3)
    began = time.monotonic()
    with pytest.raises(AssertionError):
        job.wait_for(lambda: len(job.starts()) > 3, "restart", 180)
    assert time.monotonic() - began >= 180
    slurm.command(["scancel", str(job.number)])
    job.wait()
    assert len(job.starts()) == 3
    assert job.log_text.count("waiting as a spare") == 2
