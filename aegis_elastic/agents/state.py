"""What an agent is in: one value, `AgentState`, and which events it heeds there.

    JOINING ----------> FOLLOWING <-------> STANDALONE
       |  an order          |    a rank died and no master answered;
       |                    |    a master has caught up
       +-> STANDALONE_FROM_START (until the end)

    PARKED and LEAVING are entered from any of them; from PARKED a new first contact leads back, from LEAVING
    nothing does.

What each event means in each mode ("-": not heeded):

| event              | JOINING       | FOLLOWING               | STANDALONE              | ..._FROM_START        | PARKED             | LEAVING  |
|--------------------|---------------|-------------------------|-------------------------|-----------------------|--------------------|----------|
| Order              | follow        | follow if newer         | once it has caught up   | note; CLOSE may end   | CLOSE: leave       | -        |
| Joined             | report        | start anew              | start anew              | report                | back, then as there| -        |
| NotJoined          | fall back     | fall back without ranks | fall back without ranks | -                     | -                  | -        |
| Refused            | leave or park | leave or park           | leave or park           | warn or park          | leave              | -        |
| ReexecRequested    | re-execute    | re-execute              | re-execute              | -                     | -                  | -        |
| BusChanged         | report        | report or wait          | report or wait          | report if it is back  | wait for it        | -        |
| FinalReportArrived | keep          | keep                    | keep                    | keep                  | -                  | keep     |
| IncarnationEnded   | -             | end it, too             | end it, too             | end it, too           | -                  | -        |
| NextStoreKnown     | -             | start there             | start there             | start there           | -                  | -        |
| WorldFormed        | -             | -                       | -                       | start it              | -                  | -        |
| AllFinished        | -             | leave                   | leave                   | leave                 | -                  | -        |
| OperatorCheck      | check         | check                   | check                   | check                 | -                  | -        |
| StoreReady         | report        | report                  | report                  | report                | -                  | -        |
| FactsChanged       | report        | report                  | report                  | report                | -                  | -        |
| SignalReceived     | leave         | leave                   | leave                   | leave                 | leave              | sooner   |
| TorchrunEnded      | leave         | leave                   | leave                   | leave                 | leave              | leave    |

Who is STANDALONE_FROM_START reports only if a master hears it (`AgentState.heard`). What the guard says of the
ranks is heeded in every mode.
"""  # noqa: E501 - a table

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from aegis_elastic.agents.mailbox.events import (
    BusChanged,
    FinalReportArrived,
    Joined,
    Refused,
    TorchrunEnded,
)
from aegis_elastic.agents.mailbox.mailbox import SignalReceived
from aegis_elastic.core.protocol.orders import Action, Order


class AgentMode(enum.Enum):
    """See the module's table."""

    # No order yet, of this generation of the job.
    JOINING = "joining"
    # A master leads.
    FOLLOWING = "following"
    # The agents ended an incarnation by themselves: they lead until a master has caught up with them.
    STANDALONE = "standalone"
    # No master brought us together: one ordinary world, without fault tolerance, until its end.
    STANDALONE_FROM_START = "standalone from the start"
    # We have no part in the job any more, and only wait for its end.
    PARKED = "parked"
    # A signal or the master has told us to end; the ranks have their time, and nothing may add to it.
    LEAVING = "leaving"


# Where only these are heeded. In every other mode all events are.
_HEEDED: dict[AgentMode, tuple[type, ...]] = {
    AgentMode.PARKED: (Order, Joined, Refused, BusChanged, SignalReceived, TorchrunEnded),
    AgentMode.LEAVING: (FinalReportArrived, SignalReceived, TorchrunEnded),
}


@dataclass(frozen=True)
class AgentState:
    """`order` is the newest that we follow, or made among ourselves. `heard`: the newest of a master that
    hears us, although we run without it from the start. `resumes`: what one that is parked goes back to.
    """

    mode: AgentMode = AgentMode.JOINING
    order: Order | None = None
    heard: Order | None = None
    resumes: AgentMode = AgentMode.JOINING

    @property
    def from_start(self) -> bool:
        """Whether no master has led this agent since its start, and none will."""
        return self.mode is AgentMode.STANDALONE_FROM_START

    def heeds(self, event: object) -> bool:
        """Whether this event means anything in this mode."""
        return isinstance(event, _HEEDED.get(self.mode, object))

    def following(self, order: Order) -> AgentState:
        """With this order as the newest. Who is standalone stays so: see `caught_up`."""
        joining = self.mode is AgentMode.JOINING
        return replace(self, order=order, mode=AgentMode.FOLLOWING if joining else self.mode)

    def standalone(self) -> AgentState:
        """The agents lead themselves for a while, unless they do so from the start."""
        return self if self.from_start else replace(self, mode=AgentMode.STANDALONE)

    def caught_up(self) -> AgentState:
        """A master leads again."""
        return replace(self, mode=AgentMode.FOLLOWING)

    def without_plane(self) -> AgentState:
        """From now on an ordinary world; a master that ordered that hears of us all the same."""
        ordered = self.order is not None and self.order.action is Action.INDEPENDENT
        return replace(
            self, mode=AgentMode.STANDALONE_FROM_START, heard=self.order if ordered else self.heard
        )

    def hearing(self, order: Order) -> AgentState:
        """With this order of a master that hears us, which we don't follow."""
        return replace(self, heard=order)

    def parked(self) -> AgentState:
        """Without a part in the job."""
        return replace(self, mode=AgentMode.PARKED, resumes=self.mode)

    def unparked(self) -> AgentState:
        """The plane has a part for us again, if it had none."""
        return replace(self, mode=self.resumes) if self.mode is AgentMode.PARKED else self

    def leaving(self) -> AgentState:
        """On the way out, which nothing changes any more."""
        return replace(self, mode=AgentMode.LEAVING)
