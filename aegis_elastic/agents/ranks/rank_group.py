"""This node's ranks of one incarnation: started, watched, stopped, and how they ended."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from aegis_elastic.agents.guard.client import Exited, GuardClient, Stopped
from aegis_elastic.agents.peers.stores import split
from aegis_elastic.agents.ranks.error_file import raised_at
from aegis_elastic.agents.ranks.torch_seam import SeamAgent, failure_of
from aegis_elastic.agents.ranks.warm_spares import Spares
from aegis_elastic.checks.contract.request import RankExit
from aegis_elastic.core.model import Failure
from aegis_elastic.core.protocol.orders import Order
from aegis_elastic.core.rank_assignment import RankAssignment

LAST_LINES = 20
TAIL_BYTES = 16384


class Context(Protocol):
    """The processes: local rank -> pid, error file, files of its stdout and stderr ("": none)."""

    error_files: dict[int, str]
    stdouts: dict[int, str]
    stderrs: dict[int, str]

    def pids(self) -> dict[int, int]: ...


class RankGroup:
    """The ranks of one incarnation on this node. Made by `start`; the guard's events go to `on_event`."""

    def __init__(
        self, context: Context, assignment: RankAssignment, incarnation: int, generation: int
    ) -> None:
        self.assignment = assignment
        self.incarnation = incarnation
        self.generation = generation
        self.started_s = time.monotonic()
        self._context = context
        self._running = set(context.pids())
        self._exits: dict[int, Exited] = {}
        self.stopping = False
        self.stopped = False
        self.unkillable: tuple[int, ...] = ()
        # Lines of a (global) rank's log that may say why it failed, from who reads the logs.
        self.log_lines: Callable[[int], Sequence[str]] = lambda rank: ()

    @classmethod
    def start(
        cls,
        agent: SeamAgent,
        guard: GuardClient,
        order: Order,
        assignment: RankAssignment,
        generation: int,
        spares: Spares | None = None,
    ) -> RankGroup:
        """Start the ranks that this order assigns to this node. SpawnError, GuardError as
        `SeamAgent.start_ranks`.
        """
        host, port = split(order.store)
        world_size = sum(other.nproc for other in order.assignments)
        context = agent.start_ranks(
            group_rank=assignment.group_rank,
            group_world_size=len(order.assignments),
            rank_offset=assignment.rank_offset,
            world_size=world_size,
            role_rank_offset=assignment.rank_offset,
            role_world_size=world_size,
            master_addr=host,
            master_port=port,
            restart_count=order.restart_count,
            guard=guard,
            generation=generation,
            spares=spares,
        )
        return cls(context, assignment, order.incarnation, generation)

    @property
    def running(self) -> bool:
        """Whether a rank lives."""
        return bool(self._running)

    @property
    def pids(self) -> dict[int, int]:
        """Global rank -> pid of the ranks that live."""
        pids = self._context.pids()
        return {self.assignment.rank_offset + local: pids[local] for local in sorted(self._running)}

    @property
    def logs(self) -> dict[int, tuple[str, ...]]:
        """Global rank -> the files that its stdout and stderr go to; none where it has the launcher's
        streams.
        """
        files = {}
        for local in range(self.assignment.nproc):
            streams = self._context.stdouts.get(local, ""), self._context.stderrs.get(local, "")
            files[self.assignment.rank_offset + local] = tuple(
                dict.fromkeys(path for path in streams if path)
            )
        return files

    @property
    def failed(self) -> bool:
        """Whether a rank has failed."""
        return any(_is_failure(exited) for exited in self._exits.values())

    @property
    def first_failure_s(self) -> float:
        """The monotonic time of the first failure; now if there was none."""
        times = [exited.monotonic_s for exited in self._exits.values() if _is_failure(exited)]
        return min(times, default=time.monotonic())

    def on_event(self, event: Exited | Stopped) -> None:
        """Record an event of the guard; those of other generations are ignored."""
        if event.generation != self.generation:
            return
        if isinstance(event, Exited):
            self._exits[event.local_rank] = event
            self._running.discard(event.local_rank)
        else:
            self.stopped = True
            self.unkillable = event.unkillable
            self._running.clear()

    @property
    def exits(self) -> dict[int, RankExit]:
        """Global rank -> how it ended, of those that have failed."""
        return {
            self.assignment.rank_offset + local: RankExit(
                exited.exit_code, _signal_name(exited.signal), pid=exited.pid
            )
            for local, exited in self._exits.items()
            if _is_failure(exited)
        }

    def failures(self) -> tuple[Failure, ...]:
        """Every failure so far, in the order of time; those after our stop order are marked so."""
        failed = [exited for exited in self._exits.values() if _is_failure(exited)]
        failed.sort(key=lambda exited: (not exited.first, exited.monotonic_s))
        return tuple(self._failure(exited) for exited in failed)

    def _failure(self, exited: Exited) -> Failure:
        record = failure_of(exited, self._context.error_files.get(exited.local_rank, ""))
        last_lines = _log_end(self._context.stderrs, exited.local_rank, record.traceback)
        return Failure(
            rank=self.assignment.rank_offset + exited.local_rank,
            local_rank=exited.local_rank,
            time=exited.wall_s,
            exit_code=exited.exit_code,
            signal=_signal_name(exited.signal),
            exception=record.exception or None,
            last_lines=self._with_log_lines(exited, last_lines),
            after_stop=self.stopping and not exited.first,
            frame=raised_at(record.traceback or "\n".join(last_lines)) if record.exception else "",
        )

    def _with_log_lines(self, exited: Exited, last_lines: tuple[str, ...]) -> tuple[str, ...]:
        """Earlier lines of importance, then the last ones: a thousand lines may follow a cause."""
        earlier = self.log_lines(self.assignment.rank_offset + exited.local_rank)
        return (*(line for line in earlier if line not in last_lines), *last_lines)


def _is_failure(exited: Exited) -> bool:
    return exited.exit_code != 0


def _signal_name(number: int | None) -> str | None:
    if number is None:
        return None
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _log_end(stderrs: Mapping[int, str], local_rank: int, traceback: str) -> tuple[str, ...]:
    """The last lines of the rank's log if it has one, else of the traceback that it recorded."""
    path = stderrs.get(local_rank, "")
    text = traceback
    if path and Path(path).is_file():
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - TAIL_BYTES, 0))
            text = file.read().decode(errors="replace") or traceback
    return tuple(deque((line for line in text.splitlines() if line.strip()), LAST_LINES))
