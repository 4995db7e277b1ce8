"""Records of the cluster's nodes: what they say becomes Taint and Untaint, and what the job finds out about a
node goes into its record, and to the scheduler.

The controller is level-triggered on the records: whatever changes them (another job, an operator, time) is
fed to `step`, which ignores what it knows. Before an agent's Join is decided on, its node's record is read
anew, so that no late watch lets a bad node in. If the store can't be reached the job goes on with what is
known; that is logged once, as an error, and what is to be written waits until it can be.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from aegis_elastic.control.controllers.contract import Applied, Controllers
from aegis_elastic.control.controllers.node_admin import NodeAdmin
from aegis_elastic.control.host.cluster import (
    ClusterScope,
    Edit,
    VersionedRecord,
    node_key,
    of_cluster,
    of_job,
    record_of,
)
from aegis_elastic.control.host.config import NodesConfig
from aegis_elastic.control.host.tasks import end_all
from aegis_elastic.control.isolation import drivers
from aegis_elastic.control.isolation.isolations import Isolations, Objection, Page, log_page
from aegis_elastic.core.events import Event, Noted, RecordErrorNode, Taint, Untaint
from aegis_elastic.core.model import ErrorNode, JobSpec, Status
from aegis_elastic.core.policy import node_records
from aegis_elastic.core.policy.node_records import (
    ANOMALY,
    HARDWARE,
    MANUAL,
    NOTICE,
    Incident,
    NodeRecord,
    NodeTaint,
)
from aegis_elastic.core.protocol.messages import Message
from aegis_elastic.store.contract import Change, Store, StoreError

logger = logging.getLogger(__name__)

# A day: by then somebody has read the page.
TAINT_S = 86400.0
# A first Join waits this long for the records, every later one for its node's; then what is known must do.
LOAD_PATIENCE_S = 5.0
# Both are well within what an agent waits for its answer, and long enough for a busy host.
READ_PATIENCE_S = 6.0
RETRY_S, RETRY_S_MAX = 1.0, 30.0
CLOSE_PATIENCE_S = 2.0
# While the store is away notes wait in memory; they are worth less than that.
NOTES_MAX = 1000
# What watchers of ranks and nodes note of a node's health; other notes are about our own actions.
ANOMALIES = ("cpu.", "gpu.", "memory.", "network.", "signature.")
# Of these, the log lines that name hardware are about the machine; the others about what ran on it.
OF_THE_MACHINE = tuple(
    f"signature.{kind}_" for kind in ("gpu", "ib", "pcie", "nic", "nvswitch", "disk", "efa", "driver", "host")
)


def source_of(spec: JobSpec) -> str:
    """How a job is called in the records of nodes: they outlive it, and so must its name."""
    return f"{spec.namespace}/{spec.job_name}/{spec.generation}"


class NodeController:
    """Reads and writes the records of nodes for one job."""

    def __init__(
        self,
        scope: ClusterScope,
        spec: JobSpec,
        feed: Callable[[Event], None],
        *,
        taint_s: float = TAINT_S,
        fresh: bool = False,
        isolations: Isolations | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`taint_s`: how long a taint of ours lasts (0: until it is lifted). `fresh`: the job has just begun,
        and what a store of its own holds of an earlier one is not its.
        """
        self._scope = scope
        self._source = source_of(spec)
        self._feed = feed
        self._taint_s = taint_s
        self._fresh = fresh and not scope.shared
        self._isolations = isolations
        self._now = now
        self._records: dict[str, NodeRecord] = {}
        self._revisions: dict[str, int] = {}
        # Ours that are not written yet: nobody may read the node's record as if it were free.
        self._unwritten: dict[str, NodeTaint] = {}
        self._status: Status | None = None
        self._loaded = asyncio.Event()
        self._writes: asyncio.Queue[tuple[str, Edit]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._store_lost = False
        self._due = math.inf
        self._began_s = time.monotonic()
        self._fed_taints = set[str]()
        self._isolation_requested = set[tuple[str, NodeTaint]]()

    # ------------------------------------------------------------ as a `Controller`

    def on_report(self, report: Message, now_s: float) -> None:
        """See `Controller.on_report`: reports have nothing of this."""

    def on_transitions(self, status: Status, transitions: Sequence[Applied]) -> None:
        """See `Controller.on_transitions`."""
        begins = self._status is None
        self._status = status
        for event, transition in transitions:
            for effect in transition.effects:
                if isinstance(effect, RecordErrorNode):
                    self._record_error_node(effect.node_name, transition.status)
            if isinstance(event, Noted) and event.node_name and event.code.startswith(ANOMALIES):
                self._write_incident(event)
        if begins:
            self._run(self._watch_records())
            self._run(self._write_forever())

    def due_s(self) -> float:
        """See `Controller.due_s`: when the next taint runs out."""
        return time.monotonic() + self._due - self._now() if math.isfinite(self._due) else math.inf

    def events_due(self, now_s: float) -> Sequence[Event]:
        """See `Controller.events_due`."""
        self._set_due()
        ran_out = [node for node, record in self._records.items() if record.taints]
        for node in ran_out:
            self._reconcile_isolation(node)
        return [self._taint_event(node) for node in ran_out]

    async def close(self) -> None:
        """See `Controller.close`. What is to be written or isolated gets a moment: the job may end because of
        it.
        """
        until_s = time.monotonic() + CLOSE_PATIENCE_S
        if self._unwritten:
            try:
                await asyncio.wait_for(self._writes.join(), CLOSE_PATIENCE_S)
            except asyncio.TimeoutError:
                logger.error("what this job found out about %s is not recorded", ", ".join(self._unwritten))
        if self._isolations is not None:
            await self._isolations.close(max(until_s - time.monotonic(), 0.0))
        await end_all(self._tasks)

    # ------------------------------------------------------------ admission

    async def check_admission(self, node_name: str) -> float:
        """See `AdmissionCheck`: have `step` know what this node's record says now; returns its score."""
        try:
            patience_s = max(self._began_s + LOAD_PATIENCE_S - time.monotonic(), 0.0)
            await asyncio.wait_for(self._loaded.wait(), patience_s)
            versioned = await asyncio.wait_for(self._scope.read(node_name), READ_PATIENCE_S)
        except (StoreError, asyncio.TimeoutError) as error:
            self._on_store_lost(error)
        else:
            self._on_store_back()
            self._update(node_name, versioned)
        known = self._records.get(node_name)
        return node_records.score(known, self._now()) if known else 0.0

    def on_operator_change(self, node: str, versioned: VersionedRecord, *, lifted: bool = False) -> None:
        """An operator has changed this node's record through this job; `lifted` its taints, ours included."""
        if lifted:
            self._unwritten.pop(node, None)
        self._update(node, versioned)

    # ------------------------------------------------------------ from the store

    async def _watch_records(self) -> None:
        """Know the records, through every outage of the store, for ever."""
        retry_s = RETRY_S
        while True:
            try:
                if self._fresh:
                    await self._scope.clear()
                    self._fresh = False
                async with await self._scope.watch() as watch:
                    found = [(record_of(entry), entry.revision) for entry in watch.snapshot]
                    self._load(
                        {r.node_name: VersionedRecord(r, revision) for r, revision in found if r is not None}
                    )
                    retry_s = RETRY_S
                    await self._scope.forget(self._now())
                    async for change in watch:
                        self._on_change(change)
            except StoreError as error:
                self._on_store_lost(error)
            except Exception:  # whatever it was, a node that others condemn meanwhile would be let in
                logger.exception("THE RECORDS OF NODES are not followed: trying again in %g s", retry_s)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_S_MAX)

    def _load(self, records: dict[str, VersionedRecord]) -> None:
        """The records as they are now. What the job has found and nobody has written down is written."""
        assert self._status is not None
        self._on_store_back()
        for found in self._status.error_nodes:
            taint = self._taint_of(found)
            record = _record_in(records, found.node_name).record
            ours = found.job == self._status.spec.job_name
            if ours and found.kind != MANUAL and not node_records.had_taint(record, taint):
                self._write_taint(found.node_name, taint)
        self._fed_taints.update(node.node_name for node in self._status.error_nodes)
        for name in {*records, *self._fed_taints}:
            self._update(name, _record_in(records, name))
        self._loaded.set()

    def _on_change(self, change: Change) -> None:
        if change.entry is None:
            # Somebody has deleted the record; keys don't tell names.
            gone = [node for node in self._records if node_key(node) == change.key]
            for node in gone:
                self._update(node, VersionedRecord(NodeRecord(node), 0))
            return
        record = record_of(change.entry)
        if record is not None:
            self._update(record.node_name, VersionedRecord(record, change.entry.revision))

    def _update(self, node: str, versioned: VersionedRecord) -> None:
        """This is what the node's record says now: feed it, and have the scheduler follow."""
        if 0 < versioned.revision < self._revisions.get(node, 0):
            return  # A watch that lags behind what was read at admission.
        self._revisions[node] = versioned.revision
        self._records[node] = versioned.record
        self._set_due()
        event = self._taint_event(node)
        if isinstance(event, Taint):
            self._fed_taints.add(node)
        if node in self._fed_taints:  # of clean nodes there are thousands, and no event is needed
            self._feed(event)
        self._reconcile_isolation(node)

    def _reconcile_isolation(self, node: str) -> None:
        """Whom this job has condemned, now or in an earlier life, the scheduler should not have; who is free
        it gets back, whoever had taken it.
        """
        if self._isolations is None or node in self._unwritten:
            return
        record, now = self._records[node], self._now()
        taint = node_records.condemned(record, now)
        ours = taint is not None and taint.job.rpartition("/")[0] == self._source.rpartition("/")[0]
        if taint is not None and ours and record.isolated is None:
            # Once for each taint: what was refused or given up is a human's, and records change often.
            if (node, taint) not in self._isolation_requested:
                self._isolation_requested.add((node, taint))
                self._isolations.isolate(node, taint.reason)
        elif record.isolated is not None and node_records.judge(record, now).free:
            self._isolations.release(node)

    def _effective_record(self, node: str) -> NodeRecord:
        record = self._records.get(node) or NodeRecord(node)
        unwritten = self._unwritten.get(node)
        return node_records.with_taint(record, unwritten) if unwritten else record

    def _taint_event(self, node: str) -> Event:
        verdict = node_records.judge(self._effective_record(node), self._now())
        if verdict.taint is None:
            return Untaint(node, "no taint stands")
        if verdict.standing is node_records.Standing.PROBATION:
            return Taint(node, verdict.why, HARDWARE)
        taint = verdict.taint
        reason = taint.reason if taint.job == self._source else f"{taint.reason} (says {taint.job})"
        return Taint(node, reason, taint.kind, taint.until)

    def _set_due(self) -> None:
        now = self._now()
        self._due = min(
            (node_records.changes_at(record, now) for record in self._records.values()), default=math.inf
        )

    # ------------------------------------------------------------ to the store

    def _record_error_node(self, node: str, status: Status) -> None:
        """The job has decided that this node must leave."""
        found = next((each for each in status.error_nodes if each.node_name == node), None)
        if found is not None:
            self._write_taint(node, self._taint_of(found))

    def _taint_of(self, found: ErrorNode) -> NodeTaint:
        until = found.until or (found.time + self._taint_s if self._taint_s else 0.0)
        return NodeTaint(node_records.clip(found.reason), found.kind, found.time, self._source, until)

    def _write_taint(self, node: str, taint: NodeTaint) -> None:
        self._unwritten[node] = taint

        def edit_record(record: NodeRecord) -> NodeRecord:
            # Once, by whichever master: if it was lifted since, an operator knew better.
            lifted = self._unwritten.get(node) != taint or node_records.had_taint(record, taint)
            return record if lifted else node_records.with_taint(record, taint)

        self._writes.put_nowait((node, edit_record))

    def _write_incident(self, event: Noted) -> None:
        kind = ANOMALY if event.code.startswith(OF_THE_MACHINE) else NOTICE
        incident = Incident(node_records.clip(event.code), kind, min(event.time, self._now()), self._source)
        known = self._records.get(event.node_name) or NodeRecord(event.node_name)
        if node_records.with_incident(known, incident) is not known and self._writes.qsize() < NOTES_MAX:
            self._writes.put_nowait(
                (event.node_name, lambda record: node_records.with_incident(record, incident))
            )

    async def _write_forever(self) -> None:
        """Write what is to be written, one after the other, for as long as it takes."""
        await self._loaded.wait()
        while True:
            node, edit = await self._writes.get()
            try:
                await self._write_one(node, edit)
            except Exception:  # a note that can't be written must not keep the others from being written
                logger.exception("THE RECORD OF NODE %s is not written; for this job it stands", node)
            finally:
                self._writes.task_done()

    async def _write_one(self, node: str, edit: Edit) -> None:
        retry_s = RETRY_S
        while True:
            try:
                versioned = await self._scope.changed(node, edit)
                break
            except StoreError as error:
                self._on_store_lost(error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_S_MAX)
        self._on_store_back()
        unwritten = self._unwritten.get(node)
        if unwritten is not None and node_records.had_taint(versioned.record, unwritten):
            del self._unwritten[node]
        self._update(node, versioned)

    def _on_store_back(self) -> None:
        if self._store_lost:
            self._store_lost = False
            logger.warning("the records of nodes in %s can be had again", self._scope.where)

    def _on_store_lost(self, error: Exception) -> None:
        if not self._store_lost:
            self._store_lost = True
            logger.error(
                "THE RECORDS OF NODES in %s can't be had: %s. Training goes on; until they are back, a node "
                "that others have tainted may be let in, and what this job finds waits to be written",
                self._scope.where,
                str(error) or "no answer",
            )

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(_log_if_broken)


def add_to(
    controllers: Controllers,
    feed: Callable[[Event], None],
    spec: JobSpec,
    config: NodesConfig,
    store: Store,
    *,
    fresh: bool,
    page: Page = log_page,
    objection: Objection | None = None,
) -> ClusterScope:
    """Add the controller of nodes, and return the scope that it works on: the cluster's, or the job's own
    `store`. ValueError if the isolation driver can't be used here.
    """
    scope = of_cluster(config.state_dir, config.store) or of_job(store)
    driver = drivers.make(config.isolation, dry_run=config.isolation_dry_run)

    def note(node: str, code: str, detail: str) -> None:
        feed(Noted("", node, code, detail, time.time()))

    isolations = None
    if driver is not None:
        isolations = Isolations(
            driver,
            scope,
            source_of(spec),
            now=time.time,
            note=note,
            page=page,
            most=config.isolation_max,
            objection=objection,
        )
    controller = NodeController(scope, spec, feed, taint_s=config.taint_s, fresh=fresh, isolations=isolations)
    controllers.add(controller)
    controllers.add_admission_check(controller, controller.check_admission)
    # Not when this controller breaks: the guard keeps its records there, too.
    controllers.on_close(scope.close)
    controllers.admin_handlers |= NodeAdmin(scope, controller.on_operator_change, isolations).admin_handlers
    return scope


def _record_in(records: Mapping[str, VersionedRecord], node: str) -> VersionedRecord:
    return records.get(node) or VersionedRecord(NodeRecord(node), 0)


def _log_if_broken(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("the records of nodes are no longer followed: %r", task.exception())
