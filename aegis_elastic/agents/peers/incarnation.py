"""The peers and the stores of this node: of the incarnation that runs, and of the one before it."""

from __future__ import annotations

from aegis_elastic.agents.mailbox.events import (
    AllFinished,
    FactsChanged,
    IncarnationEnded,
    NextStoreKnown,
    StoreReady,
)
from aegis_elastic.agents.mailbox.mailbox import Mailbox
from aegis_elastic.agents.peers.peers import Peers
from aegis_elastic.agents.peers.stores import StorePool


class IncarnationPeers:
    """Belongs to the agent's loop. What the threads behind it see goes into `mailbox` as events."""

    def __init__(self, node_ip: str, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.stores = StorePool(node_ip, lambda: mailbox.put(StoreReady()))
        self.current: Peers | None = None
        # Agents that are late read the address of the next store in this one: it is left a start later.
        self._previous: Peers | None = None

    @property
    def alive(self) -> tuple[str, ...]:
        """The workers that were seen over the training network of late, sorted."""
        return tuple(sorted(self.current.alive)) if self.current is not None else ()

    def retire(self) -> None:
        """The current incarnation is the previous one from now on."""
        if self._previous is not None:
            self._previous.close()
        self._previous, self.current = self.current, None

    def connect(self, store: str, group_rank: int, workers: tuple[str, ...]) -> None:
        """Meet the agents of a new incarnation in its store. StoreGone, if it can't be reached."""
        self.current = Peers(
            store,
            group_rank,
            workers,
            lambda peers: self._mailbox.put(IncarnationEnded(peers)),
            lambda peers, address: self._mailbox.put(NextStoreKnown(peers, address)),
            lambda: self._mailbox.put(FactsChanged()),
        )

    def meet_at_end(self, patience_s: float, code: int, reason: str) -> None:
        """Wait for the others' ranks; AllFinished, with this code and reason, says when."""
        assert self.current is not None
        self.current.meet_at_end(
            patience_s, lambda peers, met: self._mailbox.put(AllFinished(peers, met, code, reason))
        )

    def close(self) -> None:
        """End all threads and stores."""
        seen = [peers for peers in (self.current, self._previous) if peers is not None]
        for peers in seen:
            peers.close()
        # With a store of ours its clients' waiting ends, here and elsewhere.
        self.stores.close()
        for peers in seen:
            peers.join()
