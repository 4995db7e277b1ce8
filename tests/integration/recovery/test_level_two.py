"""Level 2 with real launchers: an agent whose surroundings are broken executes itself again."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aegis_elastic.core.events import Renew
from tests.integration.harness import Job, hosts, wait_for

SLEEPER = "import time\nwhile True:\n    time.sleep(0.1)\n"


@pytest.mark.full
def test_an_agent_executes_itself_again_under_its_name_and_training_goes_on(tmp_path: Path) -> None:
    """Its storage is gone when its rank dies; the process that comes after it finds storage again."""
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    storage = tmp_path / "storage"
    storage.mkdir()
    with Job(tmp_path, nnodes="2", flags=["--aegis-bootcheck", "off"]) as job:
        first = job.start(script, worker="a")
        second = job.start(script, worker="b", flags=["--aegis-check-path", f"data={storage}"])
        job.wait_phase("RunCommand")
        job.wait_ranks(2)
        uid = _uid(job, "b")
        shutil.rmtree(storage)
        (rank,) = job.ranks(second).values()
        os.kill(rank.pid, signal.SIGKILL)
        second.wait_output("starting anew in a clean process")
        storage.mkdir()
        view = job.wait_phase("RunCommand", 2)
        job.wait_ranks(2)

        renewals = [e for line in job.journal() for e in line.effects if isinstance(e, Renew)]
        assert [(effect.worker, effect.uid) for effect in renewals] == [("b", uid)]
        assert _uid(job, "b") != uid
        assert view["recoverCount"] == 1, "only the rank's death counts"
        assert second.process.poll() is None, "its process is the one that was started"
        # No process of the renewed launcher inherits the variable.
        for environ in (rank.environ for rank in job.ranks(second).values()):
            assert "AEGIS_RENEWED" not in environ
        job.ctl("quit")
        assert (first.wait(), second.wait()) == (1, 1)


def test_the_host_of_the_plane_renews_itself_and_keeps_the_plane(tmp_path: Path) -> None:
    """A job of one node on a free port, that nobody named: all of it must be the same afterwards."""
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    storage = tmp_path / "storage"
    storage.mkdir()
    with Job(tmp_path, nnodes="1:2") as job:
        flags = ["--aegis-bootcheck", "off", "--rdzv-conf", "last_call_timeout=2"]
        only = job.start(script, worker="a", flags=[*flags, "--aegis-check-path", f"data={storage}"])
        other = job.start(script, worker="b", flags=flags)
        job.wait(lambda view: view["phase"] == "RunCommand" and len(view["workers"]) == 2)
        job.wait_ranks(2)
        plane = _master(job)
        shutil.rmtree(storage)
        (rank,) = job.ranks(only).values()
        os.kill(rank.pid, signal.SIGKILL)
        only.wait_output("starting anew in a clean process")
        storage.mkdir()
        job.wait_phase("RunCommand", 2)
        job.wait_ranks(2)
        assert _master(job) == plane, "the plane has not been started again"
        job.ctl("quit")
        assert (only.wait(), other.wait()) == (1, 1)


@pytest.mark.full
def test_on_kubernetes_the_platform_is_asked_for_a_clean_container(
    tmp_path: Path, unmet: Callable[[str], None]
) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    storage = tmp_path / "storage"
    storage.mkdir()
    with hosts(2, tmp_path, unmet) as net:
        endpoint = f"{net.hosts[0].address}:29400"
        with Job(tmp_path, nnodes="2", endpoint=endpoint, flags=["--aegis-bootcheck", "off"]) as job:
            first = job.start(script, worker="a", host=net.hosts[0])
            flags = ["--aegis-check-path", f"data={storage}", "--aegis-renew-exit-code", "42"]
            pod: dict[str, Any] = {
                "worker": "b", "host": net.hosts[1], "flags": flags,
                "env": {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            }  # fmt: skip
            second = job.start(script, **pod)
            job.wait_phase("RunCommand")
            job.wait_ranks(2)
            shutil.rmtree(storage)
            (rank,) = job.ranks(second).values()
            os.kill(rank.pid, signal.SIGKILL)
            assert second.wait() == 42
            storage.mkdir()
            # What the kubelet does: the same container again.
            again = job.start(script, **pod)
            view = job.wait_phase("RunCommand", 2)
            assert [worker["name"] for worker in view["workers"]] == ["a", "b"]
            assert view["recoverCount"] == 1
            job.ctl("quit")
            assert (first.wait(), again.wait()) == (1, 1)


def _uid(job: Job, worker: str) -> str:
    joins = [line.event for line in job.journal() if getattr(line.event, "worker", "") == worker]
    return str([event for event in joins if hasattr(event, "node_ip")][-1].uid)  # type: ignore[union-attr]


def _master(job: Job) -> int:
    found: list[int] = []

    def check() -> bool:
        found[:] = [
            pid
            for pid in job.processes()
            if b"aegis_elastic.control.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return len(found) == 1

    wait_for(check, "one master")
    return found[0]
