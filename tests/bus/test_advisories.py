"""The server tells the plane of an agent's death at once, with name, key and reason."""

import asyncio
import json
import signal
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.bus import advisories
from aegis_elastic.bus.advisories import Connect, Disconnect, parse_connect, parse_disconnect
from aegis_elastic.bus.subscription import Message
from tests.bus.plane import Plane, PlaneTest

AGENT = """
import asyncio, sys
from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.bus.credentials import Credentials, NKey

async def main():
    url, seed, jwt = sys.stdin.read().split()
    await BusConnection.connect([url], Credentials(NKey(seed.encode()), jwt), name="uid-7")
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_agent_is_known_within_a_moment(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        system = await plane.connect(plane.system())
        comes: asyncio.Queue[Connect] = asyncio.Queue()
        goes: asyncio.Queue[Disconnect] = asyncio.Queue()

        def come(message: Message) -> None:
            comes.put_nowait(parse_connect(message.data))

        def go(message: Message) -> None:
            goes.put_nowait(parse_disconnect(message.data))

        await system.subscribe(advisories.CONNECTS, come)
        await system.subscribe(advisories.DISCONNECTS, go)
        who = plane.worker("w")
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", AGENT, stdin=asyncio.subprocess.PIPE
        )
        try:
            assert agent.stdin is not None
            agent.stdin.write(f"{plane.server.url} {who.key._seed()} {who.jwt}".encode())
            agent.stdin.close()
            come_ = await asyncio.wait_for(comes.get(), 10)
            assert (come_.user_public_key, come_.name) == (who.key.public, "uid-7")
            start = time.monotonic()
            agent.send_signal(signal.SIGKILL)
            gone = await asyncio.wait_for(goes.get(), 5)
        finally:
            if agent.returncode is None:
                agent.kill()
            await agent.wait()
        assert time.monotonic() - start < 2
        assert gone == Disconnect(who.key.public, "uid-7", gone.reason, come_.client_id)
        assert gone.closed_by_peer, gone.reason
        assert goes.empty()

    with_plane(scenario)


def test_a_silent_agent_and_a_revoked_one_are_not_dead(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        system = await plane.connect(plane.system())
        goes: asyncio.Queue[Disconnect] = asyncio.Queue()

        def go(message: Message) -> None:
            goes.put_nowait(parse_disconnect(message.data))

        await system.subscribe(advisories.DISCONNECTS, go)
        who = plane.worker("w")
        await plane.connect(who)
        await plane.server.revoke(who.key.public)
        gone = await asyncio.wait_for(goes.get(), 5)
        assert (gone.reason, gone.closed_by_peer) == ("Credentials Revoked", False)

    with_plane(scenario)
    stale = b'{"type":"io.nats.server.advisory.v1.client_disconnect","client":{},"reason":"Stale Connection"}'
    assert not parse_disconnect(stale).closed_by_peer


def test_a_worker_can_not_listen_in_on_who_comes_and_goes(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        violations: list[str] = []
        worker = await plane.connect(plane.worker("w"), on_violation=violations.append)
        await worker.subscribe(advisories.DISCONNECTS, lambda message: None)
        assert "$sys.account" in violations[0]
        master = await plane.connect(plane.master())
        received: list[str] = []
        await master.subscribe("$SYS.>", lambda message: received.append(message.subject))
        other = await plane.connect(plane.worker("w2"))
        await other.close()
        await master._client.ping()  # type: ignore[union-attr]
        assert received == []

    with_plane(scenario)


anything = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "client", "id"]), inner)
    ),
    max_leaves=5,
)


@given(st.binary(max_size=30) | anything.map(lambda value: json.dumps(value).encode()))
def test_junk_is_no_advisory(junk: bytes) -> None:
    for parse in (parse_connect, parse_disconnect):
        with pytest.raises(ValueError, match="cannot read"):
            parse(junk)


def test_a_connect_is_no_disconnect() -> None:
    connect = b'{"type":"io.nats.server.advisory.v1.client_connect","client":{"user":"U","name":"n","id":3}}'
    assert parse_connect(connect) == Connect("U", "n", 3)
    with pytest.raises(ValueError, match="client_connect"):
        parse_disconnect(connect)
