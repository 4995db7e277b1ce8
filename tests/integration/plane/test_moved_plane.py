"""The plane's host is replaced, and its name leads to another address: running launchers find it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aegis_elastic.testing.netns import Host, Net
from tests.integration.harness import Job, wait_for
from tests.integration.planes import steps_of, write_worker

QUICK = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")


def lead(net: Net, name: str, host: Host) -> None:
    """Have a name lead to this host, everywhere."""
    for each in net.hosts:
        lines = [f"{other.address} {other.name}" for other in net.hosts] + [f"{host.address} {name}"]
        text = "127.0.0.1 localhost\\n" + "\\n".join(lines)
        done = each.run(["/bin/sh", "-c", f"printf '{text}\\n' > /etc/hosts"])
        assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.netns
@pytest.mark.parametrize("net", [4], indirect=True)
def test_a_standing_master_that_is_replaced_elsewhere_leads_on(net: Net, tmp_path: Path) -> None:
    script = write_worker(tmp_path)
    flags = (*QUICK, "--aegis-plane", "plane:29700")
    first, second, *nodes = net.hosts
    lead(net, "plane", first)
    with Job(tmp_path, nnodes="2", endpoint=f"{nodes[0].address}:29500", flags=flags) as job:

        def master(host: Host) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "aegis_elastic.launch.master", *job._flags]
            with open(tmp_path / f"master-{host.name}.txt", "w") as output:
                how = {"env": job._environ(tmp_path / "shared"), "cwd": tmp_path}
                return host.popen(command, stdout=output, stderr=output, **how)  # type: ignore[arg-type]

        master(first)
        launches = [job.start(script, str(tmp_path), host=node) for node in nodes]
        job._plane_state = tmp_path / "shared"
        job.wait_phase("RunCommand", 1)
        ranks = job.wait_ranks(2, restart_count=0)

        first.power_off()
        first.link_down()
        lead(net, "plane", second)
        standing = master(second)
        for launch in launches:
            launch.wait_output("the control plane can be reached again")
        steps = steps_of(tmp_path, 0)
        wait_for(lambda: steps_of(tmp_path, 0) > steps, "steps")
        assert {rank.pid for rank in job.ranks().values()} == {rank.pid for rank in ranks.values()}

        # Protected again: it is the new master that charges this, and has everybody start again.
        os.kill(ranks[1].pid, signal.SIGKILL)
        job.wait_phase("RunCommand", 2)
        job.wait_ranks(2, restart_count=1)
        (tmp_path / "end").touch()
        assert [launch.wait() for launch in launches] == [0, 0]
        assert standing.wait(30) == 0
        assert job.report()["recoverCount"] == 1
