"""A node with a broken GPU leaves and a spare steps in; a check that hangs costs its budget and nothing else.

Three hosts of their own. Their GPUs are a stand-in for NVIDIA's library, behind the real client library.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checks.conftest import compiler as compiler
from tests.checks.conftest import libraries as libraries
from tests.integration.harness import Job, Launch, hosts
from tests.integration.recovery.test_two_nodes import Training

pytestmark = [pytest.mark.netns, pytest.mark.timeout(240)]
NODES = ("a", "b", "c")
HEALTHY = "* count 8\n"


class Cluster:
    """Hosts with eight GPUs each, and one job of two of them."""

    def __init__(self, net: Any, job: Job, folder: Path, libraries: Path) -> None:
        self.training = Training(job)
        self._hosts = {host.name: host for host in net.hosts}
        self._states = {name: folder / f"gpus-{name}" for name in NODES}
        # Below the one folder that all hosts share.
        self._libraries = Path(shutil.copytree(libraries, folder / "nvidia"))
        for name in NODES:
            self.set_gpu_state(name, HEALTHY)

    def set_gpu_state(self, name: str, state: str) -> None:
        """What the GPUs of this host are from now on."""
        new = self._states[name].with_suffix(".new")
        new.write_text(state)
        new.replace(self._states[name])

    def start(self, name: str) -> Launch:
        job = self.training.job
        env = {"LD_LIBRARY_PATH": str(self._libraries), "FAKE_NVML_STATE": str(self._states[name])}
        done = str(job.folder / "done")
        return job.start(self.training.script, done, worker=name, host=self._hosts[name], env=env)


def faulty(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(node["nodeName"], node["kind"], node["reason"]) for node in report["errorNodes"]]


@pytest.mark.full
def test_a_missing_gpu_found_by_the_bootcheck_isolates_the_node(
    tmp_path: Path, libraries: Path, unmet: Callable[[str], None]
) -> None:
    flags = ["--aegis-bootcheck", "env", "--aegis-gpus-per-node", "8", "--aegis-isolate-exit-code", "17"]
    with hosts(NODES, tmp_path, unmet) as net:
        endpoint = f"{net.hosts[0].address}:29400"
        with Job(tmp_path, nnodes="2", nproc=1, flags=flags, endpoint=endpoint) as job:
            cluster = Cluster(net, job, tmp_path, libraries)
            cluster.set_gpu_state("b", "* count 7\n")
            first, second = cluster.start("a"), cluster.start("b")
            assert second.wait() == 17
            assert "this node is faulty: gpu.missing" in second.output
            third = cluster.start("c")
            view = job.wait_phase("RunCommand", 1)
            assert {worker["node"] for worker in view["workers"]} == {"a", "c"}
            assert view["recoverCount"] == 0
            cluster.training.end(first, third)
            report = job.report()
    assert faulty(report) == [("b", "hardware", "gpu.missing")]
    assert report["reschedules"] == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("state", "finding"),
    [
        pytest.param("* count 8\n3 hang:nvmlDeviceGetTemperature 1\n", "gpu.timeout", id="a call that hangs"),
        pytest.param("* count 7\n", "gpu.missing", id="a card gone"),
    ],
)
def test_a_gpu_that_breaks_while_training_runs_brings_the_spare_in(
    tmp_path: Path, libraries: Path, unmet: Callable[[str], None], state: str, finding: str
) -> None:
    flags = ["--aegis-bootcheck", "off", "--aegis-gpus-per-node", "8", "--aegis-check-budget", "gpu=2"]
    with hosts(NODES, tmp_path, unmet) as net:
        endpoint = f"{net.hosts[0].address}:29400"
        with Job(tmp_path, nnodes="2", nproc=1, flags=flags, endpoint=endpoint) as job:
            cluster = Cluster(net, job, tmp_path, libraries)
            first, second = cluster.start("a"), cluster.start("b")
            job.wait_phase("RunCommand", 1)
            spare = cluster.start("c")
            spare.wait_output("waiting as a spare")
            job.wait_ranks(2, restart_count=0)
            cluster.set_gpu_state("b", state)
            (rank,) = job.ranks(second).values()
            os.kill(rank.pid, signal.SIGKILL)
            assert second.wait() == 1
            view = job.wait_phase("RunCommand", 2)
            assert {worker["node"] for worker in view["workers"]} == {"a", "c"}
            assert view["recoverCount"] == 1, "the rank's death counts, the node's leaving doesn't"
            cluster.training.end(first, spare)
            report = job.report()
    assert faulty(report) == [("b", "hardware", finding)]
    (root,) = [failure for failure in report["failures"] if failure["role"] == "root"]
    assert (root["worker"], root["class"], root["level"]) == ("b", "hardware", 3)
    ran = [check for check in report["checks"] if check["worker"] == "b"]
    assert {check["checkType"]: check["pass"] for check in ran} == {
        "io": True, "gpu": False, "runtime": True, "rdma": True, "hang": True
    }  # fmt: skip


def test_a_directory_that_does_not_answer_costs_its_budget_and_nothing_else(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    flags = ["--aegis-bootcheck", "off", "--aegis-check-path", f"data={fifo}", "--aegis-check-budget", "io=1"]
    with Job(tmp_path, nnodes="1", nproc=1, flags=flags) as job:
        training = Training(job)
        launch = training.start("a")
        job.wait_phase("RunCommand", 1)
        (rank,) = job.wait_ranks(1, restart_count=0).values()
        os.kill(rank.pid, signal.SIGKILL)
        job.wait_phase("RunCommand", 2)
        job.wait_ranks(1, restart_count=1)
        training.end(launch)
        report = job.report()
    found = {check["checkType"]: check for check in report["checks"]}
    assert found["io"]["finding"] == "io.timeout"
    assert "no answer in 1 s (it was waiting for data" in found["io"]["result"]
    assert found["io"]["duration_s"] < 1 + 5
    assert all(found[check]["pass"] for check in ("gpu", "runtime", "rdma", "hang")), "the others' arrive"
