"""Hosts in namespaces: apart where hosts are apart, joined by a network that can break, gone afterwards."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aegis_elastic.testing.netns import Net, NetnsUnavailable

pytestmark = pytest.mark.netns

SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(b"hello")
    peer.close()
"""
ASK = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])) as peer:
        print(peer.recv(5).decode())
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def net(unmet: Callable[[str], None]) -> Iterator[Net]:
    try:
        made = Net(3).__enter__()
    except NetnsUnavailable as why:
        unmet(str(why))
        raise
    yield made
    made.__exit__(None, None, None)


def serve(net: Net, index: int, port: int) -> subprocess.Popen[str]:
    host = net.hosts[index]
    server = host.popen([sys.executable, "-c", SERVE, host.address, str(port)], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return server


def ask(net: Net, index: int, address: str, port: int, timeout_s: float = 5.0) -> str:
    done = net.hosts[index].run([sys.executable, "-c", ASK, address, str(port), str(timeout_s)])
    return done.stdout.strip()


def test_each_host_has_its_own_name_address_tmp_and_shared_memory(net: Net) -> None:
    first, second = net.hosts[0], net.hosts[1]
    assert [host.run(["hostname"]).stdout.strip() for host in net.hosts] == ["node0", "node1", "node2"]
    assert first.address in first.run(["ip", "-brief", "address", "show", "eth0"]).stdout
    for folder in ("/tmp", "/dev/shm"):
        mark = f"{folder}/aegis-netns-mark"
        first.run(["touch", mark])
        assert first.run(["ls", mark]).returncode == 0
        assert second.run(["ls", mark]).returncode != 0
        assert not Path(mark).exists()


def test_a_shared_folder_is_the_same_on_all_hosts(tmp_path: Path, net: Net) -> None:
    with Net(["left", "right"], share=[tmp_path]) as joined:
        joined.hosts[0].run(["sh", "-c", 'hostname > "$0"/name', str(tmp_path)])
        assert joined.hosts[1].run(["cat", f"{tmp_path}/name"]).stdout == "left\n"
    assert (tmp_path / "name").read_text() == "left\n"


def test_hosts_reach_each_other_by_name_and_two_nets_never_meet(net: Net) -> None:
    for server in range(3):
        serve(net, server, 7000)
    for client in range(3):
        for server in range(3):
            assert ask(net, client, f"node{server}", 7000) == "hello"
    with Net(3) as other:
        assert other.hosts[0].address == net.hosts[0].address
        assert ask(other, 1, other.hosts[0].address, 7000) == "ConnectionRefusedError"


def test_a_block_hits_one_port_of_one_host_both_ways_and_can_be_taken_back(net: Net) -> None:
    address = net.hosts[0].address
    serve(net, 0, 7000)
    serve(net, 0, 7001)
    net.hosts[1].block(dst=address, dst_port=7000)
    assert ask(net, 1, address, 7000, timeout_s=0.3) == "TimeoutError"
    assert ask(net, 1, address, 7001) == "hello"
    assert ask(net, 2, address, 7000) == "hello"
    net.hosts[1].unblock(dst=address, dst_port=7000)
    assert ask(net, 1, address, 7000) == "hello"
    net.hosts[1].block(dst=address)
    assert ask(net, 1, address, 7001, timeout_s=0.3) == "TimeoutError"
    net.hosts[1].unblock()
    assert ask(net, 1, address, 7001) == "hello"


def test_a_block_leaves_the_hosts_own_loopback_alone(net: Net) -> None:
    serve(net, 0, 7000)
    net.hosts[0].block()
    assert ask(net, 0, net.hosts[0].address, 7000) == "hello"
    assert ask(net, 1, net.hosts[0].address, 7000, timeout_s=0.3) == "TimeoutError"


def test_a_pulled_cable_cuts_a_host_off_until_it_is_plugged_in_again(net: Net) -> None:
    address = net.hosts[0].address
    serve(net, 0, 7000)
    net.hosts[0].link_down()
    assert ask(net, 1, address, 7000, timeout_s=0.3) != "hello"
    assert ask(net, 0, address, 7000) == "hello"
    net.hosts[0].link_up()
    assert ask(net, 1, address, 7000) == "hello"


def test_a_process_inside_has_the_pid_that_popen_says_and_its_exit_code(net: Net, tmp_path: Path) -> None:
    process = net.hosts[0].popen(
        ["sh", "-c", 'echo $$ "$AEGIS_X"; exit 7'], env={"AEGIS_X": "y"}, cwd="/", stdout=subprocess.PIPE
    )
    out, _ = process.communicate(timeout=10)
    assert out == f"{process.pid} y\n"
    assert process.returncode == 7


def test_a_power_cut_kills_what_runs_on_that_host_only_and_the_host_can_be_used_again(net: Net) -> None:
    stubborn = "trap '' TERM HUP; setsid sleep 600 & echo $!; exec sleep 600"
    here = net.hosts[0].popen(["sh", "-c", stubborn], stdout=subprocess.PIPE)
    there = net.hosts[1].popen(["sleep", "600"])
    assert here.stdout is not None
    here.stdout.readline()
    assert len(net.hosts[0].pids()) == 2
    net.hosts[0].power_off()
    assert net.hosts[0].pids() == []
    assert here.wait(5) == -signal.SIGKILL
    assert there.poll() is None
    assert net.hosts[0].run(["hostname"]).stdout == "node0\n"


def test_leaving_ends_every_process_inside(net: Net) -> None:
    script = "setsid sleep 600 & echo $!; exec sleep 600"
    with Net(1) as one:
        child = one.hosts[0].popen(["sh", "-c", script], stdout=subprocess.PIPE)
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
    assert child.wait(5) == -signal.SIGKILL
    assert not Path(f"/proc/{grandchild}").exists() or _is_zombie(grandchild)


def test_nothing_stays_behind_when_the_test_itself_is_killed(net: Net) -> None:
    script = (
        "import sys, signal\n"
        "from aegis_elastic.testing.netns import Net\n"
        "with Net(2) as net:\n"
        "    inside = net.hosts[1].popen(['setsid', 'sleep', '600'])\n"
        "    print(inside.pid, net.hosts[0].pid, flush=True)\n"
        "    signal.pause()\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    pids = [int(pid) for pid in holder.stdout.readline().split()]
    handles = [os.pidfd_open(pid) for pid in pids]
    holder.kill()
    holder.wait(5)
    for handle in handles:
        assert _ended(handle, timeout_s=5)
        os.close(handle)
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert "port0" not in links and "bridge" not in links


def test_a_user_without_rights_is_told_why() -> None:
    script = (
        "import os\n"
        "from aegis_elastic.testing import netns\n"
        "os.setuid(65534)\n"
        "try:\n"
        "    netns.Net(1).__enter__()\n"
        "except netns.NetnsUnavailable as why:\n"
        "    print(why)\n"
    )
    if os.geteuid() == 0:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert "needs root" in done.stdout


def test_three_hosts_are_up_at_once(net: Net) -> None:
    started = time.monotonic()
    with Net(3):
        print(f"3 hosts up after {time.monotonic() - started:.3f} s")


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _ended(handle: int, timeout_s: float) -> bool:
    return bool(select.select([handle], [], [], timeout_s)[0])
