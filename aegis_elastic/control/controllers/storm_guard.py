"""The storm guard's controller: marks become `Act` and `Evict` when the guard allows it, or a page.

It examines every mark for as long as it stands, and follows up every action of this job until it is known
whether it has helped. What other rules of the machine do to a node (a restart after an exit, a clean process,
a faulty node that leaves) is counted on the same breaker. An exit is answered whatever the breaker says; but
where it is open a spare is preferred to one more start (`Relieve`).

All of it runs in tasks of its own; the master gets events. A guard that can't reach its store does nothing
and logs that: without its records no action is allowed.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from aegis_elastic.control.controllers import nodes
from aegis_elastic.control.controllers.contract import Applied, Controllers
from aegis_elastic.control.controllers.correlated_failures import CorrelatedFailureController
from aegis_elastic.control.controllers.guarded_actions import GuardedActions
from aegis_elastic.control.host.config import PlaneConfig
from aegis_elastic.core.events import Act, Event, Evict, Noted, Page, RecordErrorNode, Relieve, Renew
from aegis_elastic.core.machine.change import feasible
from aegis_elastic.core.model import RECOVERING, TERMINAL, JobSpec, NodeMark, Phase, Status, Verdict
from aegis_elastic.core.policy import storm_guard, verdicts
from aegis_elastic.core.policy.settings import Policy
from aegis_elastic.core.policy.storm_guard import Action, Condition, GuardedAction, NodeGuard, Outcome
from aegis_elastic.core.protocol.messages import Message
from aegis_elastic.observe.paging import Pager
from aegis_elastic.store.contract import Store, StoreError

logger = logging.getLogger(__name__)

# How long after a checkpoint it is a boundary: an observation, a lock, and one more observation.
BOUNDARY_FRESH_S = 5.0
# Of what was seen of a node, so much goes along with a page.
NOTES_MAX = 5
_HUNG = (Verdict.FROZEN, Verdict.DESYNC)
# The machine's decisions that are a restart after an exit or a loss.
_LEVEL_1 = ("error", "lost")


class StormGuardController:
    """One job's guard."""

    def __init__(
        self,
        feed: Callable[[Event], None],
        job: str,
        policy: Policy,
        pager: Pager,
        store: Callable[[], Awaitable[Store]],
        *,
        name: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`job`: with namespace and generation, in records that outlive it; `name`: this instance. `store`
        gives the cluster's, or the job's own where there is none.
        """
        self._feed = feed
        self._job = job
        self._policy = policy
        self._pager = pager
        self._open = store
        self._name = name
        self._wall = now
        self._actions: GuardedActions | None = None
        self._status: Status | None = None
        self._wake = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Actions that are not yet counted in the store: (node, action, id).
        self._to_count: list[tuple[str, Action, str]] = []
        self._to_page: list[tuple[str, str, str, bool]] = []
        self._conditions: dict[tuple[str, Verdict], Condition] = {}
        self._unsettled_actions: dict[str, GuardedAction] = {}
        # What is recorded of the nodes that have ranks, as of this incarnation.
        self._records: dict[str, NodeGuard] = {}
        self._records_in = -1
        self._seen: dict[str, collections.deque[str]] = {}
        self._pending: dict[str, _Pending] = {}
        self._recovering_since: float | None = None
        self._store_lost = False
        self._broken: BaseException | None = None
        self._closed = False

    # ------------------------------------------------------------ as a `Controller`

    def on_report(self, report: Message, now_s: float) -> None:
        """See `Controller.on_report`: what the guard acts on is in the status."""

    def on_transitions(self, status: Status, transitions: Sequence[Applied]) -> None:
        """See `Controller.on_transitions`."""
        if self._status is None:
            self._start_task("reconcile", self._reconcile_forever())
        for event, transition in transitions:
            self._count(transition.status, event, transition.name, transition.effects)
            if isinstance(event, Noted) and verdicts.pages(event.code):
                what = f"{self._job}.{event.code}.{event.worker}.{transition.status.incarnation}"
                text = f"{event.worker or event.node_name or 'the job'}: {event.detail}"
                self._to_page.append((event.node_name, what, text, False))
            if isinstance(event, Noted) and event.node_name and not event.code.startswith("guard."):
                notes = self._seen.setdefault(event.node_name, collections.deque(maxlen=NOTES_MAX))
                notes.append(f"{event.code}: {event.detail}")
        self._status = status
        for pending in [*self._pending.values()]:
            pending.follow(status, transitions)
        if status.phase not in RECOVERING or status.held or status.suspended:
            self._recovering_since = None
        elif self._recovering_since is None:
            self._recovering_since = self._wall()
        self._wake.set()

    def due_s(self) -> float:
        """See `Controller.due_s`: its events come by `feed`. A guard that broke raises: it is put aside."""
        if self._broken is not None:
            raise self._broken
        return math.inf

    def events_due(self, now_s: float) -> Sequence[Event]:
        """See `Controller.events_due`."""
        return ()

    async def close(self) -> None:
        """See `Controller.close`."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def objection(self, node_name: str) -> str:
        """Why this node should not be taken from its scheduler now; "" if the guard has nothing against
        it.
        """
        if self._policy.mode == "observe":
            return "the policy is to observe"
        node, _ = await (await self._guarded_actions()).node(node_name)
        return storm_guard.objection(node, self.now(), self._policy.guard)

    # ------------------------------------------------------------ the reconciler

    async def _reconcile_forever(self) -> None:
        # `wait_for` of Python before 3.12 may swallow a cancellation that comes with what it waits for.
        while not self._closed:
            pending = self._conditions or self._unsettled_actions or self._to_count or self._to_page
            busy = bool(self._marks() or pending)
            look_s = self._policy.guard.look_s if busy or self._recovering_since is not None else None
            if self._actions is None:
                look_s = self._policy.guard.look_s
            try:
                await asyncio.wait_for(self._wake.wait(), look_s)
            except asyncio.TimeoutError:
                pass  # Time itself was waited for.
            self._wake.clear()
            try:
                await self._reconcile()
            except StoreError as error:
                self._on_store_lost(error)

    async def _reconcile(self) -> None:
        actions = await self._guarded_actions()
        while self._to_count:
            node, action, ident = self._to_count[0]
            self._records[node] = await actions.count(node, action, ident)
            del self._to_count[0]
        while self._to_page:
            where, what, text, urgent = self._to_page[0]
            sent = await actions.page(where, what, text, urgent=urgent)
            del self._to_page[0]
            if not sent:  # another has claimed it, and may have died before it sent it
                self._to_page.append((where, what, text, urgent))
                break
        await self._page_endless_recovery(actions)
        await self._load_records(actions)
        if self._store_lost:
            self._store_lost = False
            logger.warning("the guard's records can be had again")
        for mark in self._marks():
            record, _ = await actions.node(mark.node_name)
            action = storm_guard.remedy(mark.verdict, record, self._can_leave(mark.node_name), self.now())
            condition = Condition(mark.node_name, mark.worker, mark.verdict, action, mark.reason)
            self._conditions[mark.node_name, mark.verdict] = condition
        for taken in self._unsettled_actions.values():
            self._conditions.setdefault((taken.node_name, Verdict(taken.verdict)), _condition_of(taken))
        for node_name in {condition.node_name for condition in self._conditions.values()}:
            self._start_task(f"condition {node_name}", self._consider(actions, node_name))

    async def _consider(self, actions: GuardedActions, node_name: str) -> None:
        """Everything about one node, one after the other."""
        try:
            for key, condition in [*self._conditions.items()]:
                if condition.node_name != node_name:
                    continue
                await actions.follow_up(condition)
                if self._status is None or self._status.phase in RECOVERING:
                    continue  # there is nothing to judge a node by, and nothing to be done to it
                await actions.examine(condition)
                if not any((mark.node_name, mark.verdict) == key for mark in self._marks()):
                    # It has gone, and what was noted of it is cleared away.
                    self._conditions.pop(key, None)
            await self._load_unsettled(actions)
        except StoreError as error:
            self._on_store_lost(error)

    async def _load_unsettled(self, actions: GuardedActions) -> None:
        self._unsettled_actions = {taken.id: taken for taken in await actions.unsettled()}

    async def _load_records(self, actions: GuardedActions) -> None:
        """Know beforehand whose breaker is open: when training fails there is no time to ask."""
        status = self._status
        if status is None or status.phase is not Phase.RUN_COMMAND or status.incarnation == self._records_in:
            return
        self._records = await actions.nodes({worker.node_name for worker in status.workers})
        self._records_in = status.incarnation

    async def _page_endless_recovery(self, actions: GuardedActions) -> None:
        since, status = self._recovering_since, self._status
        if since is None or status is None or self.now() - since < self._policy.guard.error_state_s:
            return
        text = (
            f"the recovery of incarnation {status.incarnation} has not ended for {self.now() - since:.0f} s "
            f"({status.phase.value})"
        )
        await actions.page("", f"recovery.{self._job}.{status.incarnation}", text, urgent=True)

    def _marks(self) -> list[Any]:
        if self._status is None or self._status.phase in TERMINAL:
            return []
        return [*self._status.marks]

    def _can_leave(self, node_name: str) -> bool:
        return self._status is not None and feasible(self._status, node_name)

    async def _guarded_actions(self) -> GuardedActions:
        if self._actions is None:
            actions = GuardedActions(await self._open(), self._job, self._name, self._policy, self)
            await actions.forget()
            await self._load_unsettled(actions)
            self._actions = actions
        return self._actions

    def _on_store_lost(self, error: Exception) -> None:
        if not self._store_lost:
            self._store_lost = True
            logger.error("THE GUARD CAN'T REACH ITS RECORDS and allows nothing until it can: %s", error)

    def _start_task(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        if what in self._tasks:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=f"guard: {what}")
        self._tasks[what] = task

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.pop(what, None)
            if not task.cancelled() and task.exception() is not None:
                self._broken = task.exception()

        task.add_done_callback(ended)

    # ------------------------------------------------------------ what others decide

    def _count(self, status: Status, event: Event, name: str, effects: Sequence[Any]) -> None:
        ident = f"{self._job}.{status.step}"
        for effect in effects:
            if isinstance(effect, Page):
                what = f"{effect.key}.{status.incarnation}"
                self._to_page.append(("", f"{self._job}.{what}", effect.text, effect.urgent))
            elif isinstance(effect, RecordErrorNode) and effect.kind == "hardware":
                self._to_count.append((effect.node_name, Action.ISOLATE, ident))
            elif isinstance(effect, Renew):
                self._to_count.append((self._node_of(effect.worker), Action.LEVEL_2, ident))
        ours = any(pending.worker == status.root for pending in self._pending.values())
        if name in _LEVEL_1 and effects and status.root and not ours:
            for worker in status.root.split(", "):
                if node := self._node_of(worker):
                    self._to_count.append((node, Action.LEVEL_1, ident))
                    if name == "error":  # the ranks of who is lost go to spares anyway
                        self._prefer_a_spare(worker, node)

    def _prefer_a_spare(self, worker: str, node: str) -> None:
        why = storm_guard.breaker_open(self._records.get(node, NodeGuard()), self.now(), self._policy.guard)
        if why and self._policy.mode == "observe":
            self._feed(Noted(worker, node, "guard.would_act", f"a spare instead: {why}", self._wall()))
        elif why:
            self._feed(Relieve(node, why))

    def _node_of(self, name: str) -> str:
        worker = self._status.worker(name) if self._status is not None else None
        return worker.node_name if worker is not None else ""

    # ------------------------------------------------------------ as `guarded_actions.GuardedJob`

    def now(self) -> float:
        """See `GuardedJob.now`."""
        return self._wall()

    async def observe(self, condition: Condition) -> tuple[bool, bool]:
        """See `GuardedJob.observe`: the marks are the shared record. A hang after a hang is still one."""
        status = self._status
        kinds = _HUNG if condition.verdict in _HUNG else (condition.verdict,)
        marks = [m for m in self._marks() if m.node_name == condition.node_name and m.verdict in kinds]
        fresh = status is not None and 0 <= self._wall() - status.saved_at <= BOUNDARY_FRESH_S
        # Whoever still recovers from the hang that was acted on hasn't recovered.
        stuck = status is not None and status.phase in RECOVERING and condition.verdict in _HUNG
        boundary = fresh and any(mark.safe and self._is_due(mark, status) for mark in marks)
        return bool(marks) or stuck, boundary

    def _is_due(self, mark: NodeMark, status: Status | None) -> bool:
        """Whether the last checkpoint came after all that the guard waits for. One that came before is no
        boundary any more when the wait ends: the steps since then would be lost.
        """
        rules = self._policy.guard
        due_at = mark.time + rules.persistence_s + rules.observations * rules.look_s
        return status is not None and status.saved_at >= due_at

    async def collect(self, condition: Condition) -> str:
        """See `GuardedJob.collect`."""
        return "\n".join(self._seen.get(condition.node_name, ()))

    async def act(self, condition: Condition, taken: GuardedAction) -> tuple[Outcome, str]:
        """See `GuardedJob.act`: an event of `step`, and then what the job makes of it."""
        status = self._status
        if status is None or status.phase is not Phase.RUN_COMMAND:
            return Outcome.WITHDRAWN, "training doesn't run"
        event: Event = Evict(condition.node_name, taken.reason)
        if taken.action is Action.RESTART_HUNG:
            event = Act(condition.worker, condition.verdict.value, taken.reason)
        pending = _Pending(event, condition.worker, status.incarnation)
        self._pending[taken.id] = pending
        try:
            self._feed(event)
            return await asyncio.wait_for(pending.outcome, self._policy.guard.act_timeout_s)
        except asyncio.TimeoutError:
            return (
                Outcome.FAILED,
                f"training does not run again after {self._policy.guard.act_timeout_s:.0f} s",
            )
        finally:
            del self._pending[taken.id]

    async def page(self, key: str, text: str, *, urgent: bool) -> None:
        """See `GuardedJob.page`."""
        self._feed(Noted("", key.partition(".")[0], "guard.page", text, self._wall()))
        await self._pager.send(key, text, urgent=urgent)

    def note(self, condition: Condition, code: str, detail: str) -> None:
        """See `GuardedJob.note`."""
        self._feed(Noted(condition.worker, condition.node_name, code, detail, self._wall()))


class _Pending:
    """An event of ours that is in line, and what will have become of it."""

    def __init__(self, event: Event, worker: str, incarnation: int) -> None:
        self.event = event
        self.worker = worker
        self.outcome: asyncio.Future[tuple[Outcome, str]] = asyncio.get_running_loop().create_future()
        self._incarnation = incarnation
        self._taken = False

    def follow(self, status: Status, transitions: Sequence[Applied]) -> None:
        """These decisions were made; the event may be among them."""
        if self.outcome.done():
            return
        for event, transition in transitions:
            if event is self.event:
                self._taken = transition.name in ("failed", "may_evict")
                if not self._taken:
                    self.outcome.set_result((Outcome.WITHDRAWN, transition.reason))
                    return
        if not self._taken:
            return
        if status.phase is Phase.RUN_COMMAND and status.incarnation > self._incarnation:
            self.outcome.set_result((Outcome.DONE, f"incarnation {status.incarnation} runs"))
        elif status.phase is Phase.RUN_COMMAND:
            # An eviction is decided together with its leave: the machine found nobody to take the place.
            self.outcome.set_result((Outcome.WITHDRAWN, "the node stays: training can't go on without it"))
        elif status.phase is Phase.FAILED:
            self.outcome.set_result((Outcome.FAILED, f"the job has failed: {status.fail_reason}"))
        elif status.phase is Phase.SUCCEED:
            self.outcome.set_result((Outcome.DONE, "the job has succeeded"))


def add_to(
    controllers: Controllers,
    feed: Callable[[Event], None],
    spec: JobSpec,
    config: PlaneConfig,
    store: Store,
    *,
    fresh: bool,
) -> None:
    """Add the controllers of nodes and of the guard over what is done to them, both on the cluster's records,
    or in the job's own `store`. ValueError if the isolation driver can't be used here.
    """
    job = nodes.source_of(spec)
    pager = Pager(config.notify, job)

    async def have() -> Store:
        return await scope.store()

    controller = StormGuardController(
        feed, job, config.policy, pager, have, name=f"{os.uname().nodename}.{os.getpid()}"
    )
    controllers.add(controller)
    # Not when the guard breaks: others call humans by it, too.
    controllers.on_close(pager.close)
    controllers.add(CorrelatedFailureController(feed, config.policy, pager.send_soon, config.check_paths))
    scope = nodes.add_to(
        controllers, feed, spec, config.nodes, store,
        fresh=fresh, page=pager.send_soon, objection=controller.objection,
    )  # fmt: skip


def _condition_of(taken: GuardedAction) -> Condition:
    return Condition(
        taken.node_name,
        taken.worker,
        Verdict(taken.verdict),
        taken.action,
        taken.reason,
    )
