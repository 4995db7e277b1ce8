"""Without the plane for one, or for a while: all nodes go the same way, and every failure is counted once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from aegis_elastic.core.events import Independent, Lost
from aegis_elastic.testing.netns import Host, Net
from tests.integration.harness import Job, wait_for
from tests.integration.planes import bus_port, plane_processes, steps_of, wait_plane, write_worker

FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")
PORT = 29500
# An ordinary script that knows nothing of us: every rank must see the whole world.
WORLD = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print(f"rank {dist.get_rank()} sees a world of {int(ones)}", flush=True)
dist.barrier()
"""


def cut_off(host: Host, job: Job, endpoint: Host) -> None:
    """Block the plane for this host: first contact and bus. Training's own ports stay open."""
    host.block(dst=endpoint.address, dst_port=PORT)
    host.block(dst=endpoint.address, dst_port=bus_port(job))


@pytest.mark.netns
@pytest.mark.parametrize("net", [3], indirect=True)
def test_one_of_three_cannot_reach_the_plane_and_all_run_as_one_world_without_it(
    net: Net, tmp_path: Path
) -> None:
    script = tmp_path / "world.py"
    script.write_text(WORLD)
    flags = (*FLAGS, "--rdzv-conf", "join_timeout=8")
    with Job(tmp_path, nnodes="3", endpoint=f"{net.hosts[0].address}:{PORT}", flags=flags) as job:
        launches = [job.start(script, host=net.hosts[0])]
        wait_for(lambda: job.run_dir is not None, "a plane")
        cut_off(net.hosts[2], job, net.hosts[0])
        launches += [job.start(script, host=host) for host in net.hosts[1:]]
        assert [launch.wait() for launch in launches] == [0, 0, 0]
        everybody = "".join(launch.output for launch in launches)
        for rank in range(3):
            assert f"rank {rank} sees a world of 3" in everybody
        for launch in launches:
            assert launch.output.count("WITHOUT FAULT TOLERANCE") == 1
        view = job.status()
        assert (view["phase"], view["plane"]["mode"]) == ("Succeed", "independent")


@pytest.mark.netns
@pytest.mark.parametrize("net", [2], indirect=True)
def test_a_bus_that_is_blocked_for_one_node_does_no_harm(net: Net, tmp_path: Path) -> None:
    harmless(net, tmp_path)


@pytest.mark.full
@pytest.mark.netns
@pytest.mark.parametrize("net", [3], indirect=True)
def test_a_bus_that_is_blocked_for_forty_seconds_does_no_harm(net: Net, tmp_path: Path) -> None:
    harmless(net, tmp_path, steps=2000)


def harmless(net: Net, folder: Path, steps: int = 0) -> None:
    """Block the plane for the last host during training; nothing may happen but a line of output."""
    script = write_worker(folder)
    flags = (*FLAGS, "--aegis-lost-timeout-s", "5")
    endpoint, far = net.hosts[0], net.hosts[-1]
    with Job(folder, nnodes=str(len(net.hosts)), endpoint=f"{endpoint.address}:{PORT}", flags=flags) as job:
        launches = [job.start(script, str(folder), host=host) for host in net.hosts]
        job.wait_phase("RunCommand", 1)
        ranks = job.wait_ranks(len(net.hosts))
        assert on_the_bus(job, endpoint, far)
        cut_off(far, job, endpoint)
        begun = steps_of(folder, 0)
        wait_for(lambda: job.status()["plane"]["unreachable"] == [far.name], "an unreachable worker")
        launches[-1].wait_output("can't be reached; training is not touched")
        # The bus's own server closes a connection that is silent for ten seconds: that must not count either.
        wait_for(lambda: not on_the_bus(job, endpoint, far), "the end of the connection")
        wait_for(lambda: steps_of(folder, 0) >= begun + steps, f"{steps} steps")
        far.unblock()
        wait_for(lambda: job.status()["plane"]["unreachable"] == [], "the end of the trouble")
        assert job.ranks().keys() == ranks.keys()
        assert {rank.pid for rank in job.ranks().values()} == {rank.pid for rank in ranks.values()}
        (folder / "end").touch()
        assert [launch.wait() for launch in launches] == [0] * len(launches)
        assert job.report()["recoverCount"] == 0
        assert not any(isinstance(line.event, Lost) for line in job.journal())


def on_the_bus(job: Job, endpoint: Host, far: Host) -> bool:
    """Whether the bus's server still holds a connection of that host: the kernel's own table says so."""
    wanted = f"{_hex(far.address)}:"
    for line in Path(f"/proc/{endpoint.pid}/net/tcp").read_text().splitlines()[1:]:
        _, ours, theirs, state, *_ = line.split()
        if ours.endswith(f":{bus_port(job):04X}") and theirs.startswith(wanted) and state == "01":
            return True
    return False


def _hex(address: str) -> str:
    return bytes(reversed([int(part) for part in address.split(".")])).hex().upper()


def test_a_rank_that_dies_while_the_plane_hangs_is_counted_exactly_once(tmp_path: Path) -> None:
    script = write_worker(tmp_path)
    with Job(tmp_path, nnodes="2", max_restarts=2, flags=FLAGS) as job:
        launches = [job.start(script, str(tmp_path), worker=worker) for worker in "ab"]
        job.wait_phase("RunCommand", 1)
        ranks = job.wait_ranks(2, restart_count=0)
        plane = plane_processes(job)
        for part in plane.values():
            os.kill(part, signal.SIGSTOP)
        for launch in launches:
            launch.wait_output("can't be reached; training is not touched")
        os.kill(ranks[1].pid, signal.SIGKILL)
        job.wait_ranks(2, restart_count=1)
        for part in plane.values():
            os.kill(part, signal.SIGCONT)
        counted_once(job)
        (tmp_path / "end").touch()
        assert [launch.wait() for launch in launches] == [0, 0]


def counted_once(job: Job) -> None:
    """The plane is back: one merge in the journal, one retry in the accounts."""
    wait_for(lambda: any(line.transition == "merged" for line in job.journal()), "a merge")
    wait_plane(job)
    view = job.wait(lambda view: view["phase"] == "RunCommand" and view["incarnation"] == 2)
    assert view["recoverCount"] == job.status()["recoverCount"] == 1
    merged = [line for line in job.journal() if line.transition == "merged"]
    assert [type(line.event) for line in merged] == [Independent]
