"""Nodes that no job is to use, through real launchers: each agent on a host of its own, one store for all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aegis_elastic.testing.netns import Host, Net
from tests.integration.harness import Job, Launch, wait_for
from tests.integration.planes import write_worker

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
        "from aegis_elastic.control.cluster import of_cluster\n"
        "from aegis_elastic.core import nodes\n"
        "async def main():\n"
        "    scope = of_cluster(sys.argv[1], '')\n"
        "    found = time.time() - 90000\n"
        "    taint = nodes.NodeTaint('gpu.missing', 'hardware', found, 'default/old/1', found + 86400)\n"
        "    await scope.change(sys.argv[2], lambda record: nodes.tainted(record, taint))\n"
        "    await scope.close()\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", script, str(shared), node], check=True, timeout=60)
