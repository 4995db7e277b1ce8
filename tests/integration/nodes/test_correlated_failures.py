"""It is not the nodes: storage that is down for everybody, and half of the nodes broken at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checks.conftest import compiler as compiler
from tests.checks.conftest import libraries as libraries
from tests.integration.harness import Job, hosts, stays, wait_for
from tests.integration.nodes.test_storm_guard import SCRIPT
from tests.observe.receiver import receiver

pytestmark = [pytest.mark.netns, pytest.mark.timeout(240)]
FLAGS = ("--aegis-bootcheck", "off", "--aegis-guard-probe-s", "0.5", "--aegis-guard-release-jitter-s", "0.2")


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 4 MB that all hosts see."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def transitions(job: Job) -> list[str]:
    return [line.transition for line in job.journal()]


def test_a_storage_outage_for_all_charges_no_retry_and_resumes_by_itself(
    tmp_path: Path, unmet: Callable[[str], None]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with (
        small_disk(tmp_path / "ckpt") as disk,
        hosts(2, tmp_path, unmet) as net,
        Job(
            tmp_path,
            nnodes="2",
            endpoint=f"{net.hosts[0].address}:29400",
            flags=(*FLAGS, "--aegis-check-path", f"checkpoint={disk}"),
            max_restarts=0,  # so a single charge that stays would end the job
        ) as job,
    ):
        end = str(tmp_path / "end")
        launches = [job.start(tmp_path / "train.py", end, host=host) for host in net.hosts]
        job.wait_phase("RunCommand", 1)
        ranks = job.wait_ranks(2)
        (disk / "full").write_bytes(bytes(4 << 20))
        os.kill(ranks[1].pid, signal.SIGKILL)
        view = job.wait(lambda view: "refund" in transitions(job), "the refund")
        assert view["recoverCount"] == 0
        # It is probed again and again, and nothing happens: nobody leaves, nobody is restarted.
        stays(lambda: transitions(job)[-1] not in ("release", "leave", "renew", "advance"), 3)
        (disk / "full").unlink()
        job.wait_phase("RunCommand", 2)
        job.wait_ranks(2, restart_count=1)
        status = job.status()
        assert (status["recoverCount"], status["errorNodes"]) == (0, [])
        names = transitions(job)
        order = [
            name for name in names if name in ("error", "held", "refund", "released", "release", "advance")
        ]
        assert order[2:] == ["error", "held", "refund", "released", "release", "advance"], order
        [held] = [line.reason for line in job.journal() if line.transition == "held"]
        assert held == "recovery waits: storage is down for all 2 nodes (io.no_space)"
        Path(end).touch()
        assert [launch.wait() for launch in launches] == [0, 0]


@pytest.mark.full
def test_a_correlated_failure_of_half_the_nodes_isolates_none(
    tmp_path: Path, libraries: Path, unmet: Callable[[str], None]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    state = tmp_path / "gpus"
    state.write_text("* count 8\n")
    nvidia = Path(shutil.copytree(libraries, tmp_path / "nvidia"))
    broken = tmp_path / "gpus-2"
    broken.write_text("* count 8\n")
    with (
        receiver() as received,
        hosts(4, tmp_path, unmet) as net,
        Job(
            tmp_path,
            nnodes="4",
            endpoint=f"{net.hosts[0].address}:29400",
            flags=(*FLAGS, "--aegis-gpus-per-node", "8"),
            max_restarts=1,
        ) as job,
    ):
        end = str(tmp_path / "end")
        launches = []
        for number, host in enumerate(net.hosts):
            env = {
                "LD_LIBRARY_PATH": str(nvidia),
                "FAKE_NVML_STATE": str(broken if number >= 2 else state),
                "AEGIS_NOTIFY": received.url,  # which can't be reached from there: nobody minds
            }
            launches.append(job.start(tmp_path / "train.py", end, host=host, env=env))
        job.wait_phase("RunCommand", 1)
        ranks = job.wait_ranks(4)
        broken.write_text("* count 7\n")
        os.kill(ranks[3].pid, signal.SIGKILL)
        wait_for(lambda: transitions(job).count("release") >= 2, "everybody looks again, twice")
        assert not {"leave", "renew", "evict"} & set(transitions(job))
        broken.write_text("* count 8\n")
        view = job.wait_phase("RunCommand", 2)
        assert len(view["workers"]) == 4
        status = job.status()
        assert (status["recoverCount"], status["errorNodes"]) == (0, [])
        reasons = [line.reason for line in job.journal() if line.transition == "held"]
        assert reasons[0].startswith("recovery waits: 2 of 4 nodes are found broken together (gpu.missing)")
        Path(end).touch()
        assert [launch.wait() for launch in launches] == [0] * 4


@pytest.mark.full
def test_first_checks_that_condemn_half_the_nodes_end_the_job_and_isolate_none(
    tmp_path: Path, libraries: Path, unmet: Callable[[str], None]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    nvidia = Path(shutil.copytree(libraries, tmp_path / "nvidia"))
    states = {7: tmp_path / "gpus-7", 8: tmp_path / "gpus-8"}
    for count, state in states.items():
        state.write_text(f"* count {count}\n")
    with (
        hosts(4, tmp_path, unmet) as net,
        Job(
            tmp_path,
            nnodes="4",
            endpoint=f"{net.hosts[0].address}:29400",
            flags=("--aegis-bootcheck", "env", "--aegis-gpus-per-node", "8"),
        ) as job,
    ):
        launches = []
        for number, host in enumerate(net.hosts):
            env = {"LD_LIBRARY_PATH": str(nvidia), "FAKE_NVML_STATE": str(states[7 if number > 1 else 8])}
            launches.append(job.start(tmp_path / "train.py", str(tmp_path / "end"), host=host, env=env))
        assert [launch.wait() for launch in launches] == [1] * 4
        why = "the first checks: 2 of 4 nodes are found broken together (gpu.missing): at most 30% can be the"
        assert why in launches[0].output
        report = job.report()
        assert (report["errorNodes"], report["recoverCount"]) == ([], 0)
        assert "leave" not in transitions(job)
