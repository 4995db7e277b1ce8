"""Everything that the agent's loop hears through its mailbox, beside `core`'s `Order` and `OperatorCheck` and
the mailbox's own `SignalReceived`. `agents.state` says which of it is heeded when.
"""

from __future__ import annotations

from dataclasses import dataclass

from aegis_elastic.bus.contact.first_contact import Welcome
from aegis_elastic.core.accounts.report import Report
from aegis_elastic.core.protocol.orders import Order

# ------------------------------------------------------------ from the link to the control plane


@dataclass(frozen=True)
class Joined:
    """First contact was made: the job has us. `proven`: a join secret vouched for both sides.

    Comes again if the plane leads another generation of the job by now: orders are numbered anew there.
    """

    welcome: Welcome
    proven: bool


@dataclass(frozen=True)
class NotJoined:
    """Nobody answered within the join timeout; the link goes on trying."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """We can't take part: wrong secret, another program's port, a tainted node.

    `usage`: the user's to mend. `parked`: we have no part in the job, and hear how it ends.
    """

    reason: str
    usage: bool
    parked: bool = False


@dataclass(frozen=True)
class ReexecRequested:
    """The master wants a clean process in our place (level 2)."""

    reason: str


@dataclass(frozen=True)
class BusChanged:
    """The bus went away or came back."""

    connected: bool
    reason: str = ""


@dataclass(frozen=True)
class FinalReportArrived:
    """The job's final report, as the master wrote it."""

    report: Report


# ------------------------------------------------------------ from the peers and the stores
#
# `peers` is the `agents.peers.peers.Peers` that saw it; it is only compared, by identity: what comes from the
# peers of an earlier incarnation counts no more.


@dataclass(frozen=True)
class IncarnationEnded:
    """The incarnation's end was written into its store."""

    peers: object


@dataclass(frozen=True)
class NextStoreKnown:
    """The first agent published the address of the next incarnation's store ("": it didn't)."""

    peers: object
    address: str


@dataclass(frozen=True)
class AllFinished:
    """Everybody's ranks are done (`met`), or the missing are not waited for any longer: leave with `code`."""

    peers: object
    met: bool
    code: int
    reason: str


@dataclass(frozen=True)
class WorldFormed:
    """The agents have met without a master: the order that they follow, or None and why not."""

    order: Order | None
    reason: str


# ------------------------------------------------------------ from what runs beside the loop


@dataclass(frozen=True)
class StoreReady:
    """The store pool has an unused store, whose address goes into the next report."""


@dataclass(frozen=True)
class FactsChanged:
    """A watcher, the spare's checks or the peers know something new, which is to be reported now."""


@dataclass(frozen=True)
class TorchrunEnded:
    """Under the stock launcher: torchelastic, which holds the ranks, has ended. So do we."""

    reason: str
