"""A plane to test against: keys, a real server, and connections with credentials."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.bus.credentials import Credentials, NKey, PlaneKeys, master_jwt, system_jwt, worker_jwt
from aegis_elastic.bus.server import NatsServer
from aegis_elastic.bus.tls import make_certificate


class Plane:
    """A running server and its keys; hands out connections and closes them all at the end."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.keys = server.keys
        self.pem = server._certificate.pem if server._certificate else None
        self._open: list[BusConnection] = []

    def worker(self, worker: str, job: str = "a", ns: str = "team", expires_s: float = 600) -> Credentials:
        key = NKey.generate()
        return Credentials(
            key, worker_jwt(self.keys, key.public, ns=ns, job=job, worker=worker, expires_s=expires_s)
        )

    def master(self, expires_s: float = 600) -> Credentials:
        key = NKey.generate()
        return Credentials(key, master_jwt(self.keys, key.public, expires_s=expires_s))

    def system(self) -> Credentials:
        key = NKey.generate()
        return Credentials(key, system_jwt(self.keys, key.public, expires_s=600))

    async def connect(self, credentials: Credentials, name: str = "", **options: Any) -> BusConnection:
        options.setdefault("ca_pem", self.pem)
        bus = await BusConnection.connect(
            [self.server.url], credentials, name=name or credentials.key.public, **options
        )
        self._open.append(bus)
        return bus

    async def end(self) -> None:
        for bus in self._open:
            await bus.close()
        await self.server.stop()


@asynccontextmanager
async def running_plane(directory: Path, tls: bool = False) -> AsyncIterator[Plane]:
    keys = PlaneKeys.load_or_generate(directory / "keys")
    certificate = make_certificate(directory, ["127.0.0.1"]) if tls else None
    server = NatsServer(directory / "bus", keys, certificate=certificate)
    await server.start()
    plane = Plane(server)
    try:
        yield plane
    finally:
        await plane.end()


PlaneTest = Callable[..., None]
