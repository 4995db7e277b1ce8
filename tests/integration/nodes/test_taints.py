"""Nodes that no job is to use, through real launchers: each agent on a host of its own, one store for all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aegis_elastic.testing.netns import Host, Net
from tests.checks.conftest import compiler as compiler
from tests.checks.conftest import libraries as libraries
from tests.integration.harness import Job, Launch, hosts, wait_for
from tests.integration.nodes.test_faulty_nodes import HEALTHY, NODES, Cluster
from tests.integration.planes import write_worker
from tests.integration.recovery.test_two_nodes import Training

FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off", "--aegis-isolate-exit-code", "67")
CTL = [str(Path(sys.executable).parent / "aegisctl")]
two_hosts = pytest.mark.parametrize("net", [2], indirect=True)


def ctl(host: Host, *argv: str) -> str:
    done = host.run([*CTL, *argv])
    assert done.returncode == 0, done.stderr
    return done.stdout


def job_on(net: Net, folder: Path, name: str, nnodes: str = "2", *flags: str) -> Job:
    endpoint = f"{net.hosts[0].address}:29400"
    shared = ("--aegis-state-dir", str(folder / "shared"))
    return Job(folder / name, name, nnodes=nnodes, endpoint=endpoint, flags=(*FLAGS, *shared, *flags))


def refused(launch: Launch, reason: str) -> None:
    assert launch.wait() == 67, launch.output
    assert f"node node1 is not to be used: {reason}" in launch.output


@two_hosts
def test_a_tainted_node_s_agent_is_refused_and_an_untaint_lets_it_in(net: Net, tmp_path: Path) -> None:
    one, other = net.hosts
    shared, script = tmp_path / "shared", write_worker(tmp_path)
    shared.mkdir()
    ctl(other, "taint", "node1", "--reason", "new cables", "--state-dir", str(shared))
    with job_on(net, tmp_path, "second") as job:
        first = job.start(script, str(tmp_path), host=one)
        refused(job.start(script, str(tmp_path), host=other), "new cables (says root@node1)")
        assert f"taints are kept in {shared}" in first.wait_output("taints are")
        ctl(one, "untaint", "node1", "--state-dir", str(shared))
        second = job.start(script, str(tmp_path), host=other)
        job.wait_phase("RunCommand", 1)
        (tmp_path / "end").touch()
        assert (first.wait(), second.wait()) == (0, 0)
        assert job.report()["recoveries"] == []


@pytest.mark.full
@two_hosts
def test_a_taint_that_runs_out_lets_the_agent_in(net: Net, tmp_path: Path) -> None:
    one, other = net.hosts
    shared, script = tmp_path / "shared", write_worker(tmp_path)
    shared.mkdir()
    with job_on(net, tmp_path, "second") as job:
        first = job.start(script, str(tmp_path), host=one)
        job.wait_phase("Pending")
        # Through the job's master this time, which has the same records.
        until_s = time.time() + 30
        done = job.ctl("taint", "node1", "--reason", "new cables", "--expires", "30s")
        assert done.returncode == 0, done.stderr
        refused(job.start(script, str(tmp_path), host=other), "new cables (says root@node0)")
        assert time.time() < until_s
        assert (
            json.loads(ctl(one, "nodes", "--json", "--state-dir", str(shared)))["nodes"][0]["kind"]
            == "manual"
        )
        wait_for(lambda: not job.view()["errorNodes"], "end of the taint")
        assert time.time() >= until_s
        second = job.start(script, str(tmp_path), host=other)
        job.wait_phase("RunCommand", 1)
        (tmp_path / "end").touch()
        assert (first.wait(), second.wait()) == (0, 0)


@pytest.mark.full
@two_hosts
def test_a_broken_node_stands_its_trial_before_it_joins(net: Net, tmp_path: Path) -> None:
    one, other = net.hosts
    shared, script = tmp_path / "shared", write_worker(tmp_path)
    shared.mkdir()
    _was_broken(shared, "node1")
    with job_on(net, tmp_path, "next", "2", "--aegis-probation-burn-s", "0.5") as job:
        first = job.start(script, str(tmp_path), host=one)
        second = job.start(script, str(tmp_path), host=other)
        job.wait_phase("RunCommand", 1)
        assert "node1 is on probation: check and 0.5 s of burn before it takes part" in second.output
        assert "node1 has passed check and burn and may take part again" in second.output
        (tmp_path / "end").touch()
        assert (first.wait(), second.wait()) == (0, 0)
        assert "probation" not in first.output


def _was_broken(shared: Path, node: str) -> None:
    """As a job of yesterday has left it."""
    script = (
        "import asyncio, sys, time\n"
        "from aegis_elastic.control.host.cluster import of_cluster\n"
        "from aegis_elastic.core.policy import node_records\n"
        "async def main():\n"
        "    scope = of_cluster(sys.argv[1], '')\n"
        "    found = time.time() - 90000\n"
        "    until = found + 86400\n"
        "    taint = node_records.NodeTaint('gpu.missing', 'hardware', found, 'default/old/1', until)\n"
        "    await scope.change(sys.argv[2], lambda record: node_records.with_taint(record, taint))\n"
        "    await scope.close()\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", script, str(shared), node], check=True, timeout=60)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_what_one_job_finds_broken_no_other_uses_until_somebody_says_so(
    tmp_path: Path, libraries: Path, unmet: Callable[[str], None]
) -> None:
    listed, shared = tmp_path / "listed", tmp_path / "shared"
    shared.mkdir()
    flags = ["--aegis-bootcheck", "env", "--aegis-troubleshoot", "off", "--aegis-gpus-per-node", "8"]
    flags += ["--aegis-isolate-exit-code", "67", "--aegis-state-dir", str(shared)]
    flags += ["--aegis-isolation", f"file:{listed}"]
    with hosts(NODES, tmp_path, unmet) as net:
        address = net.hosts[0].address
        with Job(tmp_path / "one", "one", nnodes="2", endpoint=f"{address}:29400", flags=flags) as job:
            cluster = Cluster(net, job, tmp_path, libraries)
            cluster.set_gpu_state("b", "* count 7\n")
            first, broken = cluster.start("a"), cluster.start("b")
            assert broken.wait() == 67
            third = cluster.start("c")
            job.wait_phase("RunCommand", 1)
            wait_for(lambda: listed.exists() and listed.read_text().startswith("b # aegis: "), "isolation")
            cluster.training.end(first, third)
            (node,) = job.report()["errorNodes"]
            assert (node["nodeName"], node["kind"], node["job"]) == ("b", "hardware", "one")
        with Job(tmp_path / "two", "two", nnodes="2", endpoint=f"{address}:29500", flags=flags) as job:
            cluster.training = Training(job)
            cluster.set_gpu_state("b", HEALTHY)  # repaired, but nobody has said so
            first, broken = cluster.start("a"), cluster.start("b")
            assert broken.wait() == 67
            assert "node b is not to be used: gpu.missing (says default/one/1)" in broken.output
            assert job.ctl("untaint", "b").returncode == 0
            wait_for(lambda: listed.read_text() == "", "end of the isolation")
            second = cluster.start("b")
            job.wait_phase("RunCommand", 1)
            cluster.training.end(first, second)
