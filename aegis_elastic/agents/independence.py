"""What an agent does when there is no control plane to follow: for a while, for good, or from the start.

For a while: a rank dies and no master hears of it; the agents end the incarnation together through its store
(`agents.standalone.unreported_ends`), start the next one, and tell the master when it is back. From the
start: too few could reach a master in time, so everybody runs as one ordinary torchelastic world
(`agents.standalone.fallback`).
"""

from __future__ import annotations

import logging
import time
from typing import Any

from aegis_elastic.agents.body import NodeBody
from aegis_elastic.agents.mailbox.events import AllFinished, WorldFormed
from aegis_elastic.agents.peers.peers import ENDED_BY_PLANE
from aegis_elastic.agents.peers.stores import StoreGone
from aegis_elastic.agents.standalone import unreported_ends
from aegis_elastic.agents.standalone.fallback import Fallback
from aegis_elastic.core.events import Finding
from aegis_elastic.core.model import CheckResult
from aegis_elastic.core.protocol.messages import IndependentEnd, MessageType, ReportData
from aegis_elastic.core.protocol.orders import Action, Order

logger = logging.getLogger(__name__)

# The plane ended this incarnation but we can't hear it: how long it may take to come back.
PLANE_RETURN_S = 60.0
# Ranks are done and nobody closes the job: after this we close it among ourselves.
CLOSE_S = 10.0
# How long those whose ranks are not done may stay unseen before the others leave without them.
EXIT_PATIENCE_S = 60.0


class IndependentBody(NodeBody):
    """A node that can go on without a master, together with the others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `NodeBody`."""
        super().__init__(*args, **kwargs)
        self._fallback: Fallback | None = None
        # Whether the agents lead themselves: for now, or because no master ever brought them together.
        self._alone = False
        self._from_start = False
        # From the start alone: the newest order of a master that hears us all the same.
        self._heard: Order | None = None

    def _clear_up(self) -> None:
        super()._clear_up()
        if self._fallback is not None:
            self._fallback.close()

    # ------------------------------------------------------------ saying

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

    # ------------------------------------------------------------ for a while

    def _end_alone(self) -> None:
        """Our rank failed and no order came: end this incarnation together with the other agents."""
        order, peers = self._order, self._peers
        if order is None or peers is None:
            self._leave(1, "training failed to start, and the control plane can't be reached")
            return
        data = self._said[1]
        proposal = self._ledger.propose(order, self._me.worker, data.reason, data.failures)
        try:
            how = peers.claim(unreported_ends.encode(proposal))
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
        self._go_alone(unreported_ends.decode(how))

    def _on_peers_ended(self, how: str) -> None:
        if how == ENDED_BY_PLANE:
            return  # The order that says so is on its way, or here.
        try:
            self._go_alone(unreported_ends.decode(how))
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
        assignment = self._seat(self._order) if self._order is not None else None
        if assignment is None or assignment.group_rank != 0 or self._peers is None:
            return  # The first agent says where the next store is; `_on_next_store` goes on.
        if not self._stores.ready:
            self._wait(0.1, self._offer_next)
            return
        try:
            self._peers.publish_next(self._stores.ready)
        except StoreGone as error:
            self._leave(1, f"cannot restart together: {error}")

    def _on_next_store(self, address: str) -> None:
        order = self._order
        if not address or order is None:
            self._leave(1, "cannot restart together: the first node did not say where to meet")
            return
        following = unreported_ends.next_order(order, address)
        assignment = self._seat(following)
        if assignment is None:
            return
        self._order = following
        self._stop_then(lambda: self._start(following, assignment))

    def _back_in_step(self, order: Order) -> bool:
        """Whether the plane has caught up with what we did without it; then its orders count again."""
        ours = self._order
        if order.action is Action.CLOSE:
            return True
        if ours is None or self._ranks is None:
            return False
        if self._ledger.knows(ours.incarnation):
            return False  # We are on the way to the next one, which the plane can't know of yet.
        behind = order.incarnation < ours.incarnation
        if behind and not self._ledger.overruled(order, ours, time.monotonic()):
            return False
        self._alone = False
        # What it has overruled is never entered into its accounts: a recovery counts its failure once.
        self._ledger.settle(max(order.incarnation, ours.incarnation))
        self._narrate("the control plane is back: training is protected again")
        return True

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

    # ------------------------------------------------------------ from the start

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
        if not self._stores.ready:
            self._wait(0.1, self._meet)
            return
        self._fallback = Fallback(
            self._set.meeting,
            self._me,
            self._stores.ready,
            lambda order, why: self._mailbox.put(WorldFormed(order, why)),
        )

    def _on_met(self, met: WorldFormed) -> None:
        assignment = self._seat(met.order) if met.order is not None else None
        if met.order is None or assignment is None:
            where = f"{self._set.meeting.host}:{self._set.meeting.port}"
            why = met.reason or "the other nodes went on without this one"
            self._leave(1, f"cannot meet the other nodes at {where}: {why}")
            return
        self._order = met.order
        self._start(met.order, assignment)

    def _on_order_without_plane(self, order: Order) -> None:
        """One world without a plane: whoever can hear one goes with those who can't, and merely tells it."""
        self._heard = order
        if order.action is Action.CLOSE and self._said[0] is MessageType.FINISH and self._deadline:
            self._wait(0.0, self._close_alone)

    # ------------------------------------------------------------ the end, together

    def _close_alone(self) -> None:
        """Every rank of ours is done and no plane closes the job: leave together with the others."""
        if self._link.connected and not self._from_start and not self._alone:
            return
        self._leave_together(0, "")

    def _leave_together(self, code: int, reason: str) -> None:
        peers, order = self._peers, self._order
        if peers is None or order is None or len(order.assignments) == 1:
            self._leave(code, reason)
            return
        patience_s = EXIT_PATIENCE_S if code == 0 else CLOSE_S
        peers.meet_at_end(
            patience_s, lambda peers, met: self._mailbox.put(AllFinished(peers, met, code, reason))
        )

    def _on_end(self, end: AllFinished) -> None:
        if end.peers is not self._peers:
            return  # Somebody failed while we waited, and everybody trains again.
        if not end.met:
            logger.warning("some nodes did not come to the end of the job")
        self._leave(end.code, end.reason)
