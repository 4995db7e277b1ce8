"""torchelastic's own agent in the place of our guard: it holds the ranks, we tell it when to come back.

Our agent runs in a thread of the handler's; torch's runs in the main thread and looks in at the rendezvous:
`num_nodes_waiting` (shall I restart?), `next_rendezvous` (my ranks are gone), `shutdown`. `Held` turns what
it does into the events of a guard, and a stop order into an answer to its question.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Sequence
from typing import cast

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from aegis_elastic.agents.guard.client import Event, Exited, Stopped
from aegis_elastic.agents.mailbox.mailbox import Mailbox
from aegis_elastic.core.rank_assignment import RankAssignment


class TorchelasticGuard:
    """The ranks of one node, held by torchelastic. The methods of a guard are for our agent's thread."""

    def __init__(self) -> None:
        self._events = Mailbox()
        self._lock = threading.Lock()
        self._generation = 0
        self._held = False
        self._stop_wanted = False

    # ------------------------------------------------------------ a guard, for our agent

    def fileno(self) -> int:
        """Readable when there may be events."""
        return self._events.fileno()

    def events(self) -> list[Event]:
        """What has happened since the last call; never waits."""
        return cast("list[Event]", self._events.drain())

    def stop(
        self,
        grace_s: float,
        signum: int = signal.SIGTERM,
        wait_if_ignored: bool = True,
        wait_if_blocked: bool = True,
    ) -> None:
        """Ask torchelastic to end its ranks; `Stopped` follows. How it ends them is its own affair."""
        with self._lock:
            if self._held:
                self._stop_wanted = True
            else:
                self._events.put(Stopped(self._generation, (), ()))

    def signal(self, signum: int) -> None:
        """Nothing: under the stock launcher signals are torchelastic's."""

    def close(self) -> None:
        """Nothing: whatever runs is torchelastic's to end, and it may still say so."""

    # ------------------------------------------------------------ torchelastic

    @property
    def stop_wanted(self) -> bool:
        """Whether torchelastic is to end its ranks and come back."""
        return self._stop_wanted

    def hold(self, generation: int) -> None:
        """Torchelastic is given the ranks of this generation to start."""
        with self._lock:
            self._generation, self._held, self._stop_wanted = generation, True, False

    def release(self, exits: Sequence[Exited]) -> None:
        """Torchelastic has come back: nothing of its ranks runs. `exits`: those that ended by themselves.

        Without any, and without having been asked to stop, it is taken for a failure that we can't name.
        """
        with self._lock:
            if not self._held:
                return
            self._held = False
            told = list(exits)
            if not told and not self._stop_wanted:
                told = [_exit(self._generation, 0, 0, 1, time.time(), first=True)]
            for exited in told:
                self._events.put(exited._replace(generation=self._generation))
            if self._stop_wanted:
                self._events.put(Stopped(self._generation, (), ()))


class TorchelasticContext:
    """Stands for the processes where our agent asks about them: `agents.ranks.rank_group.Context`."""

    def __init__(self, assignment: RankAssignment) -> None:
        self._seat = assignment
        self.error_files: dict[int, str] = {}
        self.stdouts: dict[int, str] = {}
        self.stderrs: dict[int, str] = {}

    def pids(self) -> dict[int, int]:
        """Local ranks; their pids are not known to us."""
        return dict.fromkeys(range(self._seat.nproc), 0)

    def note(self, failures: Sequence[ProcessFailure]) -> None:
        """Remember where the failed ranks wrote what happened to them."""
        self.error_files.update({failure.local_rank: failure.error_file for failure in failures})


def failed(failures: Sequence[ProcessFailure]) -> list[Exited]:
    """These ends, the first one first."""
    in_order = sorted(failures, key=lambda failure: failure.timestamp or math.inf)
    return [
        _exit(0, failure.local_rank, failure.pid, failure.exitcode, failure.timestamp, first=number == 0)
        for number, failure in enumerate(in_order)
    ]


def finished(nproc: int) -> list[Exited]:
    """All ranks ended well."""
    return [_exit(0, local_rank, 0, 0, time.time(), first=False) for local_rank in range(nproc)]


def _exit(generation: int, local_rank: int, pid: int, code: int, wall_s: float, *, first: bool) -> Exited:
    killed = code < 0
    exit_code, signum = (None, -code) if killed else (code, None)
    return Exited(generation, local_rank, pid, exit_code, signum, time.monotonic(), wall_s, first)
