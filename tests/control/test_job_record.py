"""The job's record: found, begun, archived, and never written by two masters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aegis_elastic.control.job_record import ARCHIVE_PREFIX, JOB_KEY, Fenced, JobRecordStore
from aegis_elastic.core.events import Join, Quit, Reconcile
from aegis_elastic.core.machine import step
from aegis_elastic.core.model import Phase, Status
from aegis_elastic.store.contract import Entry, StoreUnavailable
from aegis_elastic.store.memory import MemoryStore
from tests.control.planes import spec

NOW = 1000.0


def joined(status: Status, *workers: str) -> Status:
    """The status when these have come and have taken their seats."""
    for worker in workers:
        status = step(status, Join(worker, f"uid-{worker}", worker, "10.0.0.1", 1), NOW).status
        status = step(status, Reconcile(), NOW).status
    return status


def ended(status: Status) -> Status:
    """The status when somebody has asked to quit."""
    return step(step(status, Quit("enough"), NOW).status, Reconcile(), NOW).status


def run(scenario: Callable[[MemoryStore], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(MemoryStore()), 30))


def test_a_new_job_is_begun_and_a_second_master_goes_on_from_its_record() -> None:
    async def scenario(store: MemoryStore) -> None:
        first = JobRecordStore(store)
        begun = await first.open(spec(), NOW, resume=True)
        assert (begun.name, begun.status.phase, begun.status.spec.generation) == ("create", Phase.PENDING, 1)
        status = joined(begun.status, "a")
        await first.save(status)
        found = await JobRecordStore(store).open(spec(), NOW + 60, resume=True)
        assert (found.name, found.status) == ("adopt", status)

    run(scenario)


def test_of_two_masters_only_the_one_that_wrote_last_can_go_on() -> None:
    async def scenario(store: MemoryStore) -> None:
        old, new = JobRecordStore(store), JobRecordStore(store)
        begun = await old.open(spec(), NOW, resume=True)
        taken = await new.open(spec(), NOW, resume=True)
        await new.save(joined(taken.status, "a"))
        with pytest.raises(Fenced, match="another master"):
            await old.save(joined(begun.status, "b"))
        found = await JobRecordStore(store).open(spec(), NOW, resume=True)
        assert [worker.name for worker in found.status.workers] == ["a"]

    run(scenario)


def test_of_two_that_begin_at_once_one_is_fenced() -> None:
    class Slow(MemoryStore):
        async def get(self, key: str) -> Entry | None:
            found = await super().get(key)
            await asyncio.sleep(0)
            return found

    async def scenario(_: MemoryStore) -> None:
        store = Slow()
        results = await asyncio.gather(
            *(JobRecordStore(store).open(spec(), NOW, resume=True) for _ in range(2)), return_exceptions=True
        )
        assert sorted(type(result).__name__ for result in results) == ["Fenced", "Transition"]

    run(scenario)


def test_a_job_that_has_ended_is_archived_and_the_next_one_of_its_name_begins_anew() -> None:
    async def scenario(store: MemoryStore) -> None:
        keeper = JobRecordStore(store)
        begun = await keeper.open(spec(), NOW, resume=True)
        await keeper.save(ended(joined(begun.status, "a")))
        old = await store.get(JOB_KEY)
        assert old is not None
        again = await JobRecordStore(store).open(spec(max_retry=7), NOW + 60, resume=True)
        assert (again.name, again.status.spec.generation, again.status.spec.max_retry) == ("create", 2, 7)
        assert (again.status.workers, again.status.recover_count) == ((), 0)
        archived = await store.get(f"{ARCHIVE_PREFIX}.1")
        assert archived is not None
        assert archived.value == old.value
        # Its workers don't come back with the new one's record.
        found = await JobRecordStore(store).open(spec(), NOW + 61, resume=True)
        assert found.status == again.status

    run(scenario)


def test_an_anonymous_job_is_never_continued() -> None:
    async def scenario(store: MemoryStore) -> None:
        begun = await JobRecordStore(store).open(spec(), NOW, resume=False)
        again = await JobRecordStore(store).open(spec(), NOW + 60, resume=False)
        assert (begun.status.spec.generation, again.status.spec.generation) == (1, 2)
        assert again.name == "create"

    run(scenario)


def test_a_job_of_another_size_is_another_job_unless_it_runs_already() -> None:
    async def scenario(store: MemoryStore) -> None:
        keeper = JobRecordStore(store)
        begun = await keeper.open(spec(), NOW, resume=True)
        status = joined(begun.status, "a")
        await keeper.save(status)
        bigger = spec(worker_num=status.spec.worker_num + 1)
        assert (await JobRecordStore(store).open(bigger, NOW + 60, resume=True, leads=1)).status == status
        again = await JobRecordStore(store).open(bigger, NOW + 61, resume=True)
        assert (again.name, again.status.spec.generation, again.status.workers) == ("create", 2, ())

    run(scenario)


@pytest.mark.parametrize("over", [False, True])
def test_the_generation_that_the_plane_leads_is_gone_on_with_however_it_stands(over: bool) -> None:
    async def scenario(store: MemoryStore) -> None:
        keeper = JobRecordStore(store)
        begun = await keeper.open(spec(), NOW, resume=False)
        status = ended(joined(begun.status, "a")) if over else joined(begun.status, "a")
        await keeper.save(status)
        found = await JobRecordStore(store).open(spec(), NOW + 60, resume=False, leads=1)
        assert (found.name, found.status) == ("adopt", status)

    run(scenario)


@pytest.mark.parametrize("name", ["node 7", "größe", "a.b>c*", "x" * 300])
def test_a_worker_s_name_may_have_any_characters(name: str) -> None:
    async def scenario(store: MemoryStore) -> None:
        keeper = JobRecordStore(store)
        begun = await keeper.open(spec(), NOW, resume=True)
        status = joined(begun.status, name)
        await keeper.save(status)
        assert (await JobRecordStore(store).open(spec(), NOW, resume=True)).status == status

    run(scenario)


class Dying(MemoryStore):
    """A store whose user dies after so many writes."""

    left = 10**9

    async def create(self, key: str, value: bytes) -> int:
        """As the store's, until death."""
        self._write()
        return await super().create(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """As the store's, until death."""
        self._write()
        return await super().update(key, value, revision)

    def _write(self) -> None:
        if self.left <= 0:
            raise StoreUnavailable("died")
        self.left -= 1


@pytest.mark.parametrize("workers", [2, 12])
def test_a_master_may_die_between_any_two_writes(workers: int) -> None:
    """Its successor finds the status before or the one after, never a third, and can write it itself."""
    names = [f"w{number}" for number in range(workers)]

    async def scenario(_: Any) -> None:
        for writes in range(2 * workers + 4):
            store = Dying()
            keeper = JobRecordStore(store)
            begun = await keeper.open(spec(worker_num=workers), NOW, resume=True)
            before = joined(begun.status, *names[:-1])
            await keeper.save(before)
            after = joined(before, names[-1])
            store.left = writes
            try:
                await keeper.save(after)
            except StoreUnavailable:
                assert writes < workers + 3
            store.left = 10**9
            successor = JobRecordStore(store)
            found = (await successor.open(spec(worker_num=workers), NOW, resume=True)).status
            assert found in (before, after), f"after {writes} writes"
            await successor.save(after if found == before else ended(found))

    run(scenario)
