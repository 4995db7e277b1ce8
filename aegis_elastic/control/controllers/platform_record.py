"""The platform's record of the job: its status, and which workers never came.

Shortly before the join timeout, when too few have come, it lists the job's machines and puts in line what
`core.policy.missing_workers` decides; when that is durable, it has the platform make machines anew. Nothing
that the platform says or doesn't say holds the job up: then the join timeout decides as it does without a
platform.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from aegis_elastic.control.controllers.contract import Applied, Controllers
from aegis_elastic.control.host.tasks import end_all
from aegis_elastic.control.isolation.api_server import Client, from_pod
from aegis_elastic.control.isolation.config_map import JobRecord, RecordUnread, encoded
from aegis_elastic.core.accounts.status_view import status_view
from aegis_elastic.core.events import Cleared, Event, Relaunched, Remake
from aegis_elastic.core.machine.change import is_independent
from aegis_elastic.core.model import Phase, Status
from aegis_elastic.core.policy import missing_workers
from aegis_elastic.core.policy.missing_workers import Plan
from aegis_elastic.core.protocol.messages import Message

logger = logging.getLogger(__name__)

# How long before the join timeout the platform is asked, at most; a tenth of it where that is less.
AHEAD_S = 10.0
# A record is for people and controllers: it needn't follow every step.
WRITE_S = 1.0
LAST_WRITE_S = 2.0
# Two questions fit into the time ahead.
TIMEOUT_S = 4.0
# A ConfigMap holds a megabyte at most.
WORKERS_MAX = 500


class PlatformRecordController:
    """One job's. `own_address`: where the plane itself lives, whose machine goes last."""

    def __init__(self, feed: Callable[[Event], None], record: JobRecord, own_address: str) -> None:
        self._feed = feed
        self._record = record
        self._own_address = own_address
        self._own_machine = ""
        self._status: Status | None = None
        self._deadline_done = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._last_error = ""

    def on_report(self, report: Message, now_s: float) -> None:
        """Nothing: the record follows the status."""

    def on_transitions(self, status: Status, transitions: Sequence[Applied]) -> None:
        """Have the record written, and machines made anew where that was decided."""
        first, self._status = self._status is None, status
        self._changed.set()
        if first:
            self._run(self._write_forever())
        for _, transition in transitions:
            for effect in transition.effects:
                if isinstance(effect, Remake):
                    self._run(self._remake(effect))

    def due_s(self) -> float:
        """Shortly before the join timeout, once for each."""
        status = self._status
        if status is None or not _lacks_workers(status) or self._deadline_done == status.deadline:
            return math.inf
        ahead_s = min(AHEAD_S, status.spec.join_timeout_s / 10)
        return time.monotonic() + status.deadline - ahead_s - time.time()

    def events_due(self, now_s: float) -> Sequence[Event]:
        """Find out who is missing; the event is put in line when that is known."""
        status = self._status
        assert status is not None
        self._deadline_done = status.deadline
        self._run(self._find_missing(status))
        return ()

    async def close(self) -> None:
        """Write what isn't written yet, and end."""
        if self._status is not None and self._changed.is_set():
            last = asyncio.create_task(self._write(self._status), name="last record")
            self._tasks.add(last)
            await asyncio.wait({last}, timeout=LAST_WRITE_S)
        await end_all(self._tasks)

    async def _find_missing(self, status: Status) -> None:
        try:
            found = await self._record.read()
            machines = await self._record.machines(found.selector)
        except RecordUnread as error:
            logger.warning("%s; only the join timeout decides", error)
            return
        self._own_machine = next((one.name for one in machines if one.address == self._own_address), "")
        # Who came meanwhile is no longer missing.
        now = self._status if self._status is not None else status
        if not _lacks_workers(now):
            return
        came = frozenset(worker.node_ip for worker in (*now.workers, *now.spares) if not worker.gone)
        decided = missing_workers.decide(machines, came, found.controlled, found.rounds)
        if decided.plan is Plan.RELAUNCH:
            # Counted first, and also when none is made anew: rounds that can't be counted would never end.
            if why := await self._record.write(rounds=str(found.rounds + 1)):
                logger.warning("no machine is made anew, for that can't be counted: %s", why)
                return
            until = now.deadline + now.spec.join_timeout_s
            self._feed(Relaunched(decided.machines, until, decided.reason))
        elif decided.plan is Plan.CLEAR:
            self._feed(Cleared(decided.machines, decided.reason))
        else:
            logger.info("no machine is made anew: %s", decided.reason)

    async def _remake(self, effect: Remake) -> None:
        for machine in sorted(effect.machines, key=lambda name: name == self._own_machine):
            if why := await self._record.remake(machine):
                logger.error("cannot have %s made anew: %s", machine, why)

    async def _write_forever(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            assert self._status is not None
            await self._write(self._status)
            await asyncio.sleep(WRITE_S)

    async def _write(self, status: Status) -> None:
        # All have come: whoever is missing later is missing for the first time.
        again = {"rounds": "0"} if status.phase is Phase.RUN_COMMAND else {}
        self._log_once(await self._record.write(status=encoded(_status_view(status)), **again))

    def _log_once(self, why: str) -> None:
        """Once for each reason: a server that is away is away at every write."""
        if why and why != self._last_error:
            logger.warning("cannot write the job's record: %s", why)
        self._last_error = why

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the job's record is not kept any more: %s", task.exception())


def add_to(controllers: Controllers, feed: Callable[[Event], None], named: str, own_address: str) -> None:
    """Add the controller of this record. ValueError if the record can't be written here."""
    client = Client(from_pod("keep the job's record"), TIMEOUT_S)
    controllers.add(PlatformRecordController(feed, JobRecord(client, named), own_address))


def _lacks_workers(status: Status) -> bool:
    """Whether the join timeout would end the waiting for too few workers."""
    here = sum(worker.finished and not worker.gone for worker in status.workers)
    waiting = status.phase is Phase.PENDING and status.deadline > 0 and not is_independent(status)
    return waiting and here < status.spec.min_worker_num


def _status_view(status: Status) -> dict[str, Any]:
    """The record's `status`: that of `aegisctl status --json`, with what a job's controller decides by."""
    view = status_view(status, {})
    del view["plane"]
    left_out = len(view["workers"]) - WORKERS_MAX
    view["workers"] = view["workers"][:WORKERS_MAX]
    if left_out > 0:
        view["workersLeftOut"] = left_out
    return view | {
        "mode": status.mode.value,
        "shouldQuit": status.should_quit,
        "failReason": status.fail_reason,
        "marks": [msgspec.to_builtins(mark) for mark in status.marks],
    }
