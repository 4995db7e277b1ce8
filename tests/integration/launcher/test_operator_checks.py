"""`aegisctl check|bootcheck|burn --job`: every node of a running job is checked, and training goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import Job, Launch
from tests.integration.recovery.test_two_nodes import Training

pytestmark = pytest.mark.timeout(240)
FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")


def nodes_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """Worker -> what it answered, by check."""
    document = json.loads(done.stdout)
    assert document["pass"] == (done.returncode == 0), document
    return {
        node["worker"]: {result["checkType"]: result for result in node["results"]}
        for node in document["nodes"]
    }


def test_every_node_of_a_job_is_checked_while_it_trains(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with Job(tmp_path, nnodes="2", nproc=1, flags=FLAGS) as job:
        training = Training(job)
        # On one of them a directory doesn't answer.
        launches: list[Launch] = [
            training.start("a"), training.start("b", "--aegis-check-path", f"data={fifo}")
        ]  # fmt: skip
        job.wait_phase("RunCommand", 1)
        before = {rank: process.pid for rank, process in job.wait_ranks(2).items()}

        healthy = nodes_of(job.ctl("check", "gpu", "hang", "--json"))
        assert {name: list(found) for name, found in healthy.items()} == {
            "a": ["gpu", "hang"],
            "b": ["gpu", "hang"],
        }
        for found in healthy.values():
            assert "1 live, none frozen: rank" in found["hang"]["result"], "the ranks are checked"

        done = job.ctl("check", "io", "rdma", "--budget", "io=0.7")
        assert done.returncode == 1
        assert "io.timeout  no answer in 0.7 s (it was waiting for data" in done.stdout
        assert done.stdout.count("no RDMA adapter") == 2, "the others' results arrive"

        assert {rank: process.pid for rank, process in job.ranks().items()} == before, "nobody noticed"
        training.end(*launches)
        ended = job.ctl("check")
        assert ended.returncode == 3
        assert "the job has ended" in ended.stderr


@pytest.mark.full
def test_what_would_disturb_a_training_wants_to_be_asked_for(tmp_path: Path) -> None:
    with Job(tmp_path, nnodes="2", nproc=1, flags=FLAGS) as job:
        training = Training(job)
        launches = [training.start("a"), training.start("b")]
        job.wait_phase("RunCommand", 1)
        for command in (("check", "allreduce_connection"), ("burn", "--minutes", "0.02")):
            refused = job.ctl(*command)
            assert refused.returncode == 2
            assert "would disturb the training" in refused.stderr
        wrong = job.ctl("check", "--path", "data=/tmp")
        assert wrong.returncode == 2 and "its nodes know theirs" in wrong.stderr

        boot = job.ctl("bootcheck")
        assert boot.returncode == 0, boot.stdout + boot.stderr
        assert "without health, which would disturb a training" in boot.stderr
        assert "2 workers alike: torch" in boot.stdout

        met = nodes_of(job.ctl("check", "allreduce_connection", "--while-training", "--json"))
        assert {found["allreduce_connection"]["result"] for found in met.values()} == {
            "allreduce_connection: 2 nodes form a group, and its sum is right"
        }
        burnt = nodes_of(job.ctl("burn", "--minutes", "0.02", "--while-training", "--json"))
        assert [list(found) for found in burnt.values()] == [["burn cpu"], ["burn cpu"]]
        # One that doesn't answer is a finding, and the other's answer is shown all the same.
        launches[1].process.send_signal(signal.SIGSTOP)
        silent = job.ctl("check", "runtime", "--budget", "runtime=1")
        launches[1].process.send_signal(signal.SIGCONT)
        assert silent.returncode == 1
        assert "NO ANSWER in 21 s" in silent.stdout
        assert "a on " in silent.stdout and "usable (no GPU here" in silent.stdout
        training.end(*launches)
