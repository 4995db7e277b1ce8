"""Our agent, under the stock launcher: the same reactions, with torchelastic's agent holding the ranks."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Any

from aegis_elastic.agents.agent import AegisElasticAgent
from aegis_elastic.agents.body import Guard, Outcome
from aegis_elastic.agents.guard.client import GuardError
from aegis_elastic.agents.ranks.rank_group import RankGroup
from aegis_elastic.core.protocol.orders import Order
from aegis_elastic.core.rank_assignment import RankAssignment
from aegis_elastic.rendezvous.torchelastic_guard import TorchelasticContext, TorchelasticGuard


@dataclass(frozen=True)
class Placement:
    """What torchelastic is to start: our seat in this order."""

    order: Order
    assignment: RankAssignment
    context: TorchelasticContext


@dataclass(frozen=True)
class Leave:
    """An item for the agent's inbox: torchelastic has ended, so it ends, too."""

    reason: str


class StockAgent(AegisElasticAgent):
    """Runs in a thread. What torchelastic is to do next comes out of `handover`: a `Placement` or the end."""

    def __init__(self, *args: Any, held: TorchelasticGuard, **kwargs: Any) -> None:
        """As `AegisElasticAgent`; `held` is what stands for the ranks."""
        self._held = held
        self.handover: queue.SimpleQueue[Placement | Outcome] = queue.SimpleQueue()
        self._no_more = False
        super().__init__(*args, **kwargs)

    def live(self) -> None:
        """The thread: take part until the end, and hand that over."""
        outcome = Outcome(1, "our agent broke")
        try:
            outcome = self.supervise()
        finally:
            self.handover.put(outcome)

    def finish_ranks(self) -> None:
        """Nothing: logs, watchdog and health server are those of torchelastic's own agent."""

    def _on_item(self, item: object) -> None:
        if isinstance(item, Leave):
            self._leave(1, item.reason)
        else:
            super()._on_item(item)

    def _open_guard(self) -> Guard:
        return self._held

    def _start_ranks(self, order: Order, assignment: RankAssignment) -> RankGroup:
        if self._no_more:
            # The job goes on without this node; the plane sees us go and says so.
            self._mailbox.put(Leave("torchrun has ended its part of the job"))
            raise GuardError("torchrun has ended its part of the job")
        context = TorchelasticContext(assignment)
        self._held.hold(self._generation)
        self.handover.put(Placement(order, assignment, context))
        return RankGroup(context, assignment, order.incarnation, self._generation)

    def no_more_starts(self) -> None:
        """Torchelastic won't start ranks again. From its thread."""
        self._no_more = True
