"""The master of one job: a loop that hands what arrives to `core`, and performs what `core` decides.

One order of things: a report becomes events; all events that have come in go through `step`, then `Reconcile`
until nothing is left to decide; the resulting status is written by compare-and-swap; then the journal; then
the effects. A master that dies in between has either decided nothing, or its successor finds the decision in
the record and performs the effects again: orders are repeated anyway until everybody has acknowledged them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from aegis_elastic.bus.contact.first_contact import Hello, Welcome
from aegis_elastic.bus.subscription import Message as BusMessage
from aegis_elastic.control.admission import Admission, MakeJwt
from aegis_elastic.control.controllers.contract import Applied, Controllers
from aegis_elastic.control.controllers.operator_actions import OperatorActions
from aegis_elastic.control.decisions import decide
from aegis_elastic.control.effects import REPEAT_S, Effects, Publisher
from aegis_elastic.control.host.clock import SteadyClock
from aegis_elastic.control.job_record import JobRecordStore
from aegis_elastic.control.journal_file import Journal
from aegis_elastic.control.membership import Membership, check_speaker, reply_to_unknown
from aegis_elastic.control.report_events import ReportEvents
from aegis_elastic.core.accounts.journal import Adopt, Create
from aegis_elastic.core.accounts.status_view import beside_training, status_view
from aegis_elastic.core.detection.liveness import AWAY, Patience
from aegis_elastic.core.events import Event, Finish, Lost, Quit, Requeued
from aegis_elastic.core.machine import Transition
from aegis_elastic.core.model import TERMINAL, Phase, Status
from aegis_elastic.core.protocol import messages
from aegis_elastic.core.protocol.messages import BadMessage, ReportData

logger = logging.getLogger(__name__)


class Master:
    """Owns a job's status. Everything runs in one event loop; `run` until cancelled or fenced."""

    def __init__(
        self,
        record_store: JobRecordStore,
        publisher: Publisher,
        journal: Journal,
        begun: Transition,
        begun_at: float,
        *,
        run_dir: Path,
        make_jwt: MakeJwt,
        bus: Mapping[str, Any],
        jwt_life_s: float,
        patience: Patience,
        attribution_s: float,
        plane: dict[str, Any],
        notify_supervisor: Callable[[dict[str, Any]], None],
    ) -> None:
        """`begun`: how the record was opened, at the wall second `begun_at`. `bus`: fields of every Welcome;
        `plane`: what `status` says of the plane.
        """
        self._record_store = record_store
        self._publisher = publisher
        self._journal = journal
        self._status = begun.status
        self._plane = plane
        self._notify_supervisor = notify_supervisor
        self._membership = Membership(patience)
        self._report_events = ReportEvents(self._membership, attribution_s)
        self.controllers = Controllers()
        self.controllers.admin_handlers |= OperatorActions(self.feed, lambda: self._status).admin_handlers
        self._admission = Admission(
            self._membership,
            status=lambda: self._status,
            feed=self.feed,
            requeue=self._requeue,
            admit=self.controllers.admit,
            make_jwt=make_jwt,
            jwt_life_s=jwt_life_s,
            bus=bus,
        )
        self._effects = Effects(
            publisher, self._membership, journal, run_dir, answer_join=self._admission.answer, view=self.view
        )
        self._clock = SteadyClock()
        self._events: list[Event] = []
        self._wake = asyncio.Event()
        self._decided_at = 0.0
        self._resumed = begun.name == "adopt"
        self._adopt_or_create(begun, begun_at)

    @property
    def status(self) -> Status:
        """The newest status."""
        return self._status

    @property
    def resumed(self) -> bool:
        """Whether the job had begun before: under another master, or in an earlier allocation."""
        return self._resumed

    @property
    def _ended(self) -> bool:
        """Whether nobody is missed any more: it is over, or over in this allocation."""
        return self._status.phase in TERMINAL or bool(self._status.suspended)

    def _adopt_or_create(self, begun: Transition, begun_at: float) -> None:
        mono = time.monotonic()
        status = begun.status
        self._journal.write(begun_at, Adopt(status) if self._resumed else Create(status.spec), begun)
        self._membership.update(status, mono)
        if self._resumed:
            for worker in (*status.workers, *status.spares):
                self._membership.on_disconnected(worker.uid, AWAY, mono)

    # ------------------------------------------------------------ what arrives

    async def greet(self, hello: Hello) -> Welcome:
        """Answer a worker's first contact. Refused if the job doesn't want it, ValueError for another job
        or no key.
        """
        return await self._admission.greet(hello)

    async def admin(self, op: str, args: dict[str, Any]) -> Any:
        """Answer `aegisctl`. ValueError for an operation that there isn't."""
        if op == "status":
            return self.view()
        if op == "quit":
            self.feed(Quit(str(args.get("reason", "asked by aegisctl"))))
            # Whoever wants that may take the plane away next: the report is to be written by then.
            await self._effects.closed.wait()
            return {"phase": self._status.phase.value}
        if op in self.controllers.admin_handlers:
            return await self.controllers.admin_handlers[op](args)
        known = ", ".join(["status", "quit", *sorted(self.controllers.admin_handlers)])
        raise ValueError(f"no operation is called {op!r}; there are {known}")

    def view(self) -> dict[str, Any]:
        """The status as `aegisctl status --json` prints it."""
        plane = {
            **self._plane,
            "mode": self._status.mode.value,
            "unreachable": sorted(self._membership.unreachable),
            "spares": [spare.name for spare in self._status.spares],
            "brokenDesks": self.controllers.broken,
            **beside_training(self._status),
        }
        return status_view(self._status, plane)

    def on_report(self, bus_message: BusMessage) -> None:
        """A worker's report came over the bus: put its events in line."""
        try:
            report = messages.decode(bus_message.data)
            check_speaker(self._status.spec, bus_message.subject, report)
        except BadMessage as error:
            self._membership.on_malformed(bus_message.subject, error)
            return
        if not isinstance(report.data, ReportData):
            return
        if not self._membership.knows(report.uid):
            reply = reply_to_unknown(self._status, report)
            self._send_soon(self._publisher.send(report.worker, reply))
            return
        mono = time.monotonic()
        is_first = self._membership.on_report(report, report.data, mono, time.time())
        if is_first and report.seq_num < self._status.seq_num:
            # It has just come and can't have heard the newest order: don't let it wait for the repetition.
            self._effects.repeat_soon(self._status, mono)
            self._wake.set()
        self.controllers.on_report(report, mono)
        were_waiting = self._report_events.errors_waiting
        for event in self._report_events.new_events(self._status, report, mono):
            self.feed(event)
        if self._report_events.errors_waiting > were_waiting or self.controllers.due_s() <= mono:
            self._wake.set()

    def on_connected(self, uid: str, connection: int) -> None:
        """The bus says that an agent has connected."""
        if self._membership.knows(uid):
            self._membership.on_connected(uid, connection)

    def on_bus_lost(self) -> None:
        """We lost the bus ourselves: what we know of others' connections is worth nothing."""
        self._membership.forget_connections()

    def on_disconnected(self, uid: str, why: str, connection: int) -> None:
        """The bus says that a connection was closed; it may come back."""
        if self._membership.knows(uid):
            self._membership.on_disconnected(uid, why, time.monotonic(), connection)
            self._wake.set()
            self._report_to_supervisor()

    def on_training_moved(self, now_s: float) -> None:
        """The step counter has moved: whoever is silent since before lives, since all step together."""
        self._membership.moved_s = now_s

    def feed(self, event: Event) -> None:
        """Put an event in line."""
        self._events.append(event)
        self._wake.set()

    def _requeue(self, event: Requeued) -> None:
        self._effects.closed.clear()
        self.feed(event)

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Lead the job until cancelled. Fenced if another master has taken over."""
        self._wake.set()
        self.controllers.on_transitions(self._status, ())
        try:
            await self._effects.publish_order(self._status)
            if self._status.phase in TERMINAL:
                await self._effects.close(self._status)
            while True:
                # Not `wait_for`: before Python 3.12 it swallows a cancellation that comes with the wake.
                in_time = asyncio.get_running_loop().call_later(self._next_turn_in_s(), self._wake.set)
                await self._wake.wait()
                in_time.cancel()
                self._wake.clear()
                await self._turn()
        finally:
            await self.controllers.close()

    async def _turn(self) -> None:
        mono = time.monotonic()
        await self._advance(self._take_events(mono))
        for worker, renewal in self._admission.jwt_renewals():
            await self._publisher.send(worker, renewal)
        errors_waiting = self._report_events.errors_waiting > 0
        await self._effects.repeat_order(self._status, mono, errors_waiting=errors_waiting)

    def _take_events(self, mono: float) -> list[Event]:
        """All that is in line, and what the passing of time adds."""
        judgement = self._membership.judge(mono)
        self._log_unreachable(judgement.unreachable)
        if judgement.lost and not self._ended:
            reasons = "; ".join(sorted({why for _, _, why in judgement.lost}))
            self._events.append(Lost(tuple((worker, uid) for worker, uid, _ in judgement.lost), reasons))
        self._events += self._report_events.attributed_errors(
            self._status, judgement.suspects, self._events, mono
        )
        self._events += self.controllers.events_due(mono)
        events, self._events = self._events, []
        return events

    def _next_turn_in_s(self) -> float:
        """Seconds until something is due without anything arriving."""
        mono = time.monotonic()
        judgement = self._membership.judge(mono)
        lost_s = math.inf if self._ended else judgement.next_s
        attribution = self._report_events.attribution(self._status, judgement.suspects, mono)
        due_s = min(lost_s, attribution.wait_until, self.controllers.due_s(), self._effects.repeat_at_s)
        ends_at = self._status.due_after(self._decided_at)
        if ends_at > 0:
            due_s = min(due_s, mono + ends_at - self._clock.now(waiting=True))
        return max(due_s - mono, 0.005) if math.isfinite(due_s) else REPEAT_S

    async def _advance(self, events: Sequence[Event]) -> None:
        """Decide, and make it so: the record, the journal, the effects, in this order."""
        now = self._decided_at = self._clock.now(waiting=self._status.waits)
        status, transitions = decide(self._status, events, now)
        if status is not self._status:
            await self._record_store.save(status)
        self._status = status
        self._membership.update(status, time.monotonic())
        for applied in transitions:
            self._write_journal(applied, now)
        for applied in transitions:
            for effect in applied.transition.effects:
                await self._effects.perform(effect, status)
        self._admission.answer_joins(events)
        if transitions:
            self.controllers.on_transitions(status, transitions)
            self._report_to_supervisor()
            await self._effects.publish_if_hang_changed(status)

    def _write_journal(self, applied: Applied, now: float) -> None:
        event, transition = applied
        status = transition.status
        self._journal.write(now, event, transition)
        if isinstance(event, Finish):
            self._membership.keep_checks(event)
        elif status.phase is Phase.RUN_COMMAND and status.incarnation == 1 and transition.effects:
            self._plane["versions"] = self._membership.versions()
            self._journal.log(status, now, f"environment: {self._membership.versions()}")
        if event.in_log:
            self._journal.log(status, now, f"{transition.name}: {transition.reason}")

    # ------------------------------------------------------------ beside the decisions

    def _log_unreachable(self, unreachable: frozenset[str]) -> None:
        before, self._membership.unreachable = self._membership.unreachable, unreachable
        now = time.time()
        for worker in sorted(unreachable - before):
            text = f"{worker} is unreachable over the bus; its training is not touched"
            self._journal.log(self._status, now, text)
        for worker in sorted(before - unreachable):
            self._journal.log(self._status, now, f"{worker} can be reached again")

    def _report_to_supervisor(self) -> None:
        phase = self._status.phase
        self._notify_supervisor(
            {"agents": self._membership.connected, "phase": phase.value, "ended": phase in TERMINAL}
        )

    def _send_soon(self, sending: Coroutine[Any, Any, None]) -> None:
        asyncio.get_running_loop().create_task(sending).add_done_callback(_log_failure)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a directive to a worker was not sent: %s", task.exception())
