"""Real hosts on one machine: each in its own network, UTS and mount namespace, joined by one switch.

    with Net(3) as net:
        agent = net.hosts[1].popen(["aegis-run", ...], env=env, cwd=folder)
        net.hosts[1].block(dst=net.hosts[0].address, dst_port=29500)
        net.hosts[2].link_down()

A host has its own hostname, addresses, firewall, /dev/shm, /etc/hosts (all hosts resolve by name) and, unless
`private_tmp=False`, its own /tmp. Folders below /tmp are seen by all when named in `share`; the working
folder and the interpreter's always are. Pids are the machine's, so a test can signal them. The switch is in a
namespace, too: two nets are separate, and nothing stays behind, not even after SIGKILL of the test (see
`netns_owner`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from aegis_elastic.testing import netns_owner

NETWORK = "10.88.0"
HOSTS_MAX = 200
CLOSE_TIMEOUT_S = 20.0
TOOLS = {"ip": "iproute2", "nsenter": "util-linux", "iptables": "iptables"}

_Stream = int | IO[str] | IO[bytes] | None


class NetnsUnavailable(RuntimeError):
    """This machine or user can't make network namespaces; the message says what is missing."""


class Host:
    """One host of a `Net`. `pid` is the process that keeps its namespaces alive."""

    def __init__(self, name: str, address: str, index: int, pid: int, switch_pid: int) -> None:
        self.name = name
        self.address = address
        self.index = index
        self.pid = pid
        self._switch_pid = switch_pid
        self._namespace = os.readlink(f"/proc/{pid}/ns/net")

    def argv(self, argv: Sequence[str], cwd: Path | str | None = None) -> list[str]:
        """The command line that runs `argv` inside; the process that it becomes is `argv`'s own."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--"]
        # Entering a mount namespace leaves one at its root, and the folder must be looked up inside.
        return [*enter, "/bin/sh", "-c", 'cd "$0" && exec "$@"', str(cwd or os.getcwd()), *argv]

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        stdin: _Stream = subprocess.DEVNULL,
        stdout: _Stream = None,
        stderr: _Stream = None,
    ) -> subprocess.Popen[str]:
        """Starts `argv` inside, text streams; it is killed, with all that it started, when the net closes."""
        return subprocess.Popen(
            self.argv(argv, cwd), env=env, stdin=stdin, stdout=stdout, stderr=stderr, text=True
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Runs `argv` inside to its end and returns its output. Raises `subprocess.TimeoutExpired`."""
        return subprocess.run(
            self.argv(argv, cwd), env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def block(self, *, dst: str | None = None, dst_port: int | None = None) -> None:
        """Drops, silently and both ways, TCP between this host and `dst_port` of `dst` (None: any).

        Open connections are cut, too, as by a firewall in between; the loopback is never affected.
        """
        for rule in self._rules(dst, dst_port):
            self._iptables("--append", rule)

    def unblock(self, *, dst: str | None = None, dst_port: int | None = None) -> None:
        """Undoes the `block` of the same arguments; without any, every block of this host."""
        if dst is None and dst_port is None:
            self._iptables("--flush", [])
            return
        for rule in self._rules(dst, dst_port):
            self._iptables("--delete", rule)

    def link_down(self) -> None:
        """Pulls this host's cable; its addresses stay, as on a real host."""
        self._set_link("down")

    def link_up(self) -> None:
        """Plugs the cable in again."""
        self._set_link("up")

    def throttle(self, megabits: int | None) -> None:
        """Limits this host's cable to `megabits` Mbit/s each way, as a slow port does; None: no limit."""
        for pid, device in ((self.pid, "eth0"), (self._switch_pid, f"port{self.index}")):
            if megabits is None:
                _inside(pid, ["tc", "qdisc", "delete", "dev", device, "root"])
                continue
            # A short queue: a long one would delay the other direction's acknowledgements, too.
            shape = ["tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "30ms"]
            _inside(pid, ["tc", "qdisc", "replace", "dev", device, "root", *shape])

    def pids(self) -> list[int]:
        """All processes that run inside now."""
        return netns_owner.pids_in({self._namespace}, {self.pid})

    def power_off(self) -> None:
        """Kills all that runs inside at once, as a power cut does; the host itself can be used again."""
        left = netns_owner.kill_all({self._namespace}, {self.pid})
        if left:
            raise RuntimeError(f"cannot power off {self.name}: processes {left} did not die")

    @staticmethod
    def _rules(dst: str | None, dst_port: int | None) -> list[list[str]]:
        outgoing = ["OUTPUT", "--out-interface", "eth0", "--protocol", "tcp"]
        incoming = ["INPUT", "--in-interface", "eth0", "--protocol", "tcp"]
        if dst is not None:
            outgoing += ["--destination", dst]
            incoming += ["--source", dst]
        if dst_port is not None:
            outgoing += ["--dport", str(dst_port)]
            incoming += ["--sport", str(dst_port)]
        return [[*outgoing, "--jump", "DROP"], [*incoming, "--jump", "DROP"]]

    def _iptables(self, command: str, rule: list[str]) -> None:
        _inside(self.pid, ["iptables", "--wait", command, *rule])

    def _set_link(self, state: str) -> None:
        _inside(self._switch_pid, ["ip", "link", "set", f"port{self.index}", state])


class Net:
    """`hosts` joined by one switch, while the `with` block lasts.

    `hosts` is how many, or their names (default node0, node1, ...). `share` names folders below /tmp that
    stay common when `private_tmp` gives each host its own /tmp. Raises `NetnsUnavailable` on entering.
    """

    def __init__(
        self, hosts: int | Sequence[str], *, private_tmp: bool = True, share: Sequence[Path | str] = ()
    ) -> None:
        self.hosts: list[Host] = []
        names = [f"node{index}" for index in range(hosts)] if isinstance(hosts, int) else list(hosts)
        if not 0 < len(set(names)) == len(names) <= HOSTS_MAX:
            raise ValueError(f"cannot make hosts {names}: 1 to {HOSTS_MAX} fit, each with its own name")
        self._addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, start=1)}
        self._private_tmp = private_tmp
        # A clone or a virtual environment may itself lie below /tmp (CI's does).
        always = [path for path in (os.getcwd(), sys.prefix) if path.startswith("/tmp/")]
        self._share = [*always, *(str(path) for path in share)]
        self._owner: subprocess.Popen[str] | None = None

    def __enter__(self) -> Net:
        _require_tools()
        # A session of its own: Ctrl-C ends the test first, and the owner process then cleans up.
        owner = subprocess.Popen(
            [sys.executable, "-I", "-S", netns_owner.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert owner.stdin is not None and owner.stdout is not None
        self._owner = owner
        request = {"hosts": self._addresses, "private_tmp": self._private_tmp, "share": self._share}
        owner.stdin.write(json.dumps(request) + "\n")
        owner.stdin.flush()
        answer = json.loads(owner.stdout.readline() or '{"error": "the owner process ended"}')
        if "error" in answer:
            self._close()
            raise NetnsUnavailable(f"cannot make network namespaces: {answer['error']}")
        for index, (name, address) in enumerate(self._addresses.items()):
            self.hosts.append(Host(name, address, index, answer["hosts"][index], answer["switch"]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._close() != 0 and error is None:
            raise RuntimeError("cannot close the net cleanly: see the owner process's message on stderr")

    def _close(self) -> int:
        owner, self._owner = self._owner, None
        self.hosts.clear()
        assert owner is not None and owner.stdin is not None and owner.stdout is not None
        owner.stdin.close()
        try:
            return owner.wait(CLOSE_TIMEOUT_S)
        finally:
            owner.stdout.close()


def _require_tools() -> None:
    if os.geteuid() != 0:
        raise NetnsUnavailable(f"cannot make network namespaces: needs root, and this is user {os.geteuid()}")
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise NetnsUnavailable(f"cannot make network namespaces: no {tool} (apt-get install {package})")


def _inside(pid: int, argv: list[str]) -> None:
    done = subprocess.run(
        ["nsenter", "--target", str(pid), "--net", *argv], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"cannot run {' '.join(argv)}: {done.stderr.strip()}")
