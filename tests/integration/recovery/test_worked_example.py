"""Section 4's worked example, with real processes on three hosts: who is charged, when, and where it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from aegis_elastic.core.protocol.orders import Action
from aegis_elastic.testing.faults import Gates
from aegis_elastic.testing.netns import Net
from tests.integration.harness import Job, Launch, View, hosts, wait_for

# All ranks meet in every step, so with gloo the death of one makes all others raise.
TRAIN = """
import os, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
here = f"{sys.argv[1]}/{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
for step in range(1_000_000):
    dist.all_reduce(torch.ones(1))
    if step == 1:
        open(here, "w").close()
    time.sleep(0.02)
"""
HOSTS = ("node0", "node1", "node2")
FLAGS = ("--aegis-bootcheck", "env")


class ExampleJob:
    """The job of the example: workers are numbered like their hosts."""

    def __init__(self, job: Job, net: Net, script: Path) -> None:
        self._job = job
        self._hosts = net.hosts
        self._steps = script.parent / "steps"
        self._steps.mkdir()
        self._script = script
        self._launches: dict[int, Launch] = {}
        self.gates = Gates(script.parent / "gates")

    def launch(self, *workers: int) -> None:
        """What a scheduler does: start `aegis-run` on that worker's host, for the first time or again."""
        for worker in workers:
            self._launches[worker] = self._job.start(
                self._script, str(self._steps), host=self._hosts[worker], gates=self.gates
            )

    def kill_agent(self, *workers: int) -> None:
        for worker in workers:
            self._launches[worker].process.send_signal(signal.SIGKILL)

    def kill_rank_of(self, worker: int) -> None:
        (rank,) = self._job.ranks(self._launches[worker]).values()
        os.kill(rank.pid, signal.SIGKILL)

    def exit_codes(self) -> list[int]:
        return [self._launches[worker].wait() for worker in range(len(HOSTS))]

    def wait_training(self, incarnation: int) -> None:
        """Until every rank of that incarnation has been through a step with all others."""
        self._job.wait_phase("RunCommand", incarnation)
        marks = [self._steps / f"{rank}.{incarnation - 1}" for rank in range(len(HOSTS))]
        wait_for(lambda: all(mark.exists() for mark in marks), f"training of incarnation {incarnation}")

    def expect(self, phase: str, retries: tuple[int, ...], recover_count: int) -> None:
        """Wait for the phase, then compare the accounts as people are shown them."""
        self._job.wait_phase(phase)
        shown = self._job.status()
        assert shown["phase"] == phase
        assert counts(shown) == retries
        assert shown["recoverCount"] == recover_count
        assert shown["maxRetry"] == 2


def counts(view: View) -> tuple[int, ...]:
    by_name = {worker["name"]: worker["retries"] for worker in view["workers"]}
    return tuple(by_name[name] for name in HOSTS)


@pytest.mark.netns
@pytest.mark.timeout(300)
def test_three_workers_two_retries_come_out_exactly(tmp_path: Path, unmet: Callable[[str], None]) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with (
        hosts(HOSTS, tmp_path, unmet) as net,
        Job(
            tmp_path, nnodes="3", max_restarts=2, endpoint=f"{net.hosts[0].address}:29400", flags=FLAGS
        ) as job,
    ):
        example = ExampleJob(job, net, script)
        example.launch(0, 1, 2)
        example.wait_training(1)
        example.expect("RunCommand", (0, 0, 0), 0)
        master = job.status()["plane"]["pid"]

        # Worker 0's agent is killed, and with it the launcher that had started the control plane.
        example.kill_agent(0)
        example.expect("Restarting", (1, 0, 0), 1)
        example.gates.close(Action.TROUBLESHOOT)
        example.launch(0)
        example.expect("Troubleshooting", (1, 0, 0), 1)

        # Workers 1 and 2 die during troubleshooting: not counted.
        example.kill_agent(1, 2)
        example.expect("Restarting", (1, 0, 0), 1)
        example.launch(1, 2)
        example.expect("Troubleshooting", (1, 0, 0), 1)
        example.gates.open(Action.TROUBLESHOOT)
        example.wait_training(2)
        example.expect("RunCommand", (1, 1, 1), 1)

        # Worker 1's training fails; all others raise too, and are not charged for it.
        example.gates.close(Action.TROUBLESHOOT)
        example.kill_rank_of(1)
        example.expect("Troubleshooting", (1, 2, 1), 2)
        example.gates.open(Action.TROUBLESHOOT)
        example.wait_training(3)
        example.expect("RunCommand", (2, 2, 2), 2)
        assert job.status()["plane"]["pid"] == master, "the plane outlives its launcher and is taken up again"

        # One failure more than allowed: diagnosed, then the job is closed.
        example.gates.close(Action.TROUBLESHOOT)
        example.kill_rank_of(2)
        example.expect("Troubleshooting", (2, 2, 3), 2)
        example.gates.open(Action.TROUBLESHOOT)
        example.expect("Failed", (2, 2, 3), 3)

        assert example.exit_codes() == [1, 1, 1]
        ended = job.status()
        assert {worker["innerPhase"] for worker in ended["workers"]} == {"Failed"}
        report = job.report()
        assert [entry["cause"].partition(":")[0] for entry in report["incarnations"]] == [
            "node0 lost in RunCommand", "node1 failed", "node2 failed",
        ]  # fmt: skip
        failures = [(entry["role"], entry["worker"], entry["signal"]) for entry in report["failures"]]
        roots = [entry[1:] for entry in failures if entry[0] == "root"]
        assert roots == [("node0", None), ("node1", "SIGKILL"), ("node2", "SIGKILL")]
        # gloo's survivors complained of node0 before it was known to be lost, and were not believed.
        assert {"node1", "node2"} & {worker for role, worker, _ in failures if role == "consequence"}
