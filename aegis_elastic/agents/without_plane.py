"""What an agent does when there is no control plane to follow: for a while, for good, or from the start.

For a while: a rank dies and no master hears of it; the agents end the incarnation together through its store,
start the next one, and tell the master when it is back. From the start: too few could reach a master in time,
so everybody runs as one ordinary torchelastic world. How they agree is in `agents.standalone`.
"""

from __future__ import annotations

import logging
import time

from aegis_elastic.agents.mailbox.events import AllFinished, IncarnationEnded, NextStoreKnown, WorldFormed
from aegis_elastic.agents.node import Node
from aegis_elastic.agents.peers.stores import StoreGone
from aegis_elastic.agents.pending import (
    CLOSE_S,
    EXIT_PATIENCE_S,
    PLANE_RETURN_S,
    STORE_POLL_S,
    Leave,
    LeaveTogether,
    Start,
    Step,
)
from aegis_elastic.agents.standalone import standalone, unreported_ends
from aegis_elastic.agents.state import AgentMode
from aegis_elastic.core.protocol.messages import IndependentEnd, MessageType, ReportData
from aegis_elastic.core.protocol.orders import Action, Order

logger = logging.getLogger(__name__)


class WithoutPlane:
    """The agent's reactions while nobody leads it; what they do is done by `node`."""

    def __init__(self, node: Node) -> None:
        self._node = node

    # ------------------------------------------------------------ for a while

    def end_incarnation(self) -> None:
        """Our rank failed and no order came: end this incarnation together with the other agents."""
        node = self._node
        order, peers, error = node.state.order, node.peers.current, node.reporter.data
        if order is None or peers is None:
            node.leave(1, "training failed to start, and the control plane can't be reached")
            return
        try:
            end = node.standalone.claim_end(peers, order, error)
        except StoreGone as gone:
            unreachable = f"neither the control plane nor the other nodes can be reached: {gone}"
            node.leave(1, f"{error.reason}; {unreachable}")
            return
        if end is None:
            node.wait(PLANE_RETURN_S, Leave(1, f"{error.reason}; the control plane did not come back"))
        else:
            self.go_on(end)

    def on_incarnation_ended(self, event: IncarnationEnded) -> None:
        peers = self._node.peers.current
        if peers is None or event.peers is not peers:
            return
        try:
            end = standalone.read_end(peers.ended)
        except ValueError as error:
            logger.error("%s", error)
            return
        if end is not None:  # else the order that says so is on its way, or here
            self.go_on(end)

    def go_on(self, end: IndependentEnd) -> None:
        """This incarnation ended without the plane: stop, and start again together if retries are left."""
        node = self._node
        if not node.standalone.unreported.add(end):
            return
        node.state, node.deadline = node.state.standalone(), None
        node.announce(
            f"{end.worker}: {end.reason}. The control plane can't be reached: "
            + ("retries used up, the job ends" if end.ended else "all nodes restart together without it")
        )
        if end.ended and node.state.from_start:
            node.report(MessageType.ERROR, ReportData(reason=end.reason, failures=end.failures))
        if end.ended:
            node.stop_then(LeaveTogether(1, f"{end.reason}: retries used up"))
        else:
            node.stop_then(Step.OFFER_NEXT_STORE)

    def offer_next_store(self) -> None:
        node = self._node
        order, peers = node.state.order, node.peers.current
        assignment = node.assignment_in(order) if order is not None else None
        if assignment is None or assignment.group_rank != 0 or peers is None:
            return  # The first agent says where the next store is; `on_next_store` goes on.
        if not node.peers.stores.ready:
            node.wait(STORE_POLL_S, Step.OFFER_NEXT_STORE)
            return
        try:
            peers.publish_next(node.peers.stores.ready)
        except StoreGone as error:
            node.leave(1, f"cannot restart together: {error}")

    def on_next_store(self, event: NextStoreKnown) -> None:
        node = self._node
        if event.peers is not node.peers.current:
            return
        order = node.state.order
        if not event.address or order is None:
            node.leave(1, "cannot restart together: the first node did not say where to meet")
            return
        following = unreported_ends.next_order(order, event.address)
        assignment = node.assignment_in(following)
        if assignment is None:
            return
        node.state = node.state.following(following)
        node.stop_then(Start(following, assignment))

    def back_in_step(self, order: Order) -> bool:
        """Whether the plane has caught up with what we did without it; then its orders count again."""
        node = self._node
        ours = node.state.order
        if order.action is Action.CLOSE:
            return True
        if ours is None or node.ranks.group is None:
            return False
        if not node.standalone.caught_up(order, ours, time.monotonic()):
            return False
        node.state = node.state.caught_up()
        node.announce("the control plane is back: training is protected again")
        return True

    def give_up_plane(self) -> None:
        """No ranks, no orders, and no plane came back: begin without it, or end if it was in a recovery."""
        node = self._node
        order, group = node.state.order, node.ranks.group
        if node.link.connected or order is None or (group is not None and group.running):
            return
        why = f"the control plane has been out of reach for {PLANE_RETURN_S:.0f} s"
        if order.incarnation == 0:
            self.fall_back(why)
        else:
            node.leave(1, f"{why}, in the middle of a recovery that it leads")

    # ------------------------------------------------------------ from the start

    def fall_back(self, reason: str) -> None:
        """Run as an ordinary torchelastic job: no master, one world with everybody who comes."""
        node = self._node
        started = node.state.order is not None and node.ranks.group is not None
        if node.state.from_start or started:
            return
        node.state = node.state.without_plane()
        if node.state.heard is None:
            # No master may give us ranks any more: we would not take them.
            node.link.close(0.0)
        node.announce(f"WITHOUT FAULT TOLERANCE: {reason}. Running as an ordinary torchelastic job")
        self.form_world()

    def form_world(self) -> None:
        node = self._node
        if not node.peers.stores.ready:
            node.wait(STORE_POLL_S, Step.FORM_WORLD)
            return
        node.standalone.form_world(node.peers.stores.ready)

    def on_world_formed(self, world: WorldFormed) -> None:
        node = self._node
        order = world.order
        assignment = node.assignment_in(order) if order is not None else None
        if order is None or assignment is None:
            why = world.reason or "the other nodes went on without this one"
            node.leave(1, f"cannot meet the other nodes at {node.standalone.meeting_place}: {why}")
            return
        node.state = node.state.following(order)
        node.carry_out(Start(order, assignment))

    def on_order(self, order: Order) -> None:
        """One world without a plane: whoever can hear one goes with those who can't, and merely reports."""
        node = self._node
        node.state = node.state.hearing(order)
        finished = node.reporter.kind is MessageType.FINISH and node.deadline is not None
        if order.action is Action.CLOSE and finished:
            node.wait(0.0, Step.CLOSE_STANDALONE)

    # ------------------------------------------------------------ the end, together

    def close_job(self) -> None:
        """Every rank of ours is done and no plane closes the job: leave together with the others."""
        node = self._node
        led = not node.state.from_start and node.state.mode is not AgentMode.STANDALONE
        if not (node.link.connected and led):
            self.leave_together(0, "")

    def leave_together(self, code: int, reason: str) -> None:
        node = self._node
        order = node.state.order
        if node.peers.current is None or order is None or len(order.assignments) == 1:
            node.leave(code, reason)
            return
        node.peers.meet_at_end(EXIT_PATIENCE_S if code == 0 else CLOSE_S, code, reason)

    def on_all_finished(self, event: AllFinished) -> None:
        node = self._node
        if event.peers is not node.peers.current:
            return  # Somebody failed while we waited, and everybody trains again.
        if not event.met:
            logger.warning("some nodes did not come to the end of the job")
        node.leave(event.code, event.reason)
