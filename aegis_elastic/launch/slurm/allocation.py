"""What Slurm tells a launcher that it starts: one step over all nodes of the job, one launcher a node.

Everything comes from the environment of the step's task; the list of hosts is Slurm's own compressed form,
which `scontrol show hostnames` alone expands right.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aegis_elastic.control.host.errors import UsageError

# Below where kernels hand out ports of their own accord, and above the services that a node may run.
_PORT_MIN, _PORTS = 20000, 10000
_SCONTROL_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Allocation:
    """This launcher's step, and its hosts in Slurm's order."""

    job_id: int
    hosts: tuple[str, ...]

    @property
    def port(self) -> int:
        """A port that all nodes of the job derive alike, and that other jobs on a shared node hardly have."""
        # Two ports a job: the one behind it is for meeting without the plane.
        return _PORT_MIN + 2 * (self.job_id % (_PORTS // 2))


def show_hostnames(compressed: str) -> tuple[str, ...]:
    """The hosts in a list such as `n[1-3,7]`. UsageError if scontrol can't say."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", compressed],
            capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"cannot read Slurm's list of nodes {compressed!r}: scontrol: {error}") from error
    if done.returncode != 0 or not done.stdout.split():
        raise UsageError(f"cannot read Slurm's list of nodes {compressed!r}: {done.stderr.strip()}")
    return tuple(done.stdout.split())


def allocation(
    environment: Mapping[str, str] = os.environ,
    hostnames: Callable[[str], tuple[str, ...]] = show_hostnames,
) -> Allocation | None:
    """The step that we are a task of, if it has one task on each of several nodes; None anywhere else.

    In a batch script without srun, and where srun starts a task for each GPU, the script says by flags where
    nodes meet; nothing is guessed there.
    """
    job_id = environment.get("SLURM_JOB_ID", "")
    if place(environment) is None or not job_id.isdecimal():
        return None
    return Allocation(int(job_id), hostnames(environment["SLURM_STEP_NODELIST"]))


def place(environment: Mapping[str, str] = os.environ) -> int | None:
    """Our node's place in a step that has one task on each of several nodes; None anywhere else."""
    names = ("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS")
    try:
        node, nodes, tasks = (int(environment[name]) for name in names)
    except (KeyError, ValueError):
        return None
    return node if tasks == nodes > 1 and "SLURM_STEP_NODELIST" in environment else None


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often Slurm has put this job back into the queue and started it again."""
    text = environment.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def in_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether srun has started us: it then returns the highest exit code of all tasks."""
    return "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment
