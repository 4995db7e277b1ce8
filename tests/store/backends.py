"""Real servers behind one face, so that one suite of scenarios runs over all stores."""

import asyncio
import os
import re
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.bus.credentials import Credentials, NKey, PlaneKeys, master_jwt
from aegis_elastic.bus.server import _START_WITH_PARENT, NatsServer
from aegis_elastic.store.contract import Change, Entry, Store, Watch
from aegis_elastic.store.etcd import EtcdStore
from aegis_elastic.store.files import FileStore
from aegis_elastic.store.jetstream import JetStreamStore
from aegis_elastic.store.memory import MemoryBackend, MemoryStore


class Backend:
    """A place to keep things; `client` opens another store on the same things."""

    def __init__(self) -> None:
        self._stores: list[Store] = []

    async def client(self, name: str = "things") -> Store:
        store = await self._open(name)
        self._stores.append(store)
        return store

    async def _open(self, name: str) -> Store:
        raise NotImplementedError

    async def crash(self) -> None:
        """End the server as a power cut of the process does."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start it, the first time or again, with the same data at the same address."""

    async def end(self) -> None:
        for store in self._stores:
            await store.close()


class Memory(Backend):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._backends: dict[str, MemoryBackend] = {}

    async def _open(self, name: str) -> Store:
        return MemoryStore(self._backends.setdefault(name, MemoryBackend()))


class JetStream(Backend):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._keys = PlaneKeys.generate()
        self.server = NatsServer(directory / "bus", self._keys)
        self._buses: list[BusConnection] = []

    def credentials(self) -> Credentials:
        key = NKey.generate()
        return Credentials(key, master_jwt(self._keys, key.public, expires_s=600))

    async def bus(self) -> BusConnection:
        bus = await BusConnection.connect([self.server.url], self.credentials(), name="master")
        self._buses.append(bus)
        return bus

    async def _open(self, name: str) -> Store:
        return await JetStreamStore.open(await self.bus(), name)

    async def start(self) -> None:
        await self.server.start()

    async def crash(self) -> None:
        await self.server.kill()

    async def end(self) -> None:
        await super().end()
        for bus in self._buses:
            await bus.close()
        await self.server.stop()


class Etcd(Backend):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory / "etcd"
        self.port, self._peer_port = _free_ports()
        self._process: asyncio.subprocess.Process | None = None
        self._log: asyncio.Task[None] | None = None

    async def _open(self, name: str) -> Store:
        return await EtcdStore.open([f"127.0.0.1:{self.port}"], name)

    async def start(self) -> None:
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        flags = ["--data-dir", str(self._directory), "--log-outputs", "stderr", "--logger", "zap"]
        flags += ["--listen-client-urls", client, "--advertise-client-urls", client]
        flags += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        flags += ["--initial-cluster", f"default={peer}"]
        # One member elects itself; there is nobody to wait for.
        flags += ["--heartbeat-interval", "10", "--election-timeout", "50"]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            "-c",
            _START_WITH_PARENT.replace("execv", "execvp"),
            str(os.getpid()),
            "etcd",
            *flags,
            stderr=asyncio.subprocess.PIPE,
        )
        log = self._process.stderr
        assert log is not None
        output = b""
        while not re.search(rb"serving .*client (traffic|requests)", output):
            line = await asyncio.wait_for(log.readline(), 20)
            assert line, f"etcd did not start: {output.decode()[-2000:]}"
            output += line
        self._log = asyncio.create_task(_drain(log))

    async def crash(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()
        if self._log is not None:
            await self._log

    async def end(self) -> None:
        await super().end()
        if self._process is not None and self._process.returncode is None:
            await self.crash()


class Files(Backend):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    async def _open(self, name: str) -> Store:
        return await FileStore.open(self._directory / name)


BACKENDS: dict[str, type[Backend]] = {"memory": Memory, "files": Files, "jetstream": JetStream, "etcd": Etcd}
SERVERS = ("jetstream", "etcd")


def missing(name: str) -> str | None:
    """Why this backend can't be tested here, None if it can."""
    if name == "etcd" and shutil.which("etcd") is None:
        return "there is no etcd: apt-get install etcd-server"
    return None


@asynccontextmanager
async def running(name: str, directory: Path) -> AsyncIterator[Backend]:
    backend = BACKENDS[name](directory)  # type: ignore[call-arg]
    try:
        await backend.start()
        yield backend
    finally:
        await backend.end()


async def _drain(log: asyncio.StreamReader) -> None:
    while await log.read(65536):
        pass


def _free_ports() -> tuple[int, int]:
    """Two ports outside the range that the kernel hands out by itself, so that nobody gets one in between."""
    low = int(re.split(r"\s+", Path("/proc/sys/net/ipv4/ip_local_port_range").read_text())[0])
    free: list[int] = []
    for port in range(low - 1 - os.getpid() % 5000, 1024, -1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        free.append(port)
        if len(free) == 2:
            return free[0], free[1]
    raise AssertionError("no free port")


async def take(watch: Watch, count: int, timeout_s: float = 20) -> list[Change]:
    """The next `count` changes."""

    async def gather() -> list[Change]:
        return [await watch.__anext__() for _ in range(count)]

    return await asyncio.wait_for(gather(), timeout_s)


async def wait_change(
    watch: Watch, key: str, wanted: Callable[[Entry | None], bool], timeout_s: float = 20
) -> None:
    """Wait until the watch tells of `key` what is wanted."""

    async def poll() -> None:
        async for change in watch:
            if change.key == key and wanted(change.entry):
                return
        raise AssertionError("the watch ended")

    await asyncio.wait_for(poll(), timeout_s)
