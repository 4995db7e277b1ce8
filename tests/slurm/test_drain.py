"""Nodes drained in a real Slurm: by the driver, through aegisctl, and what is somebody else's stays so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from aegis_elastic.control.isolation.contract import Outcome
from tests.slurm.cluster import Cluster

AEGISCTL = str(Path(sys.executable).parent / "aegisctl")
# The driver as a master uses it, run where scontrol finds its cluster.
DRIVER = """
import asyncio, json, sys
from aegis_elastic.control.isolation.contract import call_driver
from aegis_elastic.control.isolation.slurm import Slurm
driver, action, node = Slurm(20), sys.argv[1], sys.argv[2]
if action == "exclude":
    outcome = asyncio.run(driver.exclude(node, sys.argv[3].split(",")))
else:
    outcome = asyncio.run(call_driver(driver, action, node, "gpu.missing"))
print(json.dumps(outcome))
"""


def driven(slurm: Cluster, *arguments: str) -> Outcome:
    done = slurm.command([sys.executable, "-c", DRIVER, *arguments])
    assert done.returncode == 0, done.stderr
    return Outcome(*json.loads(done.stdout))


def state(slurm: Cluster, node: str) -> tuple[str, str]:
    """A node's state and the reason of it."""
    shown = slurm.command(
        ["sinfo", "-h", "-N", "-n", node, "-p", "batch", "-O", "StateLong:30,Reason:60"]
    ).stdout
    name, _, reason = shown.strip().partition(" ")
    return name.rstrip("*"), reason.strip()  # a star: it has not answered yet


@pytest.mark.full
def test_a_node_is_drained_with_the_reason_and_resumed(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2) as slurm:
        outcome = driven(slurm, "isolate", "n1.cluster.example")
        assert outcome == (True, "n1 is drained in Slurm (aegis: gpu.missing)")
        assert state(slurm, "n1") == ("drained", "aegis: gpu.missing")
        assert driven(slurm, "isolate", "n1") == (True, "n1 is drained already: aegis: gpu.missing")
        # Nothing new starts there.
        assert slurm.command(["srun", "-N1", "hostname"]).stdout.strip() == "n2"
        assert driven(slurm, "release", "n1") == (True, "n1 is resumed in Slurm")
        assert state(slurm, "n1")[0] == "idle"
        assert driven(slurm, "release", "n1").ok

        slurm.command(["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=new cables"])
        assert driven(slurm, "isolate", "n2").ok
        theirs = driven(slurm, "release", "n2")
        assert not theirs.ok and "it was not our doing (new cables)" in theirs.message
        assert state(slurm, "n2") == ("drained", "new cables")
        unknown = driven(slurm, "isolate", "n9")
        assert not unknown.ok and "cannot see node n9 in Slurm" in unknown.message

        # A job that waits is kept from a node without any right to drain it.
        held = slurm.submit("#!/bin/sh\nhostname\n", "--hold", "-N1")
        assert driven(slurm, "exclude", str(held), "n2").ok
        assert slurm.show(held)["ExcNodeList"] == "n2"
        assert not driven(slurm, "exclude", "1; reboot", "n2").ok
        slurm.command(["scancel", str(held)])

        shared = ["--state-dir", str(tmp_path)]
        taint = [
            AEGISCTL,
            "taint",
            "n1",
            "--reason",
            "gpu.missing",
            "--isolate",
            "--isolation",
            "slurm",
            *shared,
        ]
        done = slurm.command(taint)
        assert done.returncode == 0 and "n1 is drained in Slurm (aegis: gpu.missing)" in done.stdout
        assert state(slurm, "n1")[0] == "drained"
        exclude = slurm.command([AEGISCTL, "nodes", "--exclude", *shared]).stdout
        assert exclude == "n1\n"
        done = slurm.command([AEGISCTL, "untaint", "n1", "--isolation", "slurm", *shared])
        assert done.returncode == 0, done.stderr
        assert state(slurm, "n1")[0] == "idle"
