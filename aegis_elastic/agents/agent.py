"""The elastic agent of one node: it follows the newest order and reports what it did; it decides nothing of
the job.

The one exception is a rank that dies while the plane is out of reach: then the agents agree among themselves,
through the incarnation's store (`agents.standalone.unreported_ends`), and tell the master when it is back.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec

from aegis_elastic.agents.body import Outcome
from aegis_elastic.agents.checks import requests
from aegis_elastic.agents.guard.client import GuardClient
from aegis_elastic.agents.independence import CLOSE_S, PLANE_RETURN_S, IndependentBody
from aegis_elastic.agents.mailbox.events import (
    AllFinished,
    BusChanged,
    FinalReportArrived,
    IncarnationEnded,
    Joined,
    NextStoreKnown,
    NotJoined,
    ReexecRequested,
    Refused,
    WorldFormed,
)
from aegis_elastic.agents.mailbox.mailbox import SignalReceived
from aegis_elastic.agents.peers.peers import ENDED_BY_PLANE
from aegis_elastic.agents.peers.stores import StoreGone
from aegis_elastic.agents.ranks.exit_text import describe_exits, told
from aegis_elastic.agents.ranks.rank_group import RankGroup
from aegis_elastic.agents.standalone import unreported_ends
from aegis_elastic.agents.standalone.unreported_ends import UnreportedEnds
from aegis_elastic.core.diagnosis.attribution import clues_of, needs_earlier_checkpoint
from aegis_elastic.core.model import Failure
from aegis_elastic.core.protocol.directives import OperatorCheck
from aegis_elastic.core.protocol.messages import MessageType, ReportData
from aegis_elastic.core.protocol.orders import Action, Order
from aegis_elastic.core.rank_assignment import RankAssignment

logger = logging.getLogger(__name__)

# How long an Error may stay unanswered before the agents help themselves; shorter when the bus is known to be
# down.
ANSWER_S = 5.0
RECONNECT_S = 2.0
# A parked agent's bus is gone: how long it may take to come back. The job may have ended unheard.
PARKED_S = 10.0
# All is done in independent mode: how long a master that hears us may take to send the report.
REPORT_S = 3.0
# Asks for another process in our place: what schedulers know as "please start this again".
EXIT_REQUEUE = 75


class AegisElasticAgent(IndependentBody):
    """Reactions to everything that can happen; what they do is in `NodeBody` and `IndependentBody`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `NodeBody`."""
        super().__init__(*args, **kwargs)
        # A signal or the master has told us to end; what else comes is too late.
        self._leaving = False
        # We have no part in the job any more, and only wait for its end.
        self._parked = False

    def _on_item(self, item: object) -> None:
        if self._leaving and not isinstance(item, (SignalReceived, FinalReportArrived)):
            return  # We end: the ranks have their time, and no order may add to it or cut it.
        if self._parked and not isinstance(item, (SignalReceived, Joined)):
            self._on_item_parked(item)
        elif isinstance(item, Order):
            self._on_order(item)
        elif isinstance(item, Joined):
            self._parked = False
            self._on_joined()
        elif isinstance(item, NotJoined):
            self._fall_back(item.reason)
        elif isinstance(item, Refused):
            self._on_refused(item)
        elif isinstance(item, ReexecRequested):
            self._on_renew(item)
        elif isinstance(item, BusChanged):
            self._on_bus(item)
        elif isinstance(item, FinalReportArrived):
            self._report = item.report
        elif isinstance(item, SignalReceived):
            self._on_signal(item.signum)
        elif isinstance(item, IncarnationEnded) and item.peers is self._peers:
            self._on_peers_ended(item.peers.ended)
        elif isinstance(item, NextStoreKnown) and item.peers is self._peers:
            self._on_next_store(item.address)
        elif isinstance(item, WorldFormed):
            self._on_met(item)
        elif isinstance(item, AllFinished):
            self._on_end(item)
        elif isinstance(item, OperatorCheck):
            if self._looking is not None:
                self._looking.begin(item)
        elif item in ("store", "look"):
            self._say_again()

    # ------------------------------------------------------------ orders

    def _on_order(self, order: Order) -> None:
        if self._from_start:
            self._on_order_without_plane(order)
            return
        if self._alone and not self._back_in_step(order):
            return
        if self._order is not None and order.seq_num <= self._order.seq_num:
            self._on_repeated(order)
            return
        previous, self._order = self._order, order
        self._deadline = None
        assignment = self._seat(order)
        if assignment is not None:
            self._spare_fitness.forget()
        if order.action is Action.CLOSE:
            self._close(order)
        elif order.action is Action.INDEPENDENT:
            self._heard = order
            self._fall_back(order.reason or "not enough nodes reached the master in time")
        elif assignment is None:
            self._say(MessageType.ACK, ReportData(state="spare"))
            if previous is None or self._seat(previous) is not None:
                self._narrate("waiting as a spare: every seat of the job is taken")
            self._stop_then(self._wait_for_a_seat)
        elif order.action is Action.RUN:
            self._on_run(order, assignment)
        else:
            self._heed()
            if order.action is Action.BOOTCHECK:
                self._stop_then(self._check)
            elif requests.suspects_hang(order):
                self._look_first(order)
            else:
                self._end_by_plane(self._check if order.action is Action.TROUBLESHOOT else self._finish)
                self._check_meanwhile(order)

    def _wait_for_a_seat(self) -> None:
        self._spare_fitness.begin()
        if self._spares is not None and not self._spares.expecting:
            try:
                self._spares.expect(self.rehearse())
            except Exception as error:  # noqa: BLE001 - whatever torch may raise: a node waits without them, too
                logger.info("no warm spares: %s", error)

    def _on_joined(self) -> None:
        """If we had orders, they were of a job that has ended without us: what we did counts no more."""
        if self._order is not None and not self._from_start:
            self._narrate("the control plane leads a new job of this name: starting anew with it")
            if self._old_peers is not None:
                self._old_peers.close()
            self._old_peers, self._peers = self._peers, None
            self._order, self._deadline = None, None
            self._alone, self._ledger = False, UnreportedEnds()
            self._stop_then(lambda: None)
        self._say_again()

    def _on_repeated(self, order: Order) -> None:
        """Our Error is unanswered, and yet the master speaks: it lives, and is finding out whose failure came
        first. Who helped themselves now would have the failure counted twice.
        """
        self._note_hanging(order)
        waiting = self._said[0] is MessageType.ERROR and self._deadline is not None
        if waiting and not self._alone and self._order is not None and order.seq_num == self._order.seq_num:
            self._wait(ANSWER_S, self._end_alone)
        elif self._link.echo_due:
            self._say_again()

    def _note_hanging(self, order: Order) -> None:
        """All agents are told when training hangs, whoever holds it up. They say so, and kill nothing."""
        (kind, data), state = self._said, "hanging" if order.hanging else "running"
        ours = self._order is not None and order.seq_num == self._order.seq_num
        if ours and {data.state, state} == {"running", "hanging"}:
            what = f"hangs, and nothing is stopped: {order.hanging}" if order.hanging else "moves again"
            self._narrate(f"the control plane says that training {what}")
            self._say(kind, msgspec.structs.replace(data, state=state))

    def _heed(self) -> None:
        """What we said of the last order says nothing of this one: a Finish must not be repeated under its
        number.
        """
        self._say(MessageType.ACK, ReportData(state="heard"))

    def _on_run(self, order: Order, assignment: RankAssignment) -> None:
        running = self._ranks
        if running is not None and running.incarnation == order.incarnation and not running.stopping:
            self._say_again()  # The start that this order tells of has been made: only its number is new.
            return
        self._heed()
        self._stop_then(lambda: self._start(order, assignment))

    def _end_by_plane(self, then: Callable[[], None]) -> None:
        """The plane ends the incarnation: stop at once, unless the agents have ended it by themselves
        already.
        """
        ranks = self._ranks
        self._stop_then(then)
        self._claim_end(ranks)

    def _claim_end(self, ranks: RankGroup | None) -> bool:
        """Write down that the plane ends the incarnation of these ranks. False if the agents have ended it
        by themselves before: then we go with them.
        """
        peers = self._peers
        if ranks is None or peers is None or ranks.incarnation != (self._order or _NONE).incarnation:
            return True
        try:
            how = peers.claim(ENDED_BY_PLANE)
        except StoreGone as error:
            logger.info("the plane ended incarnation %d, and its store is gone: %s", ranks.incarnation, error)
            return True
        if how != ENDED_BY_PLANE:
            self._go_alone(unreported_ends.decode(how))
        return how == ENDED_BY_PLANE

    def _look_first(self, order: Order) -> None:
        """A hang is suspected: where the ranks stand is seen only as long as they live."""
        ranks = self._ranks
        # Under the stock torchrun their pids are not ours to know.
        pids = {rank: pid for rank, pid in ranks.pids.items() if pid} if ranks is not None else {}

        def stop() -> None:
            self._stop_then(self._check)
            self._check_meanwhile(order)

        if ranks is None or ranks.stopping or not pids:
            self._end_by_plane(self._check)
            self._check_meanwhile(order)
        elif self._claim_end(ranks):
            self._watchers.on_ended()
            self._checks.forget()
            self._checks.look(order, pids, stop)

    def _close(self, order: Order) -> None:
        code = _code_of(order)
        failures = self._ranks.failures() if self._ranks is not None else ()

        def leave() -> None:
            self._outcome = Outcome(code, order.reason, self._report, failures)

        self._say(MessageType.FINISH, ReportData(state="closing"))
        self._stop_then(leave, self._set.shutdown_timeout_s)

    # ------------------------------------------------------------ the ranks end

    def _on_exited(self) -> None:
        ranks = self._ranks
        assert ranks is not None
        if ranks.stopping or self._checks.looking or self._said[0] is MessageType.ERROR:
            return
        if ranks.failed:
            detect_s = time.monotonic() - ranks.first_failure_s
            failures = ranks.failures()
            self._narrate(told(failures[0]))
            if any(needs_earlier_checkpoint(failure) for failure in failures):
                self._narrate("THE CHECKPOINT CAN'T BE READ: training has to resume from the one before")
            self._fail(told(failures[0]), failures, detect_s)
        elif not ranks.running:
            self._say(MessageType.FINISH, ReportData(state="finished"))
            if self._from_start:
                self._wait(REPORT_S if self._link.connected else 0.0, self._close_alone)
            elif not self._link.connected:
                self._wait(CLOSE_S, self._close_alone)

    def _fail(self, reason: str, failures: tuple[Failure, ...], detect_s: float = 0.0) -> None:
        data = ReportData(
            failures=failures, clues=self._clues(failures), reason=reason, timings_s={"detect_s": detect_s}
        )
        if self._from_start:
            # Said when it is the job's end: no master counts what is restarted without it.
            self._said = (MessageType.ERROR, data)
            self._end_alone()
            return
        self._say(MessageType.ERROR, data)
        if self._alone:
            self._end_alone()
        else:
            self._wait(ANSWER_S if self._link.connected else RECONNECT_S, self._end_alone)

    def _clues(self, failures: tuple[Failure, ...]) -> tuple[str, ...]:
        return (*clues_of(failures), *self._watchers.clues())

    def _on_guard_died(self) -> None:
        logger.error("the guard process ended; the kernel has killed the ranks")
        self._replace_guard()
        ranks = self._ranks
        if ranks is not None and not ranks.stopped:
            self._watchers.on_ended()
            was_stopping, ranks.stopped = ranks.stopping, True
            if was_stopping:
                self._on_stopped()
            else:
                self._fail("the guard process of the ranks was killed", ranks.failures())

    # ------------------------------------------------------------ other news

    def _on_refused(self, refused: Refused) -> None:
        if refused.parked:
            self._park(refused.reason)
            return
        if self._from_start or (self._ranks is not None and refused.usage):
            logger.warning("%s", refused.reason)
            return
        if refused.usage:
            self._leave(2, refused.reason)
            return
        # A job that is over says how it ended; every other refusal is about this node.
        over = {"the job has ended: Succeed": 0, "the job has ended: Failed": 1}
        ends = (code for end, code in over.items() if refused.reason.endswith(end))
        code = next(ends, self._set.isolate_exit_code)
        # The order that goes to those who stay would make us wait as a spare.
        self._leaving, self._deadline = True, None
        self._stop_then(lambda: self._leave(code, refused.reason))

    def _on_renew(self, told: ReexecRequested) -> None:
        if self._from_start:
            return
        if not isinstance(self._guard, GuardClient):
            # The process is torchrun's, and so are its ranks: it isn't ours to execute again.
            logger.warning("no clean process under torchrun's own launcher (%s): going on", told.reason)
            self._link.introduce("going on in the same process")
            return
        self._narrate(f"starting anew in a clean process: {told.reason}")

        def leave() -> None:
            self._outcome = Outcome(EXIT_REQUEUE, told.reason, renew=True)

        self._leaving = True
        self._stop_then(leave)

    def _park(self, reason: str) -> None:
        """Take no part, but stay: srun returns the highest code of its tasks, so ours is to be the job's."""
        if not self._parked:
            self._parked = True
            self._deadline = None
            self._narrate(f"{reason}; parked until the job ends, to return its exit code")
            self._stop_then(lambda: None)

    def _on_item_parked(self, item: object) -> None:
        if isinstance(item, Order) and item.action is Action.CLOSE:
            self._leave(_code_of(item), item.reason)
        elif isinstance(item, Refused) and not item.parked:
            # Our place in line has come to an end with the job.
            self._leave(0 if item.reason.endswith(": Succeed") else 1, item.reason)
        elif isinstance(item, BusChanged):
            self._deadline = None
            if not item.connected:
                gone = "the control plane is gone, and with it the news of the job's end: the others tell"
                self._wait(PARKED_S, lambda: self._leave(0, gone))

    def _on_bus(self, change: BusChanged) -> None:
        if change.connected:
            self._narrate("the control plane can be reached again")
            self._say_again()
        elif self._order is not None and not self._from_start:
            if self._ranks is None or self._ranks.stopped:
                self._narrate("the control plane can't be reached; waiting for it")
                self._wait(PLANE_RETURN_S, self._on_plane_gone)
                return
            self._narrate("the control plane can't be reached; training is not touched")
            if self._said[0] is MessageType.FINISH and self._order.action is Action.RUN:
                self._wait(CLOSE_S, self._close_alone)

    def _on_signal(self, signum: int) -> None:
        if signum not in self._set.signals:
            self._guard.signal(signum)
            return
        name = signal.Signals(signum).name
        if self._ranks is None or self._ranks.stopped:
            self._leave(128 + signum, f"ended by {name}")
            return
        ranks, again = self._ranks, self._ranks.stopping
        self._narrate(f"{name}: passed on to the ranks, {self._set.shutdown_timeout_s:g} s to end")
        self._watchers.on_ended()
        self._leaving = ranks.stopping = True
        self._deadline = None
        self._stop_began_s = time.monotonic()
        self._then = lambda: self._leave(128 + signum, f"ended by {name}: {describe_exits(ranks.failures())}")
        self._guard.stop(0.0 if again else self._set.shutdown_timeout_s, signum)


def _code_of(close: Order) -> int:
    """The exit code that the job's end asks for."""
    return {"Succeed": 0, "Requeue": EXIT_REQUEUE}.get(close.outcome, 1)


class _NoOrder:
    incarnation = -1


_NONE: Any = _NoOrder()
