"""What every store promises: the same scenarios over memory, files, JetStream and etcd, with real servers."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aegis_elastic.store.contract import (
    BadKey,
    Change,
    Entry,
    KeyExists,
    RevisionConflict,
    Store,
    StoreUnavailable,
)
from tests.store.backends import Backend, take, wait_change

Over = Callable[[Callable[[Backend], Any]], None]


def test_what_is_created_can_be_read_by_all(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        one, other = await backend.client(), await backend.client()
        assert await one.get("job.status") is None
        revision = await one.create("job.status", b"Pending")
        assert revision > 0
        assert await other.get("job.status") == Entry("job.status", b"Pending", revision)
        assert await other.get("job") is None
        with pytest.raises(KeyExists, match=r"job\.status"):
            await other.create("job.status", b"Failed")
        await one.create("empty", b"")
        entry = await other.get("empty")
        assert entry is not None
        assert entry.value == b""

    over_all(scenario)


def test_stores_of_different_names_share_nothing(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        one, other = await backend.client("one"), await backend.client("other")
        await one.create("a", b"1")
        assert await other.get("a") is None
        assert await other.list("") == ()
        await other.create("a", b"2")

    over_all(scenario)


def test_compare_and_swap_lets_the_quicker_win(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        one, other = await backend.client(), await backend.client()
        first = await one.create("status", b"1")
        second = await other.update("status", b"2", first)
        assert second > first
        with pytest.raises(RevisionConflict, match="status"):
            await one.update("status", b"stale", first)
        assert await one.get("status") == Entry("status", b"2", second)
        for revision in (0, -1, second + 1000):
            with pytest.raises(RevisionConflict):
                await one.update("status", b"guess", revision)
        for revision in (0, 1, second):
            with pytest.raises(RevisionConflict):
                await one.update("absent", b"guess", revision)
        assert await one.get("absent") is None

    over_all(scenario)


def test_of_fifty_creates_one_wins(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        stores = [await backend.client() for _ in range(5)]

        async def attempt(n: int) -> int | None:
            try:
                await stores[n % 5].create("anchor", b"%d" % n)
            except KeyExists:
                return None
            return n

        for _ in range(2):  # the second round over the remains of a deleted key
            winners = [n for n in await asyncio.gather(*map(attempt, range(50))) if n is not None]
            assert len(winners) == 1
            entry = await stores[0].get("anchor")
            assert entry is not None
            assert entry.value == b"%d" % winners[0]
            await stores[0].delete("anchor")

    over_all(scenario)


def test_fifty_counters_lose_no_count(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        stores = [await backend.client() for _ in range(5)]
        await stores[0].create("count", b"0")

        async def count(store: Store) -> None:
            while True:
                entry = await store.get("count")
                assert entry is not None
                try:
                    await store.update("count", b"%d" % (int(entry.value) + 1), entry.revision)
                except RevisionConflict:
                    continue
                return

        await asyncio.gather(*(count(stores[n % 5]) for n in range(50)))
        entry = await stores[0].get("count")
        assert entry is not None
        assert entry.value == b"50"

    over_all(scenario)


def test_delete_with_and_without_a_revision(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        store = await backend.client()
        first = await store.create("a", b"1")
        second = await store.update("a", b"2", first)
        with pytest.raises(RevisionConflict, match="a"):
            await store.delete("a", first)
        assert await store.get("a") is not None
        await store.delete("a", second)
        assert await store.get("a") is None
        await store.delete("a", second)
        await store.delete("a")
        await store.delete("never.there")
        third = await store.create("a", b"3")
        assert third > second
        with pytest.raises(RevisionConflict):
            await store.update("a", b"stale", second)
        await store.delete("a")
        assert await store.get("a") is None
        assert await store.list("") == ()

    over_all(scenario)


def test_list_takes_whole_tokens_in_order(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        store = await backend.client()
        for key in ("w.b", "w.a", "w.a.x", "w", "wide", "x-1", "w-1.a", "v.z"):
            await store.create(key, key.encode())
        await store.create("w.gone", b"")
        await store.delete("w.gone")
        assert [entry.key for entry in await store.list("w")] == ["w.a", "w.a.x", "w.b"]
        assert [entry.key for entry in await store.list("w.a")] == ["w.a.x"]
        assert [entry.key for entry in await store.list("nothing")] == []
        everything = await store.list("")
        assert [entry.key for entry in everything] == sorted(
            ["w.b", "w.a", "w.a.x", "w", "wide", "x-1", "w-1.a", "v.z"]
        )
        assert all(entry.value == entry.key.encode() for entry in everything)

    over_all(scenario)


def test_a_watch_begins_with_what_is_there_and_goes_on(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        store, other = await backend.client(), await backend.client()
        first = await other.create("w.a", b"1")
        await other.create("x.a", b"elsewhere")
        await other.create("w.gone", b"")
        await other.delete("w.gone")
        async with store.watch("w") as watch:
            assert watch.snapshot == (Entry("w.a", b"1", first),)
            assert await take(watch, 1) == [Change("w.a", Entry("w.a", b"1", first))]
            second = await other.update("w.a", b"2", first)
            assert await take(watch, 1) == [Change("w.a", Entry("w.a", b"2", second))]
            await other.create("x.b", b"elsewhere")
            third = await other.create("w.b", b"3")
            assert await take(watch, 1) == [Change("w.b", Entry("w.b", b"3", third))]
            await other.delete("w.a")
            assert await take(watch, 1) == [Change("w.a", None)]

    over_all(scenario)


def test_a_watch_of_nothing_begins_empty_and_stays_silent(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        store = await backend.client()
        await store.create("a", b"")
        async with store.watch("b") as watch:
            assert watch.snapshot == ()
            await store.delete("a")
            with pytest.raises(asyncio.TimeoutError):
                await take(watch, 1, timeout_s=0.3)
            await store.create("b.c", b"now")
            assert [change.key for change in await take(watch, 1)] == ["b.c"]

    over_all(scenario)


def test_a_slow_listener_gets_the_newest_of_each_key(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        store = await backend.client()
        async with store.watch("") as watch:
            revision = await store.create("a", b"0")
            for n in range(1, 30):
                revision = await store.update("a", b"%d" % n, revision)
            await store.create("b", b"last")
            await wait_change(watch, "b", lambda entry: entry is not None)
        async with store.watch("") as watch:
            newest = {change.key: change.entry for change in await take(watch, 2)}
            assert newest["a"] == Entry("a", b"29", revision)

    over_all(scenario)


def test_a_watch_ends_with_its_store(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        store = await backend.client()
        async with store.watch("") as watch:
            waiting = asyncio.create_task(take(watch, 1))
            await asyncio.sleep(0.05)
            await store.close()
            with pytest.raises((StopAsyncIteration, RuntimeError)):
                await asyncio.wait_for(waiting, 5)
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.get("a")
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.create("a", b"")

    over_all(scenario)


def test_a_watch_goes_on_through_a_crash_of_the_server(over_servers: Over) -> None:
    async def scenario(backend: Backend) -> None:
        store, other = await backend.client(), await backend.client()
        revision = await other.create("a", b"0")
        await other.create("stays", b"")
        async with store.watch("") as watch:
            await take(watch, 2)
            for life in range(1, 3):
                await backend.crash()
                await backend.start()
                revision = await other.update("a", b"%d" % life, revision)
                assert await take(watch, 1) == [Change("a", Entry("a", b"%d" % life, revision))]
            await backend.crash()
            await backend.start()
            await other.delete("a", revision)
            assert await take(watch, 1) == [Change("a", None)]
            with pytest.raises(asyncio.TimeoutError):  # and nothing is told twice
                await take(watch, 1, timeout_s=0.5)

    over_servers(scenario)


def test_what_was_acknowledged_survives_a_crash(over_servers: Over) -> None:
    async def scenario(backend: Backend) -> None:
        store = await backend.client()
        revision = await store.create("count", b"0")
        acknowledged, stop, more = 0, asyncio.Event(), asyncio.Event()

        async def count() -> None:
            nonlocal acknowledged, revision
            while not stop.is_set():
                try:
                    revision = await store.update("count", b"%d" % (acknowledged + 1), revision)
                    acknowledged += 1
                    more.set()
                except (StoreUnavailable, RevisionConflict):
                    # Whether the last write took effect is unknown: read, then decide.
                    try:
                        entry = await store.get("count")
                    except StoreUnavailable:
                        continue
                    assert entry is not None
                    assert int(entry.value) >= acknowledged, "an acknowledged write was lost"
                    acknowledged, revision = int(entry.value), entry.revision

        counting = asyncio.create_task(count())
        for _ in range(2):
            await asyncio.sleep(0.2)
            await backend.crash()
            before = acknowledged
            more.clear()
            await backend.start()
            await asyncio.wait_for(more.wait(), 20)
            assert acknowledged > before
        stop.set()
        await counting
        entry = await store.get("count")
        assert entry is not None
        assert int(entry.value) == acknowledged

    over_servers(scenario)


def test_a_server_that_stays_away_is_said(over_servers: Over) -> None:
    async def scenario(backend: Backend) -> None:
        store = await backend.client()
        store._timeout_s = 0.3  # type: ignore[attr-defined]
        await backend.crash()
        for attempt in (
            store.get("a"),
            store.create("a", b""),
            store.update("a", b"", 1),
            store.delete("a"),
            store.list(""),
            store.lease("a", b"", 5),
            store.watch("").__aenter__(),
        ):
            with pytest.raises(StoreUnavailable, match="cannot"):
                await asyncio.wait_for(attempt, 5)
        await backend.start()

    over_servers(scenario)


BAD_KEYS = ["", ".", "a.", ".a", "a..b", "a/b", "a b", "a*", ">", "ä", "a" * 600]


def test_bad_keys_are_refused_before_they_reach_a_server(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        store = await backend.client()
        for key in BAD_KEYS:
            for attempt in (
                store.get(key),
                store.create(key, b""),
                store.update(key, b"", 1),
                store.delete(key),
                store.lease(key, b"", 5),
            ):
                with pytest.raises(BadKey, match="cannot use"):
                    await attempt
        for prefix in BAD_KEYS[1:]:  # the empty prefix means everything
            with pytest.raises(BadKey, match="cannot use"):
                await store.list(prefix)
            with pytest.raises(BadKey, match="cannot use"):
                store.watch(prefix)

    over_all(scenario)


def test_bounds_are_said(over_all: Over) -> None:
    async def scenario(backend: Backend) -> None:
        store = await backend.client()
        with pytest.raises(BadKey, match="2000000 bytes"):
            await store.create("a", bytes(2_000_000))
        for ttl_s in (0, 0.5, -1, float("nan")):
            with pytest.raises(ValueError, match="1 s at least"):
                await store.lease("a", b"", ttl_s)
        big = bytes(range(256)) * 4000
        await store.create("big.value", big)
        entry = await store.get("big.value")
        assert entry is not None
        assert entry.value == big

    over_all(scenario)
