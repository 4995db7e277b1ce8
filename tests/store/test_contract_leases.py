"""What every store promises of leases: one suite over all of them, with real servers."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from aegis_elastic.store.base import StoreBase
from aegis_elastic.store.contract import (
    KeyExists,
    LeaseLost,
)
from tests.store.backends import Backend, wait_change

Over = Callable[[Callable[[Backend], Any]], None]


def test_a_lease_outlasts_its_time_while_held_and_goes_when_released(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        one, other = await backend.client(), await backend.client()
        lease = await one.lease("leader", b"one", 1)
        assert lease.token > 0
        with pytest.raises(KeyExists):
            await other.lease("leader", b"other", 1)
        with pytest.raises(KeyExists):
            await other.create("leader", b"other")
        await asyncio.sleep(2.5)
        assert not lease.lost.is_set()
        entry = await other.get("leader")
        assert entry is not None
        assert entry.value == b"one"
        await lease.refresh()
        await lease.release()
        assert not lease.held
        assert await other.get("leader") is None
        successor = await other.lease("leader", b"other", 5)
        assert successor.token > lease.token
        await lease.release()
        assert successor.held
        assert await one.get("leader") is not None
        with pytest.raises(LeaseLost):
            await lease.refresh()

    over_all(scenario)


def test_a_lease_that_nobody_keeps_vanishes_and_can_be_taken(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        one, other = await backend.client(), await backend.client()
        async with other.watch("") as watch:
            lease = await one.lease("leader", b"one", 1)
            await wait_change(watch, "leader", lambda entry: entry is not None)
            await one.close()  # as a crash: nobody refreshes, nobody releases
            await wait_change(watch, "leader", lambda entry: entry is None)
            assert await other.get("leader") is None
            assert await other.list("") == ()
            successor = await other.lease("leader", b"other", 1)
            assert successor.token > lease.token
            await wait_change(watch, "leader", lambda entry: entry is not None and entry.value == b"other")

    over_all(scenario)


def test_a_holder_learns_that_its_lease_was_taken_away(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        one, other = await backend.client(), await backend.client()
        lease = await one.lease("leader", b"same", 1)
        await other.delete("leader")
        usurper = await other.lease("leader", b"same", 5)
        await asyncio.wait_for(lease.lost.wait(), 2)
        assert not lease.held
        with pytest.raises(LeaseLost):
            await lease.refresh()
        await lease.release()
        assert usurper.held
        await usurper.refresh()
        assert await one.get("leader") is not None

    over_all(scenario)


def test_a_holder_cut_off_from_the_server_knows_by_its_own_clock(over_servers: Over) -> None:
    async def scenario(backend: Backend) -> None:
        store = await backend.client()
        lease = await store.lease("leader", b"one", 1)
        await backend.crash()
        start = asyncio.get_running_loop().time()
        await asyncio.wait_for(lease.lost.wait(), 3)
        assert asyncio.get_running_loop().time() - start <= 1.5
        assert not lease.held
        await backend.start()

    over_servers(scenario)


def test_a_lease_lives_through_a_quick_restart(over_servers: Over) -> None:
    async def scenario(backend: Backend) -> None:
        store, other = await backend.client(), await backend.client()
        lease = await store.lease("leader", b"one", 8)
        await backend.crash()
        await backend.start()
        await lease.refresh()
        assert lease.held
        with pytest.raises(KeyExists):
            await other.lease("leader", b"other", 8)
        await lease.release()

    over_servers(scenario)


def test_a_store_forgets_the_leases_and_watches_that_have_ended(over_all: Over) -> None:
    """A guard takes one for every action, for as long as a standing master lives."""

    async def scenario(backend: Backend) -> None:
        client = await backend.client()
        for _ in range(5):
            await (await client.lease("leader", b"one", 5)).release()
            async with client.watch("leader"):
                pass
        await asyncio.sleep(0.1)
        gc.collect()
        assert isinstance(client, StoreBase)
        assert len(client._leases) + len(client._watches) <= 1

    over_all(scenario)
