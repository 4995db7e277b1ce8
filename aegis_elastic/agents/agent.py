"""The elastic agent of one node: it follows the newest order and reports what it did; it decides nothing of
the job.

The one exception is a rank that dies while the plane is out of reach: then the agents agree among themselves,
through the incarnation's store (`agents.alone`), and tell the master when it is back.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import Any

from aegis_elastic.agents import alone
from aegis_elastic.agents.body import NodeBody, Outcome
from aegis_elastic.agents.fallback import Fallback
from aegis_elastic.agents.inbox import Signalled
from aegis_elastic.agents.link import BusChanged, Farewell, Joined, NotJoined, Refused
from aegis_elastic.agents.news import AtEnd, Met, NextStore, PeersEnded
from aegis_elastic.agents.stores import ENDED_BY_PLANE, StoreGone
from aegis_elastic.agents.told import told, told_all
from aegis_elastic.core.attribution import clues_of
from aegis_elastic.core.events import Finding
from aegis_elastic.core.messages import IndependentEnd, MessageType, ReportData
from aegis_elastic.core.model import CheckResult, Failure
from aegis_elastic.core.orders import Action, Order
from aegis_elastic.core.ranks import Seat

logger = logging.getLogger(__name__)

# How long an Error may stay unanswered before the agents help themselves; shorter when the bus is known to be
# down.
ANSWER_S = 5.0
RECONNECT_S = 2.0
# The plane ended this incarnation but we can't hear it: how long it may take to come back.
PLANE_RETURN_S = 60.0
# Ranks are done and nobody closes the job: after this we close it among ourselves.
CLOSE_S = 10.0
# All is done in independent mode: how long a master that hears us may take to send the report.
REPORT_S = 3.0
# How long those whose ranks are not done may stay unseen before the others leave without them.
EXIT_PATIENCE_S = 60.0


class AegisElasticAgent(NodeBody):
    """Reactions to everything that can happen; what they do is in `NodeBody`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `NodeBody`."""
        super().__init__(*args, **kwargs)
        self._fallback: Fallback | None = None
        # Whether the agents lead themselves: for now, or because no master ever brought them together.
        self._alone = False
        self._from_start = False
        # From the start alone: the newest order of a master that hears us all the same.
        self._heard: Order | None = None
        # A signal has told us to end; what else comes is too late.
        self._leaving = False

    def _clear_up(self) -> None:
        super()._clear_up()
        if self._fallback is not None:
            self._fallback.close()

    def _on_item(self, item: object) -> None:
        if self._leaving and not isinstance(item, (Signalled, Farewell)):
            return  # A signal ends us: the ranks have their time, and no order may add to it or cut it.
        if isinstance(item, Order):
            self._on_order(item)
        elif isinstance(item, Joined):
            self._say_again()
        elif isinstance(item, NotJoined):
            self._fall_back(item.reason)
        elif isinstance(item, Refused):
            self._on_refused(item)
        elif isinstance(item, BusChanged):
            self._on_bus(item)
        elif isinstance(item, Farewell):
            self._report = item.report
        elif isinstance(item, Signalled):
            self._on_signal(item.signum)
        elif isinstance(item, PeersEnded) and item.peers is self._peers:
            self._on_peers_ended(item.peers.ended)
        elif isinstance(item, NextStore) and item.peers is self._peers:
            self._on_next_store(item.address)
        elif isinstance(item, Met):
            self._on_met(item)
        elif isinstance(item, AtEnd):
            self._on_end(item)
        elif item in ("store", "look"):
            self._say_again()

    def _say_again(self) -> None:
        if not self._from_start:
            super()._say_again()
        elif self._heard is not None:
            # For its books: what we do is not what it ordered, but it may know how we fare.
            self._report_on(self._heard)

    def _finish(self, findings: tuple[Finding, ...] = (), checks: tuple[CheckResult, ...] = ()) -> None:
        super()._finish(findings, checks)
        if not self._link.connected:
            self._wait(PLANE_RETURN_S, self._on_plane_gone)

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
        seat = self._seat(order)
        if order.action is Action.CLOSE:
            self._close(order)
        elif order.action is Action.INDEPENDENT:
            self._heard = order
            self._fall_back(order.reason or "not enough nodes reached the master in time")
        elif seat is None:
            self._say(MessageType.ACK, ReportData(state="spare"))
            if previous is None or self._seat(previous) is not None:
                self._narrate("waiting as a spare: every seat of the job is taken")
            self._stop_then(lambda: None)
        elif order.action is Action.RUN:
            self._on_run(order, seat)
        else:
            self._heed()
            if order.action is Action.BOOTCHECK:
                self._stop_then(self._check)
            else:
                self._end_by_plane(self._check if order.action is Action.TROUBLESHOOT else self._finish)
                self._check_meanwhile(order)

    def _on_repeated(self, order: Order) -> None:
        """Our Error is unanswered, and yet the master speaks: it lives, and is finding out whose failure came
        first. Who helped themselves now would have the failure counted twice.
        """
        waiting = self._said[0] is MessageType.ERROR and self._deadline is not None
        if waiting and not self._alone and self._order is not None and order.seq_num == self._order.seq_num:
            self._wait(ANSWER_S, self._end_alone)

    def _heed(self) -> None:
        """What we said of the last order says nothing of this one: a Finish must not be repeated under its
        number.
        """
        self._say(MessageType.ACK, ReportData(state="heard"))

    def _on_order_without_plane(self, order: Order) -> None:
        """One world without a plane: whoever can hear one goes with those who can't, and merely tells it."""
        self._heard = order
        if order.action is Action.CLOSE and self._said[0] is MessageType.FINISH and self._deadline:
            self._wait(0.0, self._close_alone)

    def _on_run(self, order: Order, seat: Seat) -> None:
        running = self._ranks
        if running is not None and running.incarnation == order.incarnation and not running.stopping:
            self._say_again()  # The start that this order tells of has been made: only its number is new.
            return
        self._heed()
        self._stop_then(lambda: self._start(order, seat))

    def _end_by_plane(self, then: Callable[[], None]) -> None:
        """The plane ends the incarnation: stop at once, unless the agents have ended it by themselves
        already.
        """
        ranks, peers = self._ranks, self._peers
        self._stop_then(then)
        if ranks is None or peers is None or ranks.incarnation != (self._order or _NONE).incarnation:
            return
        try:
            how = peers.claim(ENDED_BY_PLANE)
        except StoreGone as error:
            logger.info("the plane ended incarnation %d, and its store is gone: %s", ranks.incarnation, error)
            return
        if how != ENDED_BY_PLANE:
            self._go_alone(alone.decode(how))

    def _close(self, order: Order) -> None:
        code = 0 if order.outcome == "Succeed" else 1
        failures = self._ranks.failures() if self._ranks is not None else ()

        def leave() -> None:
            self._outcome = Outcome(code, order.reason, self._report, failures)

        self._say(MessageType.FINISH, ReportData(state="closing"))
        self._stop_then(leave, self._set.shutdown_timeout_s)

    # ------------------------------------------------------------ the ranks end

    def _on_exited(self) -> None:
        ranks = self._ranks
        assert ranks is not None
        if ranks.stopping or self._said[0] is MessageType.ERROR:
            return
        if ranks.failed:
            detect_s = time.monotonic() - ranks.first_failure_s
            failures = ranks.failures()
            self._narrate(told(failures[0]))
            self._fail(told(failures[0]), failures, detect_s)
        elif not ranks.running:
            self._say(MessageType.FINISH, ReportData(state="finished"))
            if self._from_start:
                self._wait(REPORT_S if self._link.connected else 0.0, self._close_alone)
            elif not self._link.connected:
                self._wait(CLOSE_S, self._close_alone)

    def _fail(self, reason: str, failures: tuple[Failure, ...], detect_s: float = 0.0) -> None:
        data = ReportData(
            failures=failures, clues=clues_of(failures), reason=reason, timings_s={"detect_s": detect_s}
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

    def _on_guard_died(self) -> None:
        logger.error("the guard process ended; the kernel has killed the ranks")
        self._replace_guard()
        ranks = self._ranks
        if ranks is not None and not ranks.stopped:
            was_stopping, ranks.stopped = ranks.stopping, True
            if was_stopping:
                self._on_stopped()
            else:
                self._fail("the guard process of the ranks was killed", ranks.failures())

    # ------------------------------------------------------------ without the plane

    def _end_alone(self) -> None:
        """Our rank failed and no order came: end this incarnation together with the other agents."""
        order, peers = self._order, self._peers
        if order is None or peers is None:
            self._leave(1, "training failed to start, and the control plane can't be reached")
            return
        data = self._said[1]
        proposal = self._ledger.propose(order, self._me.worker, data.reason, data.failures)
        try:
            how = peers.claim(alone.encode(proposal))
        except StoreGone as error:
            self._leave(
                1, f"{data.reason}; neither the control plane nor the other nodes can be reached: {error}"
            )
            return
        if how == ENDED_BY_PLANE:
            self._wait(
                PLANE_RETURN_S, lambda: self._leave(1, f"{data.reason}; the control plane did not come back")
            )
            return
        self._go_alone(alone.decode(how))

    def _on_peers_ended(self, how: str) -> None:
        if how == ENDED_BY_PLANE:
            return  # The order that says so is on its way, or here.
        try:
            self._go_alone(alone.decode(how))
        except ValueError as error:
            logger.error("%s", error)

    def _go_alone(self, end: IndependentEnd) -> None:
        """This incarnation ended without the plane: stop, and start again together if retries are left."""
        if not self._ledger.add(end):
            return
        self._alone = True
        self._deadline = None
        self._narrate(
            f"{end.worker}: {end.reason}. The control plane can't be reached: "
            + ("retries used up, the job ends" if end.ended else "all nodes restart together without it")
        )
        if end.ended and self._from_start:
            self._say(MessageType.ERROR, ReportData(reason=end.reason, failures=end.failures))
        if end.ended:
            self._stop_then(lambda: self._leave_together(1, f"{end.reason}: retries used up"))
        else:
            self._stop_then(self._offer_next)

    def _offer_next(self) -> None:
        seat = self._seat(self._order) if self._order is not None else None
        if seat is None or seat.group_rank != 0 or self._peers is None:
            return  # The first agent says where the next store is; `_on_next_store` goes on.
        if not self._shelf.ready:
            self._wait(0.1, self._offer_next)
            return
        try:
            self._peers.publish_next(self._shelf.ready)
        except StoreGone as error:
            self._leave(1, f"cannot restart together: {error}")

    def _on_next_store(self, address: str) -> None:
        order = self._order
        if not address or order is None:
            self._leave(1, "cannot restart together: the first node did not say where to meet")
            return
        following = alone.next_order(order, address)
        seat = self._seat(following)
        if seat is None:
            return
        self._order = following
        self._stop_then(lambda: self._start(following, seat))

    def _back_in_step(self, order: Order) -> bool:
        """Whether the plane has caught up with what we did without it; then its orders count again."""
        ours = self._order
        if order.action is Action.CLOSE:
            return True
        if ours is None or order.incarnation < ours.incarnation or self._ranks is None:
            return False
        if self._ledger.knows(ours.incarnation):
            return False  # We are on the way to the next one, which the plane can't know of yet.
        self._alone = False
        self._ledger.settle(order.incarnation)
        self._narrate("the control plane is back: training is protected again")
        return True

    def _fall_back(self, reason: str) -> None:
        """Run as an ordinary torchelastic job: no master, one world with everybody who comes."""
        if self._from_start or self._fallback is not None or (self._order and self._ranks):
            return
        self._from_start = True
        if self._heard is None:
            # No master may give us a seat any more: we would not take it.
            self._link.close(0.0)
        self._narrate(f"WITHOUT FAULT TOLERANCE: {reason}. Running as an ordinary torchelastic job")
        self._meet()

    def _meet(self) -> None:
        if not self._shelf.ready:
            self._wait(0.1, self._meet)
            return
        self._fallback = Fallback(
            self._set.meeting,
            self._me,
            self._shelf.ready,
            lambda order, why: self._inbox.put(Met(order, why)),
        )

    def _on_met(self, met: Met) -> None:
        seat = self._seat(met.order) if met.order is not None else None
        if met.order is None or seat is None:
            where = f"{self._set.meeting.host}:{self._set.meeting.port}"
            why = met.reason or "the other nodes went on without this one"
            self._leave(1, f"cannot meet the other nodes at {where}: {why}")
            return
        self._order = met.order
        self._start(met.order, seat)

    def _close_alone(self) -> None:
        """Every rank of ours is done and no plane closes the job: leave together with the others."""
        if self._link.connected and not self._from_start and not self._alone:
            return
        self._leave_together(0, "")

    def _leave_together(self, code: int, reason: str) -> None:
        peers, order = self._peers, self._order
        if peers is None or order is None or len(order.seats) == 1:
            self._leave(code, reason)
            return
        patience_s = EXIT_PATIENCE_S if code == 0 else CLOSE_S
        peers.meet_at_end(patience_s, lambda peers, met: self._inbox.put(AtEnd(peers, met, code, reason)))

    def _on_end(self, end: AtEnd) -> None:
        if end.peers is not self._peers:
            return  # Somebody failed while we waited, and everybody trains again.
        if not end.met:
            logger.warning("some nodes did not come to the end of the job")
        self._leave(end.code, end.reason)

    # ------------------------------------------------------------ other news

    def _on_refused(self, refused: Refused) -> None:
        if self._from_start or (self._ranks is not None and refused.usage):
            logger.warning("%s", refused.reason)
            return
        if refused.usage:
            self._leave(2, refused.reason)
            return
        code = 0 if refused.reason.endswith(": Succeed") else self._set.isolate_exit_code
        self._stop_then(lambda: self._leave(code, refused.reason))

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

    def _on_plane_gone(self) -> None:
        """No ranks, no orders, and no plane came back: begin without it, or end if it was in a recovery."""
        order = self._order
        if self._link.connected or order is None or (self._ranks is not None and self._ranks.running):
            return
        why = f"the control plane has been out of reach for {PLANE_RETURN_S:.0f} s"
        if order.incarnation == 0:
            self._fall_back(why)
        else:
            self._leave(1, f"{why}, in the middle of a recovery that it leads")

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
        self._leaving = ranks.stopping = True
        self._deadline = None
        self._stop_began_s = time.monotonic()
        self._then = lambda: self._leave(128 + signum, f"ended by {name}: {told_all(ranks.failures())}")
        self._guard.stop(0.0 if again else self._set.shutdown_timeout_s, signum)


class _NoOrder:
    incarnation = -1


_NONE: Any = _NoOrder()
