"""What the agent reports: its newest answer to an order, and what goes with every report by itself."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from aegis_elastic.agents.peers.incarnation import IncarnationPeers
from aegis_elastic.agents.plane.link import PlaneLink
from aegis_elastic.agents.standalone.standalone import Standalone
from aegis_elastic.core.protocol.messages import MessageType, ReportData, WirePhase
from aegis_elastic.core.protocol.orders import WIRE_PHASE, Order


class Reporter:
    """Holds the newest answer. Every `send` adds to it what has changed since: the store that is ready, the
    ends that the master doesn't know of, who is alive, the watchers' facts.
    """

    def __init__(
        self,
        link: PlaneLink,
        peers: IncarnationPeers,
        standalone: Standalone,
        facts: Callable[[], dict[str, msgspec.Raw]],
    ) -> None:
        self._link = link
        self._peers = peers
        self._standalone = standalone
        self._facts = facts
        self.kind = MessageType.ACK
        self.data = ReportData()

    def update(self, kind: MessageType, data: ReportData) -> None:
        """Make this the newest answer; it isn't sent yet."""
        self.kind, self.data = kind, data

    def send(self, order: Order | None) -> None:
        """Report, as an answer to that order. None: no order came yet."""
        store = self._peers.stores.ready
        if order is None:
            joining = ReportData(state="joining", store=store)
            self._link.report(MessageType.ACK, WirePhase.BOOTCHECK, 0, 0, joining)
            return
        full = msgspec.structs.replace(
            self.data,
            store=store,
            independent=self._standalone.unreported.ends,
            alive=self._peers.alive,
            watched=self._facts(),
        )
        phase = WirePhase(WIRE_PHASE[order.action])
        self._link.report(self.kind, phase, order.seq_num, order.incarnation, full)
