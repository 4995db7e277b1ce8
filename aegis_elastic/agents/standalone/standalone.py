"""How the agents go on together without a master: what the agent asks and what comes of it.

Nothing here acts on ranks or reports: the answers are values, and the agent does what follows from them.
"""

from __future__ import annotations

import logging

from aegis_elastic.agents.mailbox.events import WorldFormed
from aegis_elastic.agents.mailbox.mailbox import Mailbox
from aegis_elastic.agents.peers.incarnation import IncarnationPeers
from aegis_elastic.agents.peers.peers import ENDED_BY_PLANE, Peers
from aegis_elastic.agents.peers.stores import StoreGone
from aegis_elastic.agents.plane.link import Identity
from aegis_elastic.agents.standalone import unreported_ends
from aegis_elastic.agents.standalone.fallback import Fallback, Meeting
from aegis_elastic.agents.standalone.unreported_ends import UnreportedEnds
from aegis_elastic.core.protocol.messages import IndependentEnd, ReportData
from aegis_elastic.core.protocol.orders import Order

logger = logging.getLogger(__name__)


class Standalone:
    """Belongs to the agent's loop. Only `form_world` has a thread of its own."""

    def __init__(self, me: Identity, peers: IncarnationPeers, meeting: Meeting, mailbox: Mailbox) -> None:
        self._me = me
        self._peers = peers
        self._meeting = meeting
        self._mailbox = mailbox
        self._fallback: Fallback | None = None
        self.unreported = UnreportedEnds()

    def claim_end(self, peers: Peers, order: Order, error: ReportData) -> IndependentEnd | None:
        """End this incarnation by our failure: how it does end (another agent may have been first). None: by
        the plane. StoreGone; ValueError if what is written there makes no sense.
        """
        proposal = self.unreported.propose(order, self._me.worker, error.reason, error.failures)
        return read_end(peers.claim(unreported_ends.encode(proposal)))

    def claim_end_by_plane(self, incarnation: int) -> IndependentEnd | None:
        """Write down that the plane ends this incarnation. None: so it does, as far as anybody can know; else
        how the agents have ended it by themselves before. ValueError as above.
        """
        if self._peers.current is None:
            return None
        try:
            return read_end(self._peers.current.claim(ENDED_BY_PLANE))
        except StoreGone as error:
            logger.info("the plane ended incarnation %d, and its store is gone: %s", incarnation, error)
            return None

    def caught_up(self, order: Order, ours: Order, now_s: float) -> bool:
        """Whether the plane's order counts again: it knows what we did without it, or overrules it.

        `ours`: the order that the agents follow; `now_s`: monotonic, in seconds.
        """
        if self.unreported.knows(ours.incarnation):
            return False  # We are on the way to the next one, which the plane can't know of yet.
        behind = order.incarnation < ours.incarnation
        if behind and not self.unreported.overruled(order, ours, now_s):
            return False
        # What it has overruled is never entered into its accounts: a recovery counts its failure once.
        self.unreported.settle(max(order.incarnation, ours.incarnation))
        return True

    def form_world(self, store: str) -> None:
        """Meet whoever comes without a master, offering this store; WorldFormed says what came of it."""
        self._fallback = Fallback(
            self._meeting,
            self._me,
            store,
            lambda order, reason: self._mailbox.put(WorldFormed(order, reason)),
        )

    @property
    def meeting_place(self) -> str:
        """Where those meet who have no master."""
        return f"{self._meeting.host}:{self._meeting.port}"

    def close(self) -> None:
        """Take the meeting place away."""
        if self._fallback is not None:
            self._fallback.close()


def read_end(how: str) -> IndependentEnd | None:
    """How an incarnation ended, from the text in its store. None: by the plane. ValueError: nonsense."""
    return None if how == ENDED_BY_PLANE else unreported_ends.decode(how)
