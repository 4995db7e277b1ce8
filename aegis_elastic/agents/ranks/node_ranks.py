"""This node's ranks as the agent has them: one group at a time, and whoever holds its processes.

Under `aegis-run` that is our guard (`guarded_ranks`), under the stock torchrun it is torchelastic's own agent
(`rendezvous.stock_agent`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from aegis_elastic.agents.guard.client import (
    DEFAULT_STOP_SIGNAL,
    Event,
    GatePassed,
    SpareGone,
    SpareReady,
)
from aegis_elastic.agents.ranks.rank_group import RankGroup
from aegis_elastic.agents.ranks.warm_spares import Spares
from aegis_elastic.core.model import Failure
from aegis_elastic.core.protocol.orders import Order
from aegis_elastic.core.rank_assignment import RankAssignment


class Guard(Protocol):
    """What sees the ranks' deaths and ends them, as `GuardClient` says of each method."""

    def fileno(self) -> int: ...

    def events(self) -> list[Event]: ...

    def stop(
        self, grace_s: float, signum: int = ..., wait_if_ignored: bool = ..., wait_if_blocked: bool = ...
    ) -> None: ...

    def signal(self, signum: int) -> None: ...

    def close(self) -> None: ...


class RankHolder(Protocol):
    """Starts this node's ranks and holds their processes."""

    @property
    def guard(self) -> Guard:
        """Sees their deaths. Another one after `replace_guard`."""

    @property
    def spares(self) -> Spares | None:
        """The warm spares; None where nothing can be held ready."""

    @property
    def can_reexec(self) -> bool:
        """Whether this process may execute itself again: not if it is somebody else's."""

    def start(
        self, order: Order, assignment: RankAssignment, generation: int, environment: Mapping[str, str]
    ) -> RankGroup:
        """Start the ranks that the order assigns to this node, with this added to their environment.
        SpawnError, GuardError, OSError.
        """

    def expect(self, environment: Mapping[str, str]) -> None:
        """This node waits as a spare: hold ready what it may be asked for."""

    def replace_guard(self) -> None:
        """The guard has died: end what it has left behind, and have another. GuardError."""

    def finish_logs(self) -> None:
        """The ranks have ended: flush their logs, end what torch runs beside them."""


class NodeRanks:
    """Belongs to the agent's loop, and has no thread."""

    def __init__(self, holder: RankHolder) -> None:
        self._holder = holder
        self._generation = 0
        self._stop_began_s = 0.0
        # Those of the newest incarnation; None when they have ended and nothing is asked of them any more.
        self.group: RankGroup | None = None

    @property
    def guard(self) -> Guard:
        """Whoever tells of the ranks' deaths."""
        return self._holder.guard

    @property
    def can_reexec(self) -> bool:
        """Whether this process may execute itself again."""
        return self._holder.can_reexec

    @property
    def live(self) -> RankGroup | None:
        """The group, as long as something of it may still run."""
        return self.group if self.group is not None and not self.group.stopped else None

    def failures(self) -> tuple[Failure, ...]:
        """Of the group's ranks, the first one first."""
        return self.group.failures() if self.group is not None else ()

    def start(self, order: Order, assignment: RankAssignment, environment: Mapping[str, str]) -> RankGroup:
        """Start a new group. SpawnError, GuardError, OSError."""
        self._generation += 1
        self.group = self._holder.start(order, assignment, self._generation, environment)
        return self.group

    def stop(
        self,
        grace_s: float,
        signum: int = DEFAULT_STOP_SIGNAL,
        *,
        wait_if_ignored: bool = True,
        wait_if_blocked: bool = True,
    ) -> None:
        """Stop the group; the guard's `Stopped` follows. The arguments are `GuardClient.stop`'s."""
        assert self.group is not None
        self.group.stopping = True
        self._stop_began_s = time.monotonic()
        self._holder.guard.stop(
            grace_s, signum, wait_if_ignored=wait_if_ignored, wait_if_blocked=wait_if_blocked
        )

    @property
    def stopping_for_s(self) -> float:
        """Seconds since the newest stop began."""
        return time.monotonic() - self._stop_began_s

    def release(self) -> None:
        """The group has ended and the next thing is about to be done: its logs are complete."""
        self._holder.finish_logs()
        self.group = None

    def replace_guard(self) -> None:
        """As `RankHolder`."""
        self._holder.replace_guard()

    def close(self) -> None:
        """End everything that runs."""
        self._holder.guard.close()
        self._holder.finish_logs()

    # ------------------------------------------------------------ warm spares

    def expect(self, environment: Mapping[str, str]) -> None:
        """As `RankHolder`."""
        self._holder.expect(environment)

    @property
    def due_s(self) -> float | None:
        """When `prepare` has something to do, on the monotonic clock; None: it hasn't."""
        return self._holder.spares.due_s if self._holder.spares is not None else None

    def prepare(self) -> None:
        """Make the next warm spare, if that is due and ranks run or are expected."""
        spares, group = self._holder.spares, self.group
        if spares is None or spares.due_s is None or time.monotonic() < spares.due_s:
            return
        if spares.expecting or (group is not None and group.running and not group.stopping):
            spares.act()
        else:
            spares.on_ranks_ended()

    def on_spare_event(self, event: GatePassed | SpareReady | SpareGone) -> None:
        """Note what the guard says of gates and spares."""
        if self._holder.spares is not None:
            self._holder.spares.on_event(event)
