"""Isolations of one job, performed beside its master: verified, bounded, recorded, and paged when they fail.

A node is isolated because a check or the guard has condemned it. Right before the driver is called the
node's record is read again, since an operator may have decided otherwise. How many nodes may be isolated at
once is counted over all jobs of the store, by slots that one isolation holds each: of two masters that take
the last one, one gets it. What fails is paged at once, tried again a few times, and can be tried again by
hand.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from aegis_elastic.control.host.cluster import ClusterScope
from aegis_elastic.control.host.tasks import end_all
from aegis_elastic.control.isolation.contract import Driver, DryRun, Outcome, call_driver
from aegis_elastic.core.policy import node_records
from aegis_elastic.core.policy.node_records import Isolated, NodeRecord
from aegis_elastic.store.contract import KeyExists, RevisionConflict, StoreError

logger = logging.getLogger(__name__)

SLOTS_PREFIX = "isolation"
ISOLATIONS_MAX = 4
TRIES_MAX = 3
RETRY_S = 60.0

# Returns why the guard doesn't allow that this node is isolated now; "" if it does.
Objection = Callable[[str], Awaitable[str]]
# Takes (node, code, detail) for the journal.
Note = Callable[[str, str, str], None]
# Takes (key, text, urgent) for a human.
Page = Callable[[str, str, bool], None]


def log_page(key: str, text: str, urgent: bool) -> None:
    """Page by a line in the log, where no human can be reached otherwise."""
    logger.warning("a human is wanted: %s", text)


class _Slot(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str
    job: str
    time: float


class Refused(Exception):
    """This node is not to be isolated, and trying again changes nothing."""


class Isolations:
    """Calls one driver, node by node. `isolate` and `release` return at once; `close` ends all."""

    def __init__(
        self,
        driver: Driver,
        scope: ClusterScope,
        job: str,
        *,
        now: Callable[[], float],
        note: Note,
        page: Page,
        most: int = ISOLATIONS_MAX,
        retry_s: float = RETRY_S,
        objection: Objection | None = None,
    ) -> None:
        """`most`: how many nodes may be isolated at once; `now`: wall seconds."""
        self._driver = driver
        self._scope = scope
        self._job = job
        self._now = now
        self._note = note
        self._page = page
        self._most = most
        self._retry_s = retry_s
        self._objection = objection
        self._dry = isinstance(driver, DryRun)
        self._one_at_a_time = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def isolate(self, node: str, reason: str) -> None:
        """Have this node isolated, unless that is under way."""
        self._start(f"isolate {node}", self._isolate_with_retries(node, reason))

    def release(self, node: str) -> None:
        """Have a node given back that this driver has isolated."""
        self._start(f"release {node}", self._release(node))

    async def close(self, patience_s: float = 0.0) -> None:
        """End what is under way after `patience_s`; a program that runs is ended with it."""
        tasks = [*self._tasks.values()]
        if tasks and patience_s > 0:
            await asyncio.wait(tasks, timeout=patience_s)
        await end_all(tasks)

    def _start(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        if what in self._tasks:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=what)
        self._tasks[what] = task
        task.add_done_callback(lambda _: self._ended(what, task))

    def _ended(self, what: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(what, None)
        if not task.cancelled() and task.exception() is not None:
            logger.error("could not %s: %r", what, task.exception())

    async def _isolate_with_retries(self, node: str, reason: str) -> None:
        for attempt in range(1, TRIES_MAX + 1):
            try:
                async with self._one_at_a_time:
                    outcome = await self._isolate(node, reason)
            except Refused as refusal:
                self._note(node, "isolation.refused", str(refusal))
                self._page(f"isolation {node}", f"node {node} ({reason}) is not isolated: {refusal}", False)
                return
            except StoreError as error:
                outcome = Outcome(False, f"the records of nodes can't be had: {error}")
            if outcome.ok:
                return
            self._note(node, "isolation.failed", outcome.message)
            left = TRIES_MAX - attempt
            then = f"tried again in {self._retry_s:g} s" if left else "given up"
            by_hand = f"by hand: aegisctl taint {node} --isolate --reason ..."
            self._page(f"isolation {node}", f"{outcome.message}; {then}; {by_hand}", True)
            if left:
                await asyncio.sleep(self._retry_s)

    async def _isolate(self, node: str, reason: str) -> Outcome:
        """One attempt. Refused if it is not to be, StoreError if that is not known."""
        record = await self._scope.record(node)
        if node_records.judge(record, self._now()).free:
            self._note(node, "isolation.cancelled", "the node may be used again")
            return Outcome(True, "cancelled")
        if record.isolated is not None:
            return Outcome(True, f"isolated already by {record.isolated.driver}")
        why = await self._objection(node) if self._objection else ""
        if why:
            raise Refused(why)
        if self._dry:
            outcome = await call_driver(self._driver, "isolate", node, reason)
            self._note(node, "isolation.dry_run", outcome.message)
            return outcome
        if not await take_slot(self._scope, _Slot(node, self._job, self._now()), self._most, self._now()):
            raise Refused(f"{self._most} nodes are isolated already (--aegis-isolation-max)")
        outcome = await call_driver(self._driver, "isolate", node, reason)
        if not outcome.ok:
            await free_slot(self._scope, node)
            return outcome
        mark = Isolated(self._driver.name, self._now(), self._job)
        await self._scope.change(node, lambda found: msgspec.structs.replace(found, isolated=mark))
        self._note(node, "isolation.done", outcome.message)
        return outcome

    async def _release(self, node: str) -> None:
        try:
            async with self._one_at_a_time:
                outcome = await release(self._scope, self._driver, node, self._now())
        except StoreError as error:
            outcome = Outcome(False, f"the records of nodes can't be had: {error}")
        if outcome is None:
            return
        self._note(node, "isolation.released" if outcome.ok else "isolation.not_released", outcome.message)
        if not outcome.ok:
            self._page(f"isolation {node}", f"node {node} is not given back: {outcome.message}", False)


async def release(scope: ClusterScope, driver: Driver, node: str, now: float) -> Outcome | None:
    """Give a node back that this driver has isolated and that is free; None if there is nothing to do.

    Of several who find it so, whoever takes the mark off the record does it.
    """
    before = await scope.record(node)
    mark = before.isolated
    if mark is None or mark.driver != driver.name or not node_records.judge(before, now).free:
        return None
    ours = False

    def unmark(found: NodeRecord) -> NodeRecord:
        nonlocal ours
        ours = found.isolated == mark
        return msgspec.structs.replace(found, isolated=None) if ours else found

    await scope.change(node, unmark)
    if not ours:
        return None
    outcome = await call_driver(driver, "release", node, "")
    if outcome.ok:
        await free_slot(scope, node)
    else:
        await scope.change(node, lambda found: msgspec.structs.replace(found, isolated=mark))
    return outcome


async def take_slot(scope: ClusterScope, slot: _Slot, most: int, now: float) -> bool:
    """Take one of the slots for isolated nodes, or the one that this node has; False if all are taken.

    A slot whose node is no longer kept out was left behind by a master that died.
    """
    store = await scope.store()
    taken = {entry.key: entry for entry in await store.list(SLOTS_PREFIX)}
    held = {key: _slot(entry.value) for key, entry in taken.items()}
    if any(each is not None and each.node_name == slot.node_name for each in held.values()):
        return True
    for number in range(most):
        key = f"{SLOTS_PREFIX}.{number}"
        holder = held.get(key)
        try:
            if key not in taken:
                await store.create(key, msgspec.json.encode(slot))
            elif holder is None or await _is_over(scope, holder, now):
                await store.update(key, msgspec.json.encode(slot), taken[key].revision)
            else:
                continue
        except (KeyExists, RevisionConflict):
            continue  # somebody was quicker: there may be another one
        return True
    return False


async def free_slot(scope: ClusterScope, node: str) -> None:
    """Give the node's slot back, if it has one."""
    store = await scope.store()
    for entry in await store.list(SLOTS_PREFIX):
        slot = _slot(entry.value)
        if slot is not None and slot.node_name == node:
            try:
                await store.delete(entry.key, entry.revision)
            except RevisionConflict:
                continue  # it is another node's by now


async def _is_over(scope: ClusterScope, slot: _Slot, now: float) -> bool:
    record = await scope.record(slot.node_name)
    return record.isolated is None and node_records.judge(record, now).free


def _slot(value: bytes) -> _Slot | None:
    try:
        return msgspec.json.decode(value, type=_Slot)
    except msgspec.MsgspecError:
        return None
