"""Going on without the plane: what an incarnation's end means when no master can be told of it.

The agents agree through one write-once key in the incarnation's store (`agents.peers.peers.Peers.claim`):
the first to claim writes there what ended it, and whether the retries are used up. Everybody then acts on
that same text, so there is one world and one exit code. When the master is back, it enters it into the
accounts exactly once.
"""

from __future__ import annotations

import msgspec

from aegis_elastic.core.model import Failure
from aegis_elastic.core.protocol.messages import IndependentEnd
from aegis_elastic.core.protocol.orders import Action, Order
from aegis_elastic.core.retry_accounts import charge, exceeded

# A master that gets our reports and can enter the ends into its accounts does so at once. One that still
# orders something else after this time is in a recovery of its own, and waits for us.
OVERRULED_S = 5.0


class UnreportedEnds:
    """The ends that the plane doesn't know of yet, and the count that follows from them."""

    def __init__(self) -> None:
        self._ends: tuple[IndependentEnd, ...] = ()
        self._behind: tuple[int, float] | None = None

    @property
    def ends(self) -> tuple[IndependentEnd, ...]:
        """What there is to report, oldest first."""
        return self._ends

    def propose(
        self, order: Order, worker: str, reason: str, failures: tuple[Failure, ...]
    ) -> IndependentEnd:
        """How this incarnation ends by our failure, if nobody was first. Retries go on from the job's count,
        as last known.
        """
        retries = order.recover_count + len(self._ends)
        over = exceeded((charge(retries, order.max_retry),), order.max_retry)
        return IndependentEnd(worker, order.incarnation, reason, failures, ended=over)

    def add(self, end: IndependentEnd) -> bool:
        """Note an end; False if it was known."""
        if self.knows(end.incarnation):
            return False
        self._ends = (*self._ends, end)
        return True

    def knows(self, incarnation: int) -> bool:
        """Whether this incarnation is known to have ended without the plane."""
        return any(end.incarnation == incarnation for end in self._ends)

    def overruled(self, order: Order, ours: Order, now_s: float) -> bool:
        """Whether to follow an order of an incarnation that we have left behind: it is newer than what we
        left with, and the master has kept to it although it has our reports. `now_s`: monotonic, in seconds.
        """
        if order.action is Action.RUN or order.seq_num <= ours.seq_num:
            return False
        if self._behind is None or self._behind[0] != ours.incarnation:
            self._behind = ours.incarnation, now_s
        return now_s - self._behind[1] >= OVERRULED_S

    def settle(self, incarnation: int) -> None:
        """The plane is at this incarnation: what came before is in its accounts."""
        self._ends = tuple(end for end in self._ends if end.incarnation >= incarnation)


def encode(end: IndependentEnd) -> str:
    """The text of the write-once key."""
    return msgspec.json.encode(end).decode()


def decode(text: str) -> IndependentEnd:
    """What the first to claim wrote. ValueError if it makes no sense."""
    try:
        return msgspec.json.decode(text.encode(), type=IndependentEnd)
    except msgspec.MsgspecError as error:
        raise ValueError(f"cannot read how the incarnation ended: {error}") from error


def next_order(order: Order, store: str) -> Order:
    """The start that follows when the agents go on by themselves: same ranks, next incarnation, new store."""
    return msgspec.structs.replace(
        order, incarnation=order.incarnation + 1, restart_count=order.restart_count + 1, store=store
    )
