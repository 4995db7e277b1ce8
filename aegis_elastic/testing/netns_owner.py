"""The process that owns the namespaces of `aegis_elastic.testing.netns`; run by path, standard library only.

It reads one JSON line on stdin (`hosts`: name to address, `private_tmp`, `share`: paths), makes one network
namespace for the switch and one network, UTS and mount namespace per host, answers one JSON line (`switch`,
`hosts`: pids to enter by, or `error`), and then waits. When its stdin ends, or the process that started it
does, it kills everything that still runs in the namespaces and leaves; the kernel then takes links and
mounts with them. The machine's own namespaces are never changed: nothing to clean up there.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
KILL_ROUNDS_MAX = 50
KILL_WAIT_S = 0.2

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot {what}: {os.strerror(code)}")


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None, flags, None)
    _check(_libc.mount(*arguments), f"mount {source} on {target}")


def _private_files(hosts: dict[str, str], private_tmp: bool, share: list[str]) -> None:
    """Gives this mount namespace its own /dev/shm, /etc/hosts and, if asked, /tmp, `share` excepted."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    shared = [(path, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path in share]
    _mount("tmpfs", "/dev/shm", "tmpfs", 0)
    # Written to the host's own tmpfs first, then mounted: the machine's own file must not change.
    names = "/dev/shm/.hosts"
    with open(names, "w", encoding="ascii") as file:
        file.write("127.0.0.1 localhost\n::1 localhost\n")
        file.writelines(f"{address} {name}\n" for name, address in hosts.items())
    _mount(names, "/etc/hosts", None, MS_BIND)
    os.unlink(names)
    if private_tmp:
        _mount("tmpfs", "/tmp", "tmpfs", 0)  # a tmpfs is born with mode 1777
        for path, handle in shared:
            os.makedirs(path, exist_ok=True)
            _mount(f"/proc/self/fd/{handle}", path, None, MS_BIND | MS_REC)
    for _, handle in shared:
        os.close(handle)


def _anchor(flags: int, prepare: Callable[[], None] | None = None) -> int:
    """Forks a process into new namespaces and returns its pid once it is in them and `prepare` has run.

    It only keeps them alive, and dies with this process. Raises OSError if it fails.
    """
    reader, writer = os.pipe()
    owner = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != owner:
                os._exit(1)
            _check(_libc.unshare(flags), "unshare namespaces")
            if prepare is not None:
                prepare()
            os.write(writer, b"ok")
            os.close(writer)
            while True:
                signal.pause()
        except OSError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read().decode()
    if message != "ok":
        os.waitpid(pid, 0)
        raise OSError(message or "cannot make a namespace: its process ended")
    return pid


def _ip(pid: int, commands: list[str]) -> None:
    argv = ["nsenter", "--target", str(pid), "--net", "ip", "-batch", "-"]
    done = subprocess.run(argv, input="\n".join(commands), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"cannot set up the network: {done.stderr.strip()}")


def build(request: dict[str, object], pids: list[int]) -> dict[str, object]:
    """Makes all namespaces and links; every anchor's pid is appended to `pids` as soon as there is one."""
    hosts: dict[str, str] = request["hosts"]  # type: ignore[assignment]
    share: list[str] = request["share"]  # type: ignore[assignment]
    private_tmp = bool(request["private_tmp"])
    switch = _anchor(CLONE_NEWNET)
    pids.append(switch)
    for host in hosts:

        def prepare(name: str = host) -> None:
            socket.sethostname(name)
            _private_files(hosts, private_tmp, share)
            # No IPv6 address on the link besides; ::1 on the loopback stays.
            with open("/proc/sys/net/ipv6/conf/default/disable_ipv6", "w", encoding="ascii") as file:
                file.write("1")

        pids.append(_anchor(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS, prepare))
    commands = ["link add bridge type bridge", "link set bridge up"]
    for port, pid in enumerate(pids[1:]):
        commands += [
            f"link add port{port} type veth peer name eth0 netns {pid}",
            f"link set port{port} master bridge up",
        ]
    _ip(switch, commands)
    for address, pid in zip(hosts.values(), pids[1:], strict=True):
        _ip(pid, ["link set lo up", f"address add {address}/24 dev eth0", "link set eth0 up"])
    return {"switch": switch, "hosts": pids[1:]}


def pids_in(namespaces: set[str], except_pids: set[int]) -> list[int]:
    """Pids of all processes whose network namespace is one of `namespaces` ("net:[4026...]")."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in except_pids:
            continue
        try:
            if os.readlink(f"/proc/{entry}/ns/net") in namespaces:
                found.append(int(entry))
        except OSError:
            continue  # ended meanwhile, or a zombie, which has no namespace any more
    return found


def kill_all(namespaces: set[str], except_pids: set[int]) -> list[int]:
    """Kills what runs in `namespaces` until nothing is left; returns what would not die."""
    for _ in range(KILL_ROUNDS_MAX):
        pids = pids_in(namespaces, except_pids)
        if not pids:
            return []
        handles = []
        for pid in pids:
            try:
                handles.append(os.pidfd_open(pid))
                signal.pidfd_send_signal(handles[-1], signal.SIGKILL)
            except ProcessLookupError:
                continue  # ended by itself meanwhile
        with selectors.DefaultSelector() as selector:
            for handle in handles:
                selector.register(handle, selectors.EVENT_READ)
            while selector.get_map():
                ended = selector.select(KILL_WAIT_S)
                for key, _ in ended:
                    selector.unregister(key.fileobj)
                if not ended:
                    break
        for handle in handles:
            os.close(handle)
    return pids_in(namespaces, except_pids)


def main() -> int:
    """Serves one net; see the module's docstring."""
    parent = os.pidfd_open(os.getppid())
    request = json.loads(sys.stdin.readline())
    pids: list[int] = []
    try:
        answer = build(request, pids)
    except OSError as error:
        answer = {"error": str(error)}
    namespaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    if "error" not in answer:
        # Both, because a forked sibling may hold the pipe's other end open after the test is gone.
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin, selectors.EVENT_READ)
            selector.register(parent, selectors.EVENT_READ)
            selector.select()
    left = kill_all(namespaces, set(pids))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if left:
        sys.stderr.write(f"netns: processes {left} did not die\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
