"""What is JetStream's own: bucket names, and the connection under the store."""

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.bus.credentials import master_jwt
from aegis_elastic.store.contract import Change, Entry
from aegis_elastic.store.jetstream import JetStreamStore, bucket_name
from tests.store.backends import Backend, JetStream

Over = Callable[[Callable[[Backend], Any]], None]
names = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80), min_size=1, max_size=4
)


@given(names, names)
def test_different_jobs_never_share_a_bucket(one: list[str], other: list[str]) -> None:
    bucket = bucket_name(*one)
    assert set(bucket) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
    assert len(bucket) <= 200
    assert (bucket == bucket_name(*other)) == (one == other)


def test_ordinary_jobs_have_readable_buckets() -> None:
    assert bucket_name("ml", "alice", "llama-7b", "3") == "ml__alice__llama-7b__3"
    assert bucket_name("a_b") == "a_5Fb"


def test_a_renewal_of_the_connection_disturbs_neither_watch_nor_lease(over_jetstream: Over) -> None:
    async def scenario(backend: Backend) -> None:
        assert isinstance(backend, JetStream)
        bus = await backend.bus()
        store = await JetStreamStore.open(bus, "things")
        lease = await store.lease("leader", b"me", 5)
        revision = await store.create("w.a", b"0")
        async with store.watch("w") as watch:
            await watch.__anext__()
            for n in range(1, 4):
                key = bus._credentials.key.public
                await bus.renew(master_jwt(backend._keys, key, expires_s=600))
                await lease.refresh()
                revision = await store.update("w.a", b"%d" % n, revision)
                change = await asyncio.wait_for(watch.__anext__(), 5)
                assert change == Change("w.a", Entry("w.a", b"%d" % n, revision))
        await store.close()

    over_jetstream(scenario)


def test_writes_under_a_renewal_all_take_effect_once(over_jetstream: Over) -> None:
    async def scenario(backend: Backend) -> None:
        assert isinstance(backend, JetStream)
        bus = await backend.bus()
        store = await JetStreamStore.open(bus, "things")
        revision = await store.create("a", b"0")
        renewals = 0

        async def renew() -> None:
            nonlocal renewals
            for _ in range(5):
                await bus.renew(master_jwt(backend._keys, bus._credentials.key.public, expires_s=600))
                renewals += 1

        renewing = asyncio.create_task(renew())
        written = 0
        while not renewing.done():
            revision = await store.update("a", b"%d" % written, revision)
            written += 1
        await renewing
        assert renewals == 5
        assert written > 5
        await store.close()

    over_jetstream(scenario)


def test_opening_a_bucket_again_keeps_what_is_in_it(over_jetstream: Over) -> None:
    async def scenario(backend: Backend) -> None:
        assert isinstance(backend, JetStream)
        bus = await backend.bus()
        first = await JetStreamStore.open(bus, "things")
        await first.create("a", b"1")
        await first.close()
        again = await JetStreamStore.open(bus, "things")
        entry = await again.get("a")
        assert entry is not None
        assert entry.value == b"1"
        assert bus.connected, "a store leaves the connection alone"
        await again.close()

    over_jetstream(scenario)
