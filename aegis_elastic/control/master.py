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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aegis_elastic.bus import names
from aegis_elastic.bus.contact import Hello, Welcome
from aegis_elastic.bus.subscription import Message as BusMessage
from aegis_elastic.control.clock import SteadyClock
from aegis_elastic.control.config import write_private
from aegis_elastic.control.doors import Refused
from aegis_elastic.control.keeper import Keeper
from aegis_elastic.control.performer import STATUS_FILE, Journal, Performer
from aegis_elastic.control.roll import Roll
from aegis_elastic.core import messages, words
from aegis_elastic.core.attribution import Evidence, attribute
from aegis_elastic.core.events import (
    Close,
    Dismiss,
    Effect,
    Error,
    Event,
    Finish,
    Independent,
    Join,
    Lost,
    Offer,
    Quit,
    Reconcile,
    RecordErrorNode,
    Started,
)
from aegis_elastic.core.journal import Adopt, Create
from aegis_elastic.core.liveness import AWAY, Patience
from aegis_elastic.core.machine import Transition, step
from aegis_elastic.core.messages import BadMessage, Message, ReportData
from aegis_elastic.core.model import RECOVERING, TERMINAL, Mode, Phase, Status
from aegis_elastic.core.view import status_view

logger = logging.getLogger(__name__)

REPEAT_S = 1.0
# An agent that was heard within this time lives: three heartbeats.
RIVAL_S = 3.0
# One decision leads to the next, but never in circles: a long chain is an error of ours.
CHAIN_MAX = 64
_QUIET = (Finish, Offer, Join)

MakeJwt = Callable[[str, str], tuple[str, float]]


class Master:
    """Owns a job's status. Everything runs in one event loop; `run` until cancelled or fenced."""

    def __init__(
        self,
        keeper: Keeper,
        performer: Performer,
        book: Journal,
        begun: Transition,
        begun_at: float,
        *,
        run_dir: Path,
        make_jwt: MakeJwt,
        bus_port: int,
        jwt_life_s: float,
        patience: Patience,
        attribution_s: float,
        plane: dict[str, Any],
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._keeper = keeper
        self._performer = performer
        self._book = book
        self._status = begun.status
        self._run_dir = run_dir
        self._make_jwt = make_jwt
        self._bus_port = bus_port
        self._jwt_life_s = jwt_life_s
        self._attribution_s = attribution_s
        self._plane = plane
        self._tell = tell
        self._roll = Roll(patience)
        self._clock = SteadyClock()
        self._events: list[Event] = []
        self._answers: dict[str, asyncio.Future[str]] = {}
        self._wake = asyncio.Event()
        self._repeat_at = 0.0
        self._told_started: set[tuple[str, int]] = set()
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

    def _adopt_or_create(self, begun: Transition, begun_at: float) -> None:
        mono = time.monotonic()
        status = begun.status
        event = Adopt(status) if begun.name == "adopt" else Create(status.spec)
        self._book.write(begun_at, event, begun)
        self._roll.follow(status, mono)
        self._resumed = begun.name == "adopt"
        if self._resumed:
            for pod in (*status.pods, *status.spares):
                self._roll.closed(pod.uid, AWAY, mono)

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
        names.inbox(hello.user_public_key)
        await self._no_rival(hello.worker, hello.uid)
        # A worker that grew tired of waiting asks again: both calls get the one answer.
        answer = self._answers.setdefault(hello.uid, asyncio.get_running_loop().create_future())
        self.feed(Join(hello.worker, hello.uid, hello.node_name, hello.node_ip, hello.nproc, hello.ordinal))
        refusal = await answer
        if refusal:
            raise Refused(refusal)
        jwt, until_s = self._make_jwt(hello.worker, hello.user_public_key)
        self._roll.note_jwt(hello.uid, hello.user_public_key, until_s)
        status = self._status
        return Welcome(
            jwt=jwt,
            bus_port=self._bus_port,
            seq_num=status.seq_num,
            incarnation=status.incarnation,
            generation=status.spec.generation,
            max_retry=status.spec.max_retry,
            recover_count=status.recover_count,
        )

    async def _no_rival(self, worker: str, uid: str) -> None:
        """Refuse a newcomer under the name of an agent that lives: each would replace the other for ever.

        An agent that has just died without its connection being closed is given the time to be missed.
        """
        if self._roll.alive_since(worker, uid, time.monotonic() - RIVAL_S):
            asked_s = time.monotonic()
            await asyncio.sleep(RIVAL_S)
            if self._roll.alive_since(worker, uid, asked_s):
                raise ValueError(
                    f"a worker called {worker!r} is taking part already; give this one another "
                    "--aegis-worker-name"
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
        raise ValueError(f"no operation is called {op!r}; there are status and quit")

    def view(self) -> dict[str, Any]:
        """The status as `aegisctl status --json` prints it."""
        plane = {
            **self._plane,
            "mode": self._status.mode.value,
            "unreachable": sorted(self._roll.unreachable),
            "spares": [spare.name for spare in self._status.spares],
        }
        return status_view(self._status, plane)

    def on_report(self, arrived: BusMessage) -> None:
        """A worker's report came over the bus."""
        try:
            message = messages.decode(arrived.data)
            self._check_speaker(arrived.subject, message)
        except BadMessage as error:
            self._roll.note_malformed(arrived.subject, error)
            return
        data = message.data
        if not isinstance(data, ReportData):
            return
        if not self._roll.knows(message.uid):
            self._recall(message)
            return
        mono = time.monotonic()
        if self._roll.heard(message.uid, message.seq_num, mono) and message.seq_num < self._status.seq_num:
            # It has just come and can't have heard the newest order: don't let it wait for the repetition.
            self._repeat_at = mono
            self._wake.set()
        self._roll.seen(message.uid, message.time_stamp, data.alive, mono)
        for event in messages.events_of(message):
            self._sort_in(event, message)

    def _check_speaker(self, subject: str, message: Message) -> None:
        """The bus lets a worker publish on its own subject only; what it says there is of itself, too."""
        spec = self._status.spec
        try:
            rightful = names.report(spec.namespace, spec.job_name, message.pod_name)
        except ValueError as error:
            raise BadMessage(f"cannot read a message: {error}") from error
        if subject != rightful:
            raise BadMessage(f"cannot read a message: {message.pod_name!r} has another subject")

    def on_opened(self, uid: str, connection: int) -> None:
        """The bus says that an agent has connected."""
        if self._roll.knows(uid):
            self._roll.opened(uid, connection)

    def on_bus_gone(self) -> None:
        """We lost the bus ourselves: what we know of others' connections is worth nothing."""
        self._roll.forget_connections()

    def on_closed(self, uid: str, why: str, connection: int) -> None:
        """The bus says that a connection was closed; it may come back."""
        if self._roll.knows(uid):
            self._roll.closed(uid, why, time.monotonic(), connection)
            self._wake.set()
            self._tell_plane()

    def feed(self, event: Event) -> None:
        """Put an event in line."""
        self._events.append(event)
        self._wake.set()

    def _recall(self, message: Message) -> None:
        if self._status.phase in TERMINAL:
            word: words.Word = words.Dismissal(message.uid, f"the job has ended: {self._status.phase.value}")
        else:
            word = words.Recall(message.uid, "the master doesn't know this agent")
        self._later(self._performer.say(message.pod_name, word))

    def _sort_in(self, event: Event, message: Message) -> None:
        """Repeated reports are dropped here, so that the journal holds each fact once; Errors wait for
        their root.
        """
        status = self._status
        if isinstance(event, (Error, Independent)) and not self._is_seated(message):
            return  # Only who takes part in an incarnation can know how it ended; a spare doesn't.
        if isinstance(event, Error):
            if event.worker not in self._roll.evidence and self._is_current(event.uid, message):
                evidence = Evidence(event.worker, time.monotonic(), event.failures, event.reason, event.clues)
                self._roll.evidence[event.worker] = (evidence, event)
                self._wake.set()
        elif isinstance(event, Started):
            if (message.uid, message.incarnation) not in self._told_started:
                self._told_started.add((message.uid, message.incarnation))
                self.feed(event)
        elif step(status, event, 0.0).status is not status:
            self.feed(event)

    def _is_seated(self, message: Message) -> bool:
        pod = self._status.pod(message.pod_name)
        return pod is not None and pod.uid == message.uid

    def _is_current(self, uid: str, message: Message) -> bool:
        """Errors are worth keeping until the next start of training, so that consequences are recorded
        too.
        """
        recent = self._status.phase is Phase.RUN_COMMAND or self._status.phase in RECOVERING
        recent = recent or self._status.mode is Mode.INDEPENDENT
        return recent and message.incarnation == self._status.incarnation

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Lead the job until cancelled. Fenced if another master has taken over."""
        self._wake.set()
        await self._performer.publish_order(self._status)
        if self._status.phase in TERMINAL:
            await self._close()
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), self._until_next())
            except asyncio.TimeoutError:
                pass  # Time itself was waited for.
            self._wake.clear()
            await self._turn()

    async def _turn(self) -> None:
        mono = time.monotonic()
        judgement = self._roll.judge(mono)
        self._note_unreachable(judgement.unreachable)
        if judgement.lost and self._status.phase not in TERMINAL:
            reasons = "; ".join(sorted({why for _, _, why in judgement.lost}))
            self._events.append(Lost(tuple((worker, uid) for worker, uid, _ in judgement.lost), reasons))
        self._attribute(judgement.suspects, mono)
        events, self._events = self._events, []
        await self._advance(events)
        await self._renew_jwts()
        if mono >= self._repeat_at:
            self._repeat_at = mono + REPEAT_S
            # Whoever waits for the answer to an Error must hear that somebody is thinking about it.
            if self._roll.evidence or not self._roll.all_acknowledged(self._status.seq_num):
                await self._performer.publish_order(self._status)

    def _until_next(self) -> float:
        """Seconds until something is due without anything arriving."""
        mono = time.monotonic()
        judgement = self._roll.judge(mono)
        lost_s = math.inf if self._status.phase in TERMINAL else judgement.next_s
        due = min(lost_s, self._verdict(judgement.suspects, mono).wait_until, self._repeat_at)
        if self._status.deadline > 0:
            due = min(due, mono + self._status.deadline - self._clock.now(waiting=True))
        return max(due - mono, 0.005) if math.isfinite(due) else REPEAT_S

    def _verdict(self, suspects: frozenset[str], mono: float) -> Any:
        waiting = [evidence for evidence, _ in self._roll.evidence.values()]
        expected = sum(not pod.finished and not pod.gone for pod in self._status.pods)
        return attribute(waiting, suspects, expected, mono, self._attribution_s)

    def _attribute(self, suspects: frozenset[str], mono: float) -> None:
        """Put the Errors in line, the root's first, once it is clear whose failure came first."""
        if not self._roll.evidence:
            return
        deciding = self._status.phase is Phase.RUN_COMMAND or self._status.mode is Mode.INDEPENDENT
        verdict = self._verdict(suspects, mono)
        if deciding and verdict.root is None and not any(isinstance(event, Lost) for event in self._events):
            return
        errors = [error for _, error in self._roll.evidence.values()]
        errors.sort(key=lambda error: error.worker != verdict.root)
        self._roll.evidence.clear()
        self._events.extend(errors)

    async def _advance(self, events: Sequence[Event]) -> None:
        now = self._clock.now(waiting=self._status.deadline > 0)
        status, done = self._status, []
        for event in events:
            made = step(status, event, now)
            if made.status is not status or not isinstance(event, _QUIET) or made.effects:
                done.append((event, made))
            status = made.status
        for _ in range(CHAIN_MAX):
            made = step(status, Reconcile(), now)
            if made.status is status:
                break
            done.append((Reconcile(), made))
            status = made.status
        else:
            raise AssertionError(f"decisions don't come to rest: {done[-1][1].reason}")
        if status is not self._status:
            await self._keeper.save(status)
        self._status = status
        self._roll.follow(status, time.monotonic())
        for event, made in done:
            self._book.write(now, event, made)
            if isinstance(event, Finish):
                self._roll.note_environment(event)
            elif made.status.phase is Phase.RUN_COMMAND and made.status.incarnation == 1 and made.effects:
                self._plane["versions"] = self._roll.versions()
                self._book.log(made.status, now, f"environment: {self._roll.versions()}")
            if not isinstance(event, _QUIET):
                self._book.log(made.status, now, f"{made.name}: {made.reason}")
        for _, made in done:
            for effect in made.effects:
                await self._perform(effect)
        self._answer(events)
        if done:
            self._tell_plane()

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
            await self._performer.say(effect.worker, words.Dismissal(effect.uid, effect.reason))
        elif isinstance(effect, RecordErrorNode):
            logger.warning("node %s is faulty: %s", effect.node_name, effect.reason)
        elif effect.seq_num == self._status.seq_num and self._status.phase not in TERMINAL:
            # An order that another has overtaken is not worth sending, and `_close` sends the last one: after
            # the report, which agents that have left can't hear.
            self._repeat_at = time.monotonic() + REPEAT_S
            await self._performer.publish_order(self._status)

    async def _close(self) -> None:
        if self._over.is_set():
            return
        await self._performer.close_job(self._run_dir, self._book, self._status)
        write_private(self._run_dir / STATUS_FILE, msgspec.json.encode(self.view()))
        await self._performer.publish_order(self._status)
        self._over.set()

    # ------------------------------------------------------------ beside the decisions

    def _note_unreachable(self, unreachable: frozenset[str]) -> None:
        if unreachable != self._roll.unreachable:
            now = time.time()
            for worker in sorted(unreachable - self._roll.unreachable):
                self._book.log(
                    self._status, now, f"{worker} is unreachable over the bus; its training is not touched"
                )
            for worker in sorted(self._roll.unreachable - unreachable):
                self._book.log(self._status, now, f"{worker} can be reached again")
            self._roll.unreachable = unreachable

    async def _renew_jwts(self) -> None:
        soon = time.time() + self._jwt_life_s / 3
        for worker, uid, public_key in self._roll.due_for_renewal(soon):
            jwt, until_s = self._make_jwt(worker, public_key)
            self._roll.note_jwt(uid, public_key, until_s)
            await self._performer.say(worker, words.Renewal(uid, jwt))

    def _tell_plane(self) -> None:
        status = self._status
        self._tell(
            {"agents": self._roll.connected, "phase": status.phase.value, "ended": status.phase in TERMINAL}
        )

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(_log_failure)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a word to a worker was not sent: %s", task.exception())
