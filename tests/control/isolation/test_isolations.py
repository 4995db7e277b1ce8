"""Isolations of several jobs over one store: verified, bounded, recorded once, paged and tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from aegis_elastic.control.host.cluster import ClusterScope, of_cluster, of_job
from aegis_elastic.control.isolation.contract import DryRun, Outcome
from aegis_elastic.control.isolation.isolations import Isolations, release
from aegis_elastic.core.policy import node_records
from aegis_elastic.core.policy.node_records import HARDWARE, MANUAL, SLOW, NodeTaint
from aegis_elastic.store.memory import MemoryBackend, MemoryStore

NOW = 1_000_000.0


class Scheduler:
    """A scheduler that does what it is told, or what a test lets it do; drivers of several jobs share it."""

    name = "sched"

    def __init__(self) -> None:
        self.out: set[str] = set()
        self.asked: list[str] = []
        self.failures = 0
        self.begun = asyncio.Event()
        self.gate: asyncio.Event | None = None

    async def isolate(self, node: str, reason: str) -> Outcome:
        self.asked.append(f"isolate {node}")
        self.begun.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            self.failures -= 1
            return Outcome(False, f"cannot drain {node}: no answer")
        self.out.add(node)
        return Outcome(True, f"{node} is out ({reason})")

    async def release(self, node: str) -> Outcome:
        self.asked.append(f"release {node}")
        self.out.discard(node)
        return Outcome(True, f"{node} is back")


class Bench:
    """One job's isolations, with what they noted and paged."""

    def __init__(self, scope: ClusterScope, scheduler: Any, **how: Any) -> None:
        self.notes: list[tuple[str, str, str]] = []
        self.pages: list[tuple[str, bool]] = []
        self.isolations = Isolations(
            scheduler,
            scope,
            "team/job/1",
            now=lambda: NOW,
            note=lambda *words: self.notes.append(words),
            page=lambda key, text, urgent: self.pages.append((text, urgent)),
            retry_s=0.02,
            **how,
        )

    async def all_done(self) -> None:
        await self.isolations.close(patience_s=20.0)

    def codes(self) -> list[str]:
        return [f"{node} {code}" for node, code, _ in self.notes]


async def condemn(scope: ClusterScope, *names: str, kind: str = HARDWARE, until: float = 0.0) -> None:
    taint = NodeTaint("gpu.missing", kind, NOW, "team/job/1", until)
    for name in names:
        await scope.change(name, lambda record: node_records.with_taint(record, taint))


def over_memory(scenario: Callable[[ClusterScope, Scheduler], Awaitable[None]]) -> None:
    async def whole() -> None:
        await scenario(of_job(MemoryStore()), Scheduler())

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_a_condemned_node_is_isolated_once_and_recorded() -> None:
    async def scenario(scope: ClusterScope, scheduler: Scheduler) -> None:
        bench = Bench(scope, scheduler)
        await condemn(scope, "n1")
        for _ in range(3):
            bench.isolations.isolate("n1", "gpu.missing")
            await bench.all_done()
        assert scheduler.asked == ["isolate n1"]
        assert bench.codes() == ["n1 isolation.done"]
        record = await scope.record("n1")
        assert record.isolated is not None and record.isolated.driver == "sched"

    over_memory(scenario)


def test_a_node_that_an_operator_freed_meanwhile_is_left_alone() -> None:
    async def scenario(scope: ClusterScope, scheduler: Scheduler) -> None:
        bench = Bench(scope, scheduler)
        bench.isolations.isolate("n1", "gpu.missing")
        await bench.all_done()
        assert scheduler.asked == []
        assert bench.codes() == ["n1 isolation.cancelled"]

    over_memory(scenario)


def test_a_failed_call_is_paged_at_once_and_tried_again() -> None:
    async def scenario(scope: ClusterScope, scheduler: Scheduler) -> None:
        bench = Bench(scope, scheduler)
        await condemn(scope, "n1")
        scheduler.failures = 1
        bench.isolations.isolate("n1", "gpu.missing")
        await bench.all_done()
        assert bench.codes() == ["n1 isolation.failed", "n1 isolation.done"]
        ((text, urgent),) = bench.pages
        assert urgent and "cannot drain n1: no answer; tried again in 0.02 s" in text
        assert scheduler.out == {"n1"}

    over_memory(scenario)


def test_one_that_never_works_is_given_up_and_can_be_tried_by_hand() -> None:
    async def scenario(scope: ClusterScope, scheduler: Scheduler) -> None:
        bench = Bench(scope, scheduler)
        await condemn(scope, "n1")
        scheduler.failures = 3
        bench.isolations.isolate("n1", "gpu.missing")
        await bench.all_done()
        assert bench.codes() == ["n1 isolation.failed"] * 3
        assert "given up; by hand: aegisctl taint n1 --isolate" in bench.pages[-1][0]
        assert (await scope.record("n1")).isolated is None
        assert await (await scope.store()).list("isolation") == ()
        bench.isolations.isolate("n1", "gpu.missing")
        await bench.all_done()
        assert scheduler.out == {"n1"}

    over_memory(scenario)


def test_no_more_nodes_are_isolated_at_once_than_allowed_over_all_jobs() -> None:
    async def scenario(scope: ClusterScope, scheduler: Scheduler) -> None:
        jobs = [Bench(scope, scheduler, most=2) for _ in range(3)]
        names = [f"n{number}" for number in range(6)]
        await condemn(scope, *names)
        for number, name in enumerate(names):
            jobs[number % 3].isolations.isolate(name, "gpu.missing")
        for job in jobs:
            await job.all_done()
        assert len(scheduler.out) == 2
        refused = [page for job in jobs for page in job.pages]
        assert len(refused) == 4 and "2 nodes are isolated already" in refused[0][0]
        # One that is free again makes room.
        back = min(scheduler.out)
        await scope.change(back, node_records.without_taints)
        jobs[0].isolations.release(back)
        await jobs[0].all_done()
        left = next(name for name in names if name not in scheduler.out and name != back)
        jobs[1].isolations.isolate(left, "gpu.missing")
        await jobs[1].all_done()
        assert len(scheduler.out) == 2 and left in scheduler.out

    over_memory(scenario)


def test_a_slot_that_a_dead_master_left_behind_is_taken_over() -> None:
    async def scenario(scope: ClusterScope, scheduler: Scheduler) -> None:
        scheduler.gate = asyncio.Event()
        dying, heir = Bench(scope, scheduler, most=1), Bench(scope, scheduler, most=1)
        await condemn(scope, "n1", "n2")
        dying.isolations.isolate("n1", "gpu.missing")
        await scheduler.begun.wait()
        await dying.isolations.close()
        heir.isolations.isolate("n2", "gpu.missing")
        await heir.all_done()
        assert heir.codes() == ["n2 isolation.refused"]  # n1 is out as far as anybody can know
        await scope.change("n1", node_records.without_taints)
        scheduler.gate.set()
        heir.isolations.isolate("n2", "gpu.missing")
        await heir.all_done()
        assert scheduler.out == {"n2"}

    over_memory(scenario)


def test_of_several_masters_one_gives_the_node_back() -> None:
    async def scenario(scope: ClusterScope, scheduler: Scheduler) -> None:
        await condemn(scope, "n1", kind=SLOW)
        jobs = [Bench(scope, scheduler) for _ in range(4)]
        jobs[0].isolations.isolate("n1", "slow")
        await jobs[0].all_done()
        await scope.change("n1", node_records.without_taints)
        outcomes = await asyncio.gather(*(release(scope, scheduler, "n1", NOW) for _ in jobs))
        assert [outcome is not None for outcome in outcomes].count(True) == 1
        assert scheduler.asked.count("release n1") == 1
        assert (await scope.record("n1")).isolated is None

    over_memory(scenario)


def test_a_node_on_probation_stays_with_its_scheduler_s_drain() -> None:
    async def scenario(scope: ClusterScope, scheduler: Scheduler) -> None:
        await condemn(scope, "n1", until=NOW + 1)
        bench = Bench(scope, scheduler)
        bench.isolations.isolate("n1", "gpu.missing")
        await bench.all_done()
        assert await release(scope, scheduler, "n1", NOW + 2) is None
        assert scheduler.out == {"n1"}

    over_memory(scenario)


def test_what_the_guard_objects_to_is_not_done_and_a_human_hears_why() -> None:
    async def objection(node: str) -> str:
        return f"the breaker of {node} is open"

    async def scenario(scope: ClusterScope, scheduler: Scheduler) -> None:
        bench = Bench(scope, scheduler, objection=objection)
        await condemn(scope, "n1")
        bench.isolations.isolate("n1", "gpu.missing")
        await bench.all_done()
        assert scheduler.asked == []
        assert bench.codes() == ["n1 isolation.refused"]
        assert "the breaker of n1 is open" in bench.pages[0][0]

    over_memory(scenario)


def test_a_dry_run_notes_what_would_be_done_and_leaves_no_record() -> None:
    async def scenario(scope: ClusterScope, scheduler: Scheduler) -> None:
        bench = Bench(scope, DryRun(scheduler))
        await condemn(scope, "n1")
        bench.isolations.isolate("n1", "gpu.missing")
        await bench.all_done()
        assert scheduler.asked == []
        assert bench.notes[0][1:] == (
            "isolation.dry_run",
            "dry run: sched would isolate n1 (aegis: gpu.missing)",
        )
        assert (await scope.record("n1")).isolated is None

    over_memory(scenario)


def test_a_store_that_is_away_is_paged_and_tried_again() -> None:
    async def whole() -> None:
        backend = MemoryBackend()
        stores = [MemoryStore(backend), MemoryStore(backend)]
        scope, scheduler = of_job(stores[0]), Scheduler()
        await condemn(scope, "n1")
        await stores[0].close()
        bench = Bench(scope, scheduler)
        bench.isolations.isolate("n1", "gpu.missing")
        await bench.all_done()
        assert bench.codes() == ["n1 isolation.failed"] * 3
        assert "the records of nodes can't be had" in bench.pages[0][0]
        assert scheduler.asked == []

    asyncio.run(asyncio.wait_for(whole(), 30))


@pytest.mark.parametrize("kind", [HARDWARE, MANUAL])
def test_two_processes_worth_of_stores_share_the_records(tmp_path: Path, kind: str) -> None:
    async def whole() -> None:
        one, other = of_cluster(str(tmp_path), ""), of_cluster(str(tmp_path), "")
        assert one is not None and other is not None
        await condemn(one, "n1", kind=kind)
        assert not node_records.judge(await other.record("n1"), NOW).free
        edits = [lambda r, i=i: node_records.with_incident(r, incident(i)) for i in range(8)]
        many = [other.change("n1", each) for each in edits]
        await asyncio.gather(one.change("n1", node_records.without_taints), *many)
        record = await one.record("n1")
        assert node_records.judge(record, NOW).free
        assert len({each.code for each in record.incidents if each.kind == node_records.ANOMALY}) == 8
        assert await one.forget(NOW) == 0
        assert await one.forget(NOW + 60 * 86400) == 1
        await one.close()
        await other.close()

    asyncio.run(asyncio.wait_for(whole(), 30))


def incident(number: int) -> node_records.Incident:
    return node_records.Incident(f"memory.{number}", node_records.ANOMALY, NOW, "team/job/2")
