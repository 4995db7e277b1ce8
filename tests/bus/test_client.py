"""What `bus/client.py` uses of nats-py's private side, pinned: a version that changes it fails here first."""

import inspect
import os

from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from tests.bus.plane import Plane, PlaneTest


def test_private_names_of_nats_py_are_as_we_know_them() -> None:
    client = Client()
    for name in ("_reading_task", "_flusher_task", "_transport"):
        assert getattr(client, name, "missing") is None, name
    assert client._pending_data_size == 0
    assert "force_flush" in inspect.signature(client._flush_pending).parameters
    assert "_io_writer" in inspect.getsource(TcpTransport.close)


def test_the_end_of_the_reader_is_the_end_of_the_connection(with_plane: PlaneTest) -> None:
    """nats-py goes on as if connected, and its flush() succeeds, when its reader has died."""

    async def scenario(plane: Plane) -> None:
        bus = await plane.connect(plane.worker("w"))
        client = bus._client
        assert client is not None
        assert client.nats._reading_task is not None
        client.nats._reading_task.cancel()
        await client.lost
        await bus.wait_connected(5)

    with_plane(scenario)


def test_a_discarded_client_leaves_no_socket(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        sockets = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            bus = await plane.connect(plane.worker("w"))
            assert bus._client is not None
            await bus._client.discard()
            await bus.close()
        assert len(os.listdir("/proc/self/fd")) <= sockets + 1

    with_plane(scenario, tls=True)
