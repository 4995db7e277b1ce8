"""The embedded control plane: `python -m aegis_elastic.control.host.supervisor FD`, in a session of its own.

A supervisor with two children, nats-server and the master. It starts a child again when it dies, a limited
number of times a minute. Launchers on its host hold it by a connection to its socket; when the last holder is
gone while agents are still connected it lingers for a while, so that a relaunch on this host can take it up
again, and then ends. It is never an orphan for longer, and its children die with it.

FD is a connection to the launcher that starts it, its first holder. The launcher sends there which directory
is the plane's; until then plane and master have everything imported and wait, so that a launcher can start
them before it has a job.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from aegis_elastic.bus.credentials import PlaneKeys
from aegis_elastic.bus.errors import BusError
from aegis_elastic.bus.server import NatsServer
from aegis_elastic.bus.tls import load_certificate, make_certificate
from aegis_elastic.control.host import config as plane_config
from aegis_elastic.control.host.config import LOG_FILE, SOCKET_FILE, PlaneConfig

logger = logging.getLogger(__name__)

Process = asyncio.subprocess.Process

PR_SET_PDEATHSIG = 1
RESTART_WINDOW_S = 60.0
LOCK_FILE = "alive.lock"
# After the job has ended, agents that are slow to go are given this long.
GRACE_AFTER_END_S = 5.0
MASTER_STOP_S = 3.0


class GivenUp(Exception):
    """A child died too often, or can't be started at all."""


class Supervisor:
    """The supervisor. `run` it in one event loop; it returns when the plane is to end."""

    def __init__(self, config: PlaneConfig, first_holder: socket.socket, master: Process) -> None:
        """`first_holder`: the connection to the launcher that starts us; `master`: a process of the master
        that waits for the job to lead.
        """
        self._config = config
        self._first_holder = first_holder
        self._holders: set[asyncio.StreamWriter] = set()
        self._ready: dict[str, Any] | None = None
        self._master_state: dict[str, Any] = {"agents": 0, "ended": False}
        self._changed = asyncio.Event()
        self._deaths: collections.deque[float] = collections.deque()
        self._nats: NatsServer | None = None
        self._prepared_master: Process | None = master
        self._master: Process | None = None

    async def run(self) -> None:
        """Serve until the job has ended and everybody is gone, or nobody holds us any more. GivenUp on
        trouble.
        """
        path = self._config.path
        socket_path = path / SOCKET_FILE
        socket_path.unlink(missing_ok=True)
        directory = os.open(path, os.O_PATH)
        try:
            # Through the descriptor: a socket's path has at most 107 bytes, state directories may be deeper.
            server = await asyncio.start_unix_server(self._hold, f"/proc/self/fd/{directory}/{SOCKET_FILE}")
        finally:
            os.close(directory)
        first = await asyncio.open_connection(sock=self._first_holder)
        self._holders.add(first[1])
        self._first = asyncio.create_task(self._hold(*first), name="plane first holder")
        children = asyncio.create_task(self._supervise(), name="plane children")
        linger = asyncio.create_task(self._linger(), name="plane linger")
        try:
            done, _ = await asyncio.wait({children, linger}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                try:
                    task.result()
                except GivenUp as error:
                    for holder in self._holders:
                        self._send(holder, {"failed": str(error)})
                    raise
        finally:
            server.close()
            socket_path.unlink(missing_ok=True)
            for task in (children, linger):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, GivenUp):
                    await task
            await self._stop_children()

    # ------------------------------------------------------------ children

    async def _supervise(self) -> None:
        path = self._config.path
        hosts = ["aegis", "localhost", "127.0.0.1", *self._config.hosts]
        certificate = (
            load_certificate(path) if (path / "plane.crt").exists() else make_certificate(path, hosts)
        )
        port_file = path / "nats.port"
        if not self._config.bus.url:
            keys = PlaneKeys.load_or_generate(path / "keys.json")
            port = int(port_file.read_text()) if port_file.exists() else 0
            self._nats = NatsServer(
                path / "nats", keys, host=self._config.host, port=port, certificate=certificate
            )
        children = {asyncio.create_task(self._keep_master(), name="plane master")}
        if self._nats is not None:
            children.add(asyncio.create_task(self._keep_nats(self._nats, port_file), name="plane nats"))
        try:
            # None ends but by giving up, and then the other is of no use.
            done, _ = await asyncio.wait(children, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in children:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, GivenUp):
                    await task

    async def _keep_nats(self, nats: NatsServer, port_file: Path) -> None:
        while True:
            try:
                await nats.start()
            except BusError as error:
                raise GivenUp(str(error)) from error
            port_file.write_text(str(nats.port))
            self._changed.set()
            code = await nats.wait()
            logger.warning("nats-server ended (%s): starting it again", code)
            self._count_death("nats-server")

    async def _keep_master(self) -> None:
        while True:
            # A bus that somebody else runs is the master's to reach.
            while self._nats is not None and not self._nats.running:
                await self._wait_change()
            self._master = self._prepared_master or await _start_master()
            self._prepared_master = None
            assert self._master.stdin is not None
            order = {"directory": str(self._config.path), "natsPort": self._nats.port if self._nats else 0}
            with contextlib.suppress(ConnectionError):  # that it has ended is found below
                self._master.stdin.write(json.dumps(order).encode() + b"\n")
                await self._master.stdin.drain()
            failed = await self._read_states(self._master)
            code = await self._master.wait()
            if failed.get("final"):
                raise GivenUp(str(failed["failed"]))
            logger.warning("the master ended (%s): starting it again", code)
            self._count_death("the master")
            if self._ready is not None:
                # The same port and job as before: agents and `aegisctl` know no other.
                self._config = _with_port_of(self._config, self._ready)
                plane_config.save(self._config)

    async def _read_states(self, master: asyncio.subprocess.Process) -> dict[str, Any]:
        """Follow the master until it ends; returns the failure that it reported, {} if none."""
        assert master.stdout is not None
        failed: dict[str, Any] = {}
        async for raw in master.stdout:
            state = json.loads(raw)
            if "ready" in state:
                self._ready = state["ready"]
                for holder in self._holders:
                    self._send(holder, state)
            elif "failed" in state:
                failed = state
            else:
                self._master_state = state
                if state["ended"]:
                    for holder in self._holders:
                        self._send(holder, {"ended": state["phase"]})
            self._changed.set()
        return failed

    def _count_death(self, who: str) -> None:
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > RESTART_WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) > self._config.restarts_max:
            raise GivenUp(f"{who} died {len(self._deaths)} times in {RESTART_WINDOW_S:.0f} s")

    async def _stop_children(self) -> None:
        if self._prepared_master is not None:
            self._prepared_master.kill()
            await self._prepared_master.wait()
        if self._master is not None and self._master.returncode is None:
            self._master.terminate()
            try:
                await asyncio.wait_for(self._master.wait(), MASTER_STOP_S)
            except asyncio.TimeoutError:
                self._master.kill()
                await self._master.wait()
        if self._nats is not None and self._nats.running:
            await self._nats.stop()

    # ------------------------------------------------------------ holders

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._holders.add(writer)
        if self._ready is not None:
            self._send(writer, {"ready": self._ready})
        self._changed.set()
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):
                pass  # Holders send nothing; that they are connected is what counts.
        self._holders.discard(writer)
        writer.close()
        self._changed.set()

    def _send(self, holder: asyncio.StreamWriter, state: dict[str, Any]) -> None:
        holder.write(json.dumps(state).encode() + b"\n")

    async def _linger(self) -> None:
        """Return when the plane is to end."""
        while True:
            while self._holders:
                await self._wait_change()
            # Nobody of this host holds us any more.
            patience_s = GRACE_AFTER_END_S if self._master_state["ended"] else self._config.linger_s
            until = time.monotonic() + patience_s
            while not self._holders and self._master_state["agents"] > 0:
                left = until - time.monotonic()
                if left <= 0:
                    return
                await self._wait_change(left)
            if not self._holders:
                return

    async def _wait_change(self, timeout_s: float | None = None) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except asyncio.TimeoutError:
            return
        self._changed.clear()


def _with_port_of(config: PlaneConfig, ready: dict[str, Any]) -> PlaneConfig:
    """What the successor of a master that was ready is to lead."""
    return msgspec.structs.replace(config, port=int(ready["port"]), leads=int(ready["generation"]))


@contextlib.contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Wait until no other plane uses this directory: one that is about to end may still hold the ports."""
    with open(directory / LOCK_FILE, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


async def _start_master() -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "aegis_elastic.control.main",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def _serve(holder: socket.socket) -> None:
    """Wait for the directory of the plane, and run it."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    master = await _start_master()
    try:
        directory = Path((await asyncio.to_thread(_read_line, holder)).decode())
        if not directory.name:
            return  # The launcher has gone, or needs no plane of its own.
        plane_config.log_to(directory / LOG_FILE, (1, 2))
        config = plane_config.load(directory / plane_config.CONFIG_FILE)
        with _only_one(config.path):
            await Supervisor(config, holder, master).run()
    except asyncio.CancelledError:
        logger.info("SIGTERM: the plane ends")
    finally:
        if master.returncode is None:
            master.kill()
            await master.wait()


def _read_line(holder: socket.socket) -> bytes:
    """One line, byte by byte: what follows it is not ours to read. b"" at the end of the connection."""
    line = b""
    while not line.endswith(b"\n"):
        byte = holder.recv(1)
        if not byte:
            return b""
        line += byte
    return line[:-1]


def main(argv: list[str]) -> int:
    """Run a plane for the launcher at the other end of the descriptor `argv[0]`; returns the exit code."""
    # Nothing that we or our children write is for others: keys, the bus's store, the socket.
    os.umask(0o077)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s plane %(levelname)s %(message)s", stream=sys.stderr
    )
    # Signals for the launcher's group are not for us; SIGTERM ends us.
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    holder = socket.socket(fileno=int(argv[0]))
    try:
        asyncio.run(_serve(holder))
    except GivenUp as error:
        logger.error("the control plane gives up: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
