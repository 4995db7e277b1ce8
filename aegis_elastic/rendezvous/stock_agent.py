"""Our agent, under the stock launcher: the same agent, with torchelastic's agent holding the ranks."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aegis_elastic.agents.agent import AegisElasticAgent
from aegis_elastic.agents.contract import Outcome, Settings
from aegis_elastic.agents.guard.client import GuardError
from aegis_elastic.agents.mailbox.events import TorchrunEnded
from aegis_elastic.agents.mailbox.mailbox import Mailbox
from aegis_elastic.agents.plane.link import Identity, PlaneLink
from aegis_elastic.agents.ranks.rank_group import RankGroup
from aegis_elastic.core.protocol.orders import Order
from aegis_elastic.core.rank_assignment import RankAssignment
from aegis_elastic.rendezvous.torchelastic_guard import TorchelasticContext, TorchelasticGuard


@dataclass(frozen=True)
class Placement:
    """What torchelastic is to start: the ranks that this order assigns to us."""

    order: Order
    assignment: RankAssignment
    context: TorchelasticContext


class TorchelasticRanks:
    """A `node_ranks.RankHolder` that starts nothing itself: it hands over what torchelastic is to start."""

    spares = None
    can_reexec = False

    def __init__(
        self, guard: TorchelasticGuard, mailbox: Mailbox, hand_over: Callable[[Placement], None]
    ) -> None:
        self.guard = guard
        self._mailbox = mailbox
        self._hand_over = hand_over
        self._no_more = False

    def start(
        self, order: Order, assignment: RankAssignment, generation: int, environment: Mapping[str, str]
    ) -> RankGroup:
        """As `RankHolder`. The ranks' environment is torchelastic's. GuardError: it starts none any more."""
        if self._no_more:
            # The job goes on without this node; the plane sees us go and says so.
            self._mailbox.put(TorchrunEnded("torchrun has ended its part of the job"))
            raise GuardError("torchrun has ended its part of the job")
        context = TorchelasticContext(assignment)
        self.guard.hold(generation)
        self._hand_over(Placement(order, assignment, context))
        return RankGroup(context, assignment, order.incarnation, generation)

    def expect(self, environment: Mapping[str, str]) -> None:
        """Nothing: the ranks are torchelastic's children, and none of ours can become one."""

    def replace_guard(self) -> None:
        """Nothing: what stands for the ranks is an object of this process."""

    def finish_logs(self) -> None:
        """Nothing: logs, watchdog and health server are those of torchelastic's own agent."""

    def no_more_starts(self) -> None:
        """Torchelastic won't start ranks again. From its thread."""
        self._no_more = True


class StockAgent:
    """An agent for a thread. What torchelastic is to do next comes out of `handover`: a `Placement` or the
    end.
    """

    def __init__(
        self,
        guard: TorchelasticGuard,
        *,
        identity: Identity,
        link: PlaneLink,
        mailbox: Mailbox,
        settings: Settings,
        announce: Callable[[str], None],
    ) -> None:
        """As `AegisElasticAgent`; `guard` is what stands for the ranks."""
        self.handover: queue.SimpleQueue[Placement | Outcome] = queue.SimpleQueue()
        self._ranks = TorchelasticRanks(guard, mailbox, self.handover.put)
        self._agent = AegisElasticAgent(
            self._ranks,
            identity=identity,
            link=link,
            mailbox=mailbox,
            settings=settings,
            announce=announce,
        )

    def run(self) -> None:
        """The thread: take part until the end, and hand that over."""
        outcome = Outcome(1, "our agent broke")
        try:
            outcome = self._agent.supervise()
        finally:
            self.handover.put(outcome)

    def no_more_starts(self) -> None:
        """Torchelastic won't start ranks again. From its thread."""
        self._ranks.no_more_starts()
