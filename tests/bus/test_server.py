"""The embedded server starts, says why it can't, keeps its port and store, and never outlives its parent."""

import asyncio
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aegis_elastic.bus.credentials import PlaneKeys
from aegis_elastic.bus.errors import ServerFailed
from aegis_elastic.bus.server import BINARY_VARIABLE, AddressInUse, NatsServer
from tests.bus.plane import Plane, PlaneTest


def test_it_keeps_port_and_store_over_a_crash(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        bus = await plane.connect(plane.master())
        bucket = await bus.call(lambda nc: nc.jetstream().create_key_value(bucket="job"), 5)
        await bucket.put("status", b"1")
        url, pid = plane.server.url, plane.server.pid
        await plane.server.kill()
        assert await plane.server.wait() == -signal.SIGKILL
        assert (plane.server.running, plane.server.pid) == (False, None)
        await plane.server.start()
        assert plane.server.url == url
        assert plane.server.pid != pid
        again = await bus.call(lambda nc: nc.jetstream().key_value("job"), 10)
        assert (await again.get("status")).value == b"1"

    with_plane(scenario)


def test_it_binds_to_its_host_and_its_files_are_private(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        with pytest.raises(OSError, match=r"refused|Connect"):
            await asyncio.open_connection("127.0.0.2", plane.server.port)
        directory = plane.server.directory
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for name in ("server.conf", "server.log"):
            assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
        config = json.loads((directory / "server.conf").read_text())
        assert "seed" not in json.dumps(config)

    with_plane(scenario)


def test_two_starts_are_one_too_many_and_two_stops_are_not(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        with pytest.raises(ServerFailed, match="runs already"):
            await plane.server.start()
        await plane.server.stop()
        await plane.server.stop()
        await plane.server.kill()

    with_plane(scenario)


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = NatsServer(tmp_path / "bus", PlaneKeys.generate(), port=taken.getsockname()[1])
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{server.port} is in use"):
            asyncio.run(server.start())
        assert not server.running


def test_a_server_that_can_not_start_says_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(ServerFailed, match="absent is not an executable file"):
        asyncio.run(NatsServer(tmp_path / "bus", PlaneKeys.generate()).start())
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setenv(BINARY_VARIABLE, str(broken))
    with pytest.raises(ServerFailed, match="it ended: out of luck"):
        asyncio.run(NatsServer(tmp_path / "bus", PlaneKeys.generate()).start())


def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o700)
    monkeypatch.setenv(BINARY_VARIABLE, str(silent))
    server = NatsServer(tmp_path / "bus", PlaneKeys.generate(), start_timeout_s=0.2)
    with pytest.raises(ServerFailed, match=r"not ready in 0.2 s"):
        asyncio.run(server.start())
    assert not server.running


PARENT = """
import asyncio, sys
from pathlib import Path
from aegis_elastic.bus.credentials import PlaneKeys
from aegis_elastic.bus.server import NatsServer

async def main():
    server = NatsServer(Path(sys.argv[1]), PlaneKeys.generate())
    await server.start()
    print(server.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_it_dies_with_its_parent_however_that_dies(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "bus")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            assert select.select([child], [], [], 10)[0], "nats-server outlived its parent"
        finally:
            os.close(child)
