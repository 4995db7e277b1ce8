"""The Slurm step that a launcher was started by: one task on each node of the job.

Everything comes from the task's environment; the list of hosts is in Slurm's compressed form, which only
`scontrol show hostnames` expands correctly.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aegis_elastic.control.host.errors import UsageError

# Below the kernel's ephemeral ports, and above the usual services of a node.
_PORT_MIN, _PORTS = 20000, 10000
_SCONTROL_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Allocation:
    """This launcher's step, and its hosts in Slurm's order."""

    job_id: int
    hosts: tuple[str, ...]

    @property
    def port(self) -> int:
        """A port that all nodes of the job derive alike, and most other jobs on a shared node don't."""
        # Two ports a job: the next one is for the rendezvous without a plane.
        return _PORT_MIN + 2 * (self.job_id % (_PORTS // 2))


def show_hostnames(compressed: str) -> tuple[str, ...]:
    """The hosts in a list such as `n[1-3,7]`. UsageError if scontrol can't be run or fails."""
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
    """The step that we are a task of, if it has one task on each of several nodes; None otherwise.

    In a batch script without srun, and where srun starts a task for each GPU, the endpoint must be given by
    flags.
    """
    job_id = environment.get("SLURM_JOB_ID", "")
    if node_rank(environment) is None or not job_id.isdecimal():
        return None
    return Allocation(int(job_id), hostnames(environment["SLURM_STEP_NODELIST"]))


def node_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Our node's rank in a step that has one task on each of several nodes; None otherwise."""
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
