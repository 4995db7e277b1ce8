"""The master of one job: a shell that turns what arrives into events, and what `core` decides into deeds.

One loop, one order of things: all events that have come in go through `step`, then `Reconcile` until nothing
is left to decide; the resulting status is written by compare-and-swap; then the journal; then the effects. A
master that dies in between has either decided nothing, or its successor finds the decision in the record and
performs the effects again: orders are repeated anyway until everybody has acknowledged them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aegis_elastic.bus import subjects
from aegis_elastic.bus.contact.first_contact import Hello, Welcome
from aegis_elastic.bus.subscription import Message as BusMessage
from aegis_elastic.control.controllers.contract import Controllers, Decided
from aegis_elastic.control.controllers.operator_actions import OperatorActions
from aegis_elastic.control.host.clock import SteadyClock
from aegis_elastic.control.host.grpc_server import Refused
from aegis_elastic.control.job_record import JobRecordStore
from aegis_elastic.control.membership import Membership
from aegis_elastic.control.publisher import STATUS_FILE, Journal, Publisher, write_if_it_goes
from aegis_elastic.control.reports import ReportIntake, check_speaker
from aegis_elastic.core.accounts.journal import Adopt, Create
from aegis_elastic.core.accounts.status_view import beside_training, status_view
from aegis_elastic.core.detection.liveness import AWAY, Patience
from aegis_elastic.core.events import (
    Close,
    Dismiss,
    Effect,
    Event,
    Finish,
    Fit,
    Hold,
    Join,
    Lost,
    Mark,
    Offer,
    Page,
    Progress,
    Quit,
    Reconcile,
    RecordErrorNode,
    Release,
    Remake,
    Renew,
    Requeued,
    Saved,
    Taint,
    Unmark,
    Untaint,
)
from aegis_elastic.core.machine import Transition, step
from aegis_elastic.core.model import TERMINAL, Phase, Status
from aegis_elastic.core.protocol import directives, messages, orders
from aegis_elastic.core.protocol.messages import BadMessage, Message, ReportData

logger = logging.getLogger(__name__)

REPEAT_S = 1.0
# Agents answer an order with its time, by which their clocks are known; so it is repeated now and then, the
# more rarely the larger the job is, as the order grows with it. So does the rest between two for newcomers.
CLOCK_S, CLOCK_S_PER_WORKER, REST_S_PER_WORKER = 60.0, 0.1, 0.001
# One decision leads to the next, but never in circles: a long chain is an error of ours.
CHAIN_MAX = 64
# What is not worth a line in the log for people, and what is not worth one of the journal when it is not new.
_QUIET = (Finish, Offer, Join, Progress)
_REPEATED = (*_QUIET, Saved, Mark, Unmark, Fit, Taint, Untaint, Hold, Release)

MakeJwt = Callable[[str, str], tuple[str, float]]


class Master:
    """Owns a job's status. Everything runs in one event loop; `run` until cancelled or fenced."""

    def __init__(
        self,
        keeper: JobRecordStore,
        publisher: Publisher,
        book: Journal,
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
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._record_store = keeper
        self._publisher = publisher
        self._book = book
        self._status = begun.status
        self._run_dir = run_dir
        self._make_jwt = make_jwt
        self._bus = bus
        self._jwt_life_s = jwt_life_s
        self._plane = plane
        self._tell = tell
        self._membership = Membership(patience)
        self._reports = ReportIntake(self._membership, attribution_s)
        self.controllers = Controllers()
        self.controllers.admin_handlers |= OperatorActions(self.feed, lambda: self._status).admin_handlers
        self._clock = SteadyClock()
        self._events: list[Event] = []
        self._answers: dict[str, asyncio.Future[str]] = {}
        self._wake = asyncio.Event()
        self._repeat_at = 0.0
        self._decided_at = 0.0
        self._published_at = 0.0
        self._hanging = ""
        self._over = asyncio.Event()
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
        event = Adopt(status) if begun.name == "adopt" else Create(status.spec)
        self._book.write(begun_at, event, begun)
        self._membership.follow(status, mono)
        self._resumed = begun.name == "adopt"
        if self._resumed:
            for worker in (*status.workers, *status.spares):
                self._membership.closed(worker.uid, AWAY, mono)

    # ------------------------------------------------------------ what arrives

    async def greet(self, hello: Hello) -> Welcome:
        """Answer a worker's first contact. Refused if the job doesn't want it, ValueError for another job
        or no key.
        """
        spec = self._status.spec
        if (hello.namespace, hello.job) != (spec.namespace, spec.job_name):
            raise ValueError(
                f"this control plane serves job {spec.job_name!r} of namespace {spec.namespace!r}"
            )
        # A key that is none is found out before its bearer has a seat.
        subjects.inbox(hello.user_public_key)
        await self._reports.no_rival(hello.worker, hello.uid)
        risk = await self.controllers.before_join(hello.node_name)
        who = (hello.worker, hello.uid, hello.node_name, hello.node_ip, hello.nproc, hello.ordinal)
        join = Join(*who, risk)  # ValueError for values that can't be
        if hello.attempt > self._status.attempt and await self._reports.nobody_left():
            self._over.clear()
            self.feed(Requeued(hello.attempt))
        # A worker that grew tired of waiting asks again: both calls get the one answer.
        answer = self._answers.setdefault(hello.uid, asyncio.get_running_loop().create_future())
        self.feed(join)
        refusal = await answer
        if refusal and (not hello.parks or self._status.phase in TERMINAL):
            raise Refused(refusal)
        jwt, until_s = self._make_jwt(hello.worker, hello.user_public_key)
        self._membership.note_jwt(hello.uid, hello.user_public_key, until_s)
        status = self._status
        return Welcome(
            jwt=jwt,
            **self._bus,
            seq_num=status.seq_num,
            incarnation=status.incarnation,
            generation=status.spec.generation,
            max_retry=status.spec.max_retry,
            recover_count=status.recover_count,
            parked=refusal,
        )

    async def admin(self, op: str, args: dict[str, Any]) -> Any:
        """Answer `aegisctl`. ValueError for an operation that there isn't."""
        if op == "status":
            return self.view()
        if op == "quit":
            self.feed(Quit(str(args.get("reason", "asked by aegisctl"))))
            # Whoever asks may take the plane away next: the report is to be written by then.
            await self._over.wait()
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

    def on_report(self, arrived: BusMessage) -> None:
        """A worker's report came over the bus."""
        try:
            message = messages.decode(arrived.data)
            check_speaker(self._status.spec, arrived.subject, message)
        except BadMessage as error:
            self._membership.note_malformed(arrived.subject, error)
            return
        data = message.data
        if not isinstance(data, ReportData):
            return
        if not self._membership.knows(message.uid):
            self._recall(message)
            return
        mono = time.monotonic()
        if (
            self._membership.heard(message.uid, message.seq_num, mono)
            and message.seq_num < self._status.seq_num
        ):
            # It has just come and can't have heard the newest order: don't let it wait for the repetition.
            rest_s = REST_S_PER_WORKER * len(self._status.workers)
            self._repeat_at = min(self._repeat_at, max(mono, self._published_at + rest_s))
            self._wake.set()
        self._membership.seen(message.uid, message.time_stamp, data.alive, mono)
        self._membership.note_clock(message.uid, message.time_stamp, data.heard, time.time(), mono)
        self.controllers.heard(message, mono)
        waiting = len(self._membership.evidence)
        for event in messages.events_of(message):
            sorted_in = self._reports.sort_in(self._status, event, message, mono)
            if sorted_in is not None:
                self.feed(sorted_in)
        if len(self._membership.evidence) > waiting or self.controllers.due_s() <= mono:
            self._wake.set()

    def on_opened(self, uid: str, connection: int) -> None:
        """The bus says that an agent has connected."""
        if self._membership.knows(uid):
            self._membership.opened(uid, connection)

    def on_bus_gone(self) -> None:
        """We lost the bus ourselves: what we know of others' connections is worth nothing."""
        self._membership.forget_connections()

    def on_closed(self, uid: str, why: str, connection: int) -> None:
        """The bus says that a connection was closed; it may come back."""
        if self._membership.knows(uid):
            self._membership.closed(uid, why, time.monotonic(), connection)
            self._wake.set()
            self._tell_plane()

    def note_moved(self, now_s: float) -> None:
        """The step counter has moved: whoever is silent since before lives, since all step together."""
        self._membership.moved_s = now_s

    def feed(self, event: Event) -> None:
        """Put an event in line."""
        self._events.append(event)
        self._wake.set()

    def _recall(self, message: Message) -> None:
        worker = self._status.worker(message.worker)
        if self._status.phase in TERMINAL:
            word: directives.Directive = directives.Dismissal(
                message.uid, f"the job has ended: {self._status.phase.value}"
            )
        elif worker is not None and worker.renew and (worker.gone, worker.uid) == (True, message.uid):
            word = directives.Renew(message.uid, worker.renew)  # It was told, but the bus may lose anything.
        else:
            word = directives.Rejoin(message.uid, "the master doesn't know this agent")
        self._later(self._publisher.say(message.worker, word))

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Lead the job until cancelled. Fenced if another master has taken over."""
        self._wake.set()
        self.controllers.followed(self._status, ())
        try:
            await self._publish_order()
            if self._status.phase in TERMINAL:
                await self._close()
            while True:
                # Not `wait_for`: before Python 3.12 it swallows a cancellation that comes with the wake.
                in_time = asyncio.get_running_loop().call_later(self._until_next(), self._wake.set)
                await self._wake.wait()
                in_time.cancel()
                self._wake.clear()
                await self._turn()
        finally:
            await self.controllers.close()

    async def _turn(self) -> None:
        mono = time.monotonic()
        judgement = self._membership.judge(mono)
        self._note_unreachable(judgement.unreachable)
        if judgement.lost and not self._ended:
            reasons = "; ".join(sorted({why for _, _, why in judgement.lost}))
            self._events.append(Lost(tuple((worker, uid) for worker, uid, _ in judgement.lost), reasons))
        self._events += self._reports.attributed(self._status, judgement.suspects, self._events, mono)
        self._events += self.controllers.turn(mono)
        events, self._events = self._events, []
        await self._advance(events)
        await self._renew_jwts()
        if mono >= self._repeat_at:
            self._repeat_at = mono + REPEAT_S
            # Whoever waits for the answer to an Error must hear that somebody is thinking about it.
            stale = mono - self._published_at >= max(CLOCK_S, CLOCK_S_PER_WORKER * len(self._status.workers))
            if (
                stale
                or self._membership.evidence
                or not self._membership.all_acknowledged(self._status.seq_num)
            ):
                await self._publish_order()

    def _until_next(self) -> float:
        """Seconds until something is due without anything arriving."""
        mono = time.monotonic()
        judgement = self._membership.judge(mono)
        lost_s = math.inf if self._ended else judgement.next_s
        verdict = self._reports.verdict(self._status, judgement.suspects, mono)
        due = min(lost_s, verdict.wait_until, self.controllers.due_s(), self._repeat_at)
        ends_at = self._status.due_after(self._decided_at)
        if ends_at > 0:
            due = min(due, mono + ends_at - self._clock.now(waiting=True))
        return max(due - mono, 0.005) if math.isfinite(due) else REPEAT_S

    async def _advance(self, events: Sequence[Event]) -> None:
        now = self._decided_at = self._clock.now(waiting=self._status.waits)
        status, done = self._status, list[Decided]()
        for event in events:
            made = step(status, event, now)
            if made.status is not status or not isinstance(event, _REPEATED) or made.effects:
                done.append(Decided(event, made))
            status = made.status
        for _ in range(CHAIN_MAX):
            made = step(status, Reconcile(), now)
            if made.status is status:
                break
            done.append(Decided(Reconcile(), made))
            status = made.status
        else:
            raise AssertionError(f"decisions don't come to rest: {done[-1][1].reason}")
        if status is not self._status:
            await self._record_store.save(status)
        self._status = status
        self._membership.follow(status, time.monotonic())
        for event, made in done:
            self._book.write(now, event, made)
            if isinstance(event, Finish):
                self._membership.note_checks(event)
            elif made.status.phase is Phase.RUN_COMMAND and made.status.incarnation == 1 and made.effects:
                self._plane["versions"] = self._membership.versions()
                self._book.log(made.status, now, f"environment: {self._membership.versions()}")
            if not isinstance(event, _QUIET):
                self._book.log(made.status, now, f"{made.name}: {made.reason}")
        for _, made in done:
            for effect in made.effects:
                await self._perform(effect)
        self._answer(events)
        if done:
            self.controllers.followed(status, done)
            self._tell_plane()
            if orders.hanging(status) != self._hanging:
                self._hanging = orders.hanging(status)
                await self._publish_order()

    def _answer(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Join):
                answer = self._answers.pop(event.uid, None)
                if answer is not None and not answer.done():
                    answer.set_result("")

    async def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Close):
            await self._close()
        elif isinstance(effect, Dismiss):
            answer = self._answers.pop(effect.uid, None)
            if answer is not None and not answer.done():
                answer.set_result(effect.reason)
            await self._publisher.say(effect.worker, directives.Dismissal(effect.uid, effect.reason))
        elif isinstance(effect, Remake):
            logger.warning("made anew: %s (%s)", ", ".join(effect.machines), effect.reason)
        elif isinstance(effect, RecordErrorNode):
            logger.warning("node %s is not to be used: %s", effect.node_name, effect.reason)
        elif isinstance(effect, Page):
            logger.warning("a human is wanted: %s", effect.text)
        elif isinstance(effect, Renew):
            await self._publisher.say(effect.worker, directives.Renew(effect.uid, effect.reason))
        elif effect.seq_num == self._status.seq_num and self._status.phase not in TERMINAL:
            # An order that another has overtaken is not worth sending, and `_close` sends the last one: after
            # the report, which agents that have left can't hear.
            self._repeat_at = time.monotonic() + REPEAT_S
            await self._publish_order()

    async def _publish_order(self) -> None:
        self._published_at = time.monotonic()
        medians = self._membership.medians() if self._status.checks else {}
        await self._publisher.publish_order(self._status, medians)

    async def _close(self) -> None:
        if self._over.is_set():
            return
        await self._publisher.close_job(self._run_dir, self._book, self._status)
        write_if_it_goes(self._run_dir / STATUS_FILE, msgspec.json.encode(self.view()))
        await self._publish_order()
        self._over.set()

    # ------------------------------------------------------------ beside the decisions

    def _note_unreachable(self, unreachable: frozenset[str]) -> None:
        if unreachable != self._membership.unreachable:
            now = time.time()
            for worker in sorted(unreachable - self._membership.unreachable):
                self._book.log(
                    self._status, now, f"{worker} is unreachable over the bus; its training is not touched"
                )
            for worker in sorted(self._membership.unreachable - unreachable):
                self._book.log(self._status, now, f"{worker} can be reached again")
            self._membership.unreachable = unreachable

    async def _renew_jwts(self) -> None:
        soon = time.time() + self._jwt_life_s / 3
        for worker, uid, public_key in self._membership.due_for_renewal(soon):
            jwt, until_s = self._make_jwt(worker, public_key)
            self._membership.note_jwt(uid, public_key, until_s)
            await self._publisher.say(worker, directives.JwtRenewal(uid, jwt))

    def _tell_plane(self) -> None:
        status = self._status
        self._tell(
            {
                "agents": self._membership.connected,
                "phase": status.phase.value,
                "ended": status.phase in TERMINAL,
            }
        )

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(_log_failure)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a word to a worker was not sent: %s", task.exception())
