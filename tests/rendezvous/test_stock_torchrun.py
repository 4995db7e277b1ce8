"""The stock launcher with `--rdzv-backend aegis`: real torchrun, real plane, real crashes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.integration.harness import Job

CONF = "aegis_bootcheck=off,aegis_troubleshoot=off"
# One gloo step after the other until told to end; a survivor of a crash raises, as gloo makes it.
TRAINING = """
import os, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, life, folder = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1]
end = torch.zeros(1)
while not end.item():
    end.fill_(float(life and os.path.exists(f"{folder}/end")))
    dist.all_reduce(end)
    if rank == 1 and not life:
        os._exit(17)
    time.sleep(0.02)
dist.destroy_process_group()
"""
# Ranks that would train for ever; without torch, so that a start costs little.
IDLE = """
import os, sys, time
while not os.path.exists(f"{sys.argv[1]}/end"):
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and sys.argv[2:]:
        os._exit(17)
    time.sleep(0.02)
"""
FAILING = "import sys; sys.exit(7)"


def test_a_crash_on_one_node_is_recovered_and_accounted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    with Job(tmp_path / "job", nproc=2, max_restarts=2, torchrun_conf=CONF) as job:
        launch = job.start(script, str(tmp_path))
        job.wait_phase("RunCommand", 2)
        job.wait_ranks(2, restart_count=1)
        (tmp_path / "end").touch()
        assert launch.wait() == 0, launch.output
        view = job.status()
        assert (view["phase"], view["recoverCount"]) == ("Succeed", 1)
        root = next(entry for entry in job.report()["failures"] if entry["role"] == "root")
        assert (root["rank"], root["exitCode"]) == (1, 17)
        assert "succeeded: at most 2 restarts, 1 used" in launch.output
        # Waiting in vain is how we wait: torch's C++ must not fill the user's terminal with it.
        assert "waitForInput" not in launch.output


def test_a_rank_killed_on_one_of_two_nodes_restarts_both(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(IDLE)
    with Job(tmp_path / "job", nnodes="2", max_restarts=2, torchrun_conf=CONF) as job:
        first, second = (job.start(script, str(tmp_path), worker=worker) for worker in "ab")
        job.wait_phase("RunCommand", 1)
        before = job.wait_ranks(2)
        ((number, victim),) = job.ranks(second).items()
        os.kill(victim.pid, signal.SIGKILL)
        job.wait_phase("RunCommand", 2)
        after = job.wait_ranks(2)
        assert not {rank.pid for rank in before.values()} & {rank.pid for rank in after.values()}
        # Each incarnation has a store of its own, which both nodes' ranks use.
        stores = {rank.environ["MASTER_PORT"] for rank in after.values()}
        assert len(stores) == 1
        assert stores.isdisjoint(rank.environ["MASTER_PORT"] for rank in before.values())
        (tmp_path / "end").touch()
        assert (first.wait(), second.wait()) == (0, 0), job.transcript()
        retries = [worker["retries"] for worker in job.status()["workers"]]
        assert retries == [1, 1]
        root = next(entry for entry in job.report()["failures"] if entry["role"] == "root")
        assert (root["worker"], root["rank"], root["signal"]) == ("b", number, "SIGKILL")


def test_when_the_restarts_are_used_up_both_say_so(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(FAILING)
    with Job(tmp_path / "job", max_restarts=1, torchrun_conf=CONF) as job:
        launch = job.start(script)
        assert launch.wait() == 1
        assert "exitcode  : 7" in launch.output  # torchrun's own table
        assert "[aegis] failed: at most 1 restarts, 1 used" in launch.output
        view = job.status()
        assert (view["phase"], view["workers"][0]["retries"]) == ("Failed", 2)


def test_a_signal_ends_torchrun_and_nothing_is_left(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(IDLE)
    with Job(tmp_path / "job", nproc=2, max_restarts=2, torchrun_conf=CONF) as job:
        launch = job.start(script, str(tmp_path))
        job.wait_ranks(2)
        launch.kill(signal.SIGTERM)
        assert launch.wait() == 1  # as torchrun: SignalException
        assert "SignalException" in launch.output


def test_a_plane_that_nobody_serves_leaves_an_ordinary_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(IDLE)
    with Job(tmp_path / "job", nproc=2, max_restarts=1, torchrun_conf=CONF) as job:
        # No nats-server can be started: it is the machine's fault, and no reason not to train.
        broken = {"AEGIS_NATS_SERVER": "/nonexistent/nats-server"}
        launch = job.start(script, str(tmp_path), "crash", env=broken)
        launch.wait_output("WITHOUT FAULT TOLERANCE")
        job.wait_ranks(2, restart_count=1)
        (tmp_path / "end").touch()
        assert launch.wait() == 0, launch.output
