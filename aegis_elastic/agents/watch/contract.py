"""The contract of watchers: what observes the ranks of one node while they train, beside the agent's loop.

A watcher owns its thread and changes nothing of the training: it reads /proc, log files, and files whose path
the ranks got in their environment. Its facts are sent in the agent's reports, under its name. A watcher that
raises is logged, closed and not called again; training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from aegis_elastic.core.protocol.messages import WATCHED_BYTES_MAX
from aegis_elastic.core.rank_assignment import RankAssignment

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WatchedRanks:
    """The ranks of this node in one incarnation, all by global rank.

    `pids` are the processes that the guard started; `logs` the files that a rank's stdout and stderr go to
    (none where it writes to the launcher's own streams); `workdir` is where they were started; `world_size`
    counts the ranks of all nodes.
    """

    incarnation: int
    assignment: RankAssignment
    pids: Mapping[int, int]
    logs: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    workdir: Path = field(default_factory=Path.cwd)
    world_size: int = 0


class Watcher(Protocol):
    """One watcher. All methods are called from the agent's loop and must not block."""

    @property
    def name(self) -> str:
        """The key of its facts in `ReportData.watched`."""

    def environment(self) -> Mapping[str, str]:
        """Variables for the environment of every rank of this node; called before each start.

        No secrets, and the same at every start: a warm spare has been given its environment long before.
        """

    def on_started(self, ranks: WatchedRanks) -> None:
        """These ranks have been started."""

    def on_ended(self) -> None:
        """The ranks have ended, one has failed, or they are being stopped: what they do now means nothing."""

    def facts(self) -> Mapping[str, Any] | None:
        """What goes into the next report, at most WATCHED_BYTES_MAX when encoded; None: nothing.

        Called for each new report. The bus loses messages and repeats them, so facts describe a state, not an
        event: a fact is repeated until it is superseded, and carries a number or a time of its own.
        """

    def close(self) -> None:
        """End its thread."""


@runtime_checkable
class LogListener(Protocol):
    """A watcher that reads the ranks' logs."""

    def log_lines(self, rank: int) -> Sequence[str]:
        """Lines of a (global) rank that may say why it failed, and need not be its last ones."""


@runtime_checkable
class ClueSource(Protocol):
    """A watcher that can add to a failure what the failure itself doesn't say."""

    def clues(self) -> Sequence[str]:
        """Clues for the Error that is about to be sent, as `core.diagnosis.recovery` names them. Called after
        `on_ended`.
        """


# Gets `wake`, which may be called from any thread: its facts have changed and are to be reported now. Between
# two calls the last report is repeated as it is.
WatcherFactory = Callable[[Callable[[], None]], Watcher]


class Watchers:
    """All watchers of an agent. One that raises is closed and dropped; the others go on."""

    def __init__(self, factories: Iterable[WatcherFactory], wake: Callable[[], None]) -> None:
        self._all: list[Watcher] = []
        self._wake = wake
        self._wake_pending = False
        for make in factories:
            try:
                self._all.append(make(self._wake_once))
            except Exception:  # a watcher's fault is never the training's
                logger.exception("cannot start a watcher: training goes on without it")

    def environment(self) -> dict[str, str]:
        """The variables of all watchers, for the ranks' environment."""
        merged: dict[str, str] = {}
        self._each(lambda watcher: merged.update(watcher.environment()))
        return merged

    def on_started(self, ranks: WatchedRanks) -> None:
        """Call `on_started` of each."""
        self._each(lambda watcher: watcher.on_started(ranks))

    def on_ended(self) -> None:
        """Call `on_ended` of each."""
        self._each(lambda watcher: watcher.on_ended())

    def facts(self) -> dict[str, msgspec.Raw]:
        """Every watcher's facts under its name, for a report."""
        collected: dict[str, msgspec.Raw] = {}
        self._wake_pending = False

        def collect(watcher: Watcher) -> None:
            facts = watcher.facts()
            if facts is None:
                return
            encoded = msgspec.json.encode(facts)
            if len(encoded) > WATCHED_BYTES_MAX:
                raise ValueError(f"its facts have {len(encoded)} bytes, at most {WATCHED_BYTES_MAX}")
            collected[watcher.name] = msgspec.Raw(encoded)

        self._each(collect)
        return collected

    def log_lines(self, rank: int) -> tuple[str, ...]:
        """Lines of this rank's log that may say why it failed, however long before its end."""
        lines: list[str] = []

        def collect(watcher: Watcher) -> None:
            if isinstance(watcher, LogListener):
                lines.extend(watcher.log_lines(rank))

        self._each(collect)
        return tuple(lines)

    def close(self) -> None:
        """Close each."""
        self._each(lambda watcher: watcher.close())
        self._all.clear()

    def clues(self) -> tuple[str, ...]:
        """The clues of all watchers for a failure, as `core.diagnosis.recovery` names them."""
        clues: list[str] = []
        self._each(lambda watcher: clues.extend(watcher.clues()) if isinstance(watcher, ClueSource) else None)
        return tuple(clues)

    def _wake_once(self) -> None:
        if not self._wake_pending:  # one report carries the facts of all
            self._wake_pending = True
            self._wake()

    def _each(self, call: Callable[[Watcher], None]) -> None:
        for watcher in list(self._all):
            try:
                call(watcher)
            except Exception:  # as above
                logger.exception("the watcher %s failed: training goes on without it", watcher.name)
                self._all.remove(watcher)
                _close(watcher)


def _close(watcher: Watcher) -> None:
    try:
        watcher.close()
    except Exception:  # its first failure has been logged
        logger.exception("the watcher %s can't be closed", watcher.name)
