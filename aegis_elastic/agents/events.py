"""What threads of ours put into the agent's inbox, beside orders and what the link tells."""

from __future__ import annotations

from dataclasses import dataclass

from aegis_elastic.agents.peers.stores import Peers
from aegis_elastic.core.protocol.orders import Order


@dataclass(frozen=True)
class IncarnationEnded:
    """The incarnation's end was written into its store."""

    peers: Peers


@dataclass(frozen=True)
class NextStoreKnown:
    """The first agent said where the next incarnation's store is ("": it didn't)."""

    peers: Peers
    address: str


@dataclass(frozen=True)
class WorldFormed:
    """The agents have met without a master: the order that they follow, or None and why not."""

    order: Order | None
    reason: str


@dataclass(frozen=True)
class AllFinished:
    """Everybody's ranks are done (`met`), or the missing are not waited for any longer: leave with `code`."""

    peers: Peers
    met: bool
    code: int
    reason: str
