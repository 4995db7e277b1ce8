"""What looks at the ranks of one node while they train, beside the agent's loop.

A watcher owns its thread and touches nothing of the training: it reads /proc, log files, files that the ranks
were told of by their environment. What it knows goes with the agent's reports, under its name. A watcher that
fails is said in the log and looked after no more; training doesn't notice.
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
class Watched:
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
    """One of them. All methods are called from the agent's loop and must not wait for anything."""

    @property
    def name(self) -> str:
        """What its facts are called in `ReportData.watched`."""

    def environment(self) -> Mapping[str, str]:
        """What it adds to the environment of every rank of this node, asked before each start.

        No secrets, and the same at every start: a warm spare has been given its environment long before.
        """

    def started(self, ranks: Watched) -> None:
        """These ranks run now."""

    def ended(self) -> None:
        """They have ended, one has failed, or they are being stopped: what they do now says nothing more."""

    def news(self) -> Mapping[str, Any] | None:
        """What is to be in the next report, small; None: nothing.

        Asked for each new report. The bus loses messages and repeats them, so this says what *is*: a fact
        stays in it until it is superseded, and carries what tells it from the next (a number, a time).
        """

    def close(self) -> None:
        """End its thread."""


@runtime_checkable
class LogListener(Protocol):
    """A watcher that reads along what ranks write."""

    def words(self, rank: int) -> Sequence[str]:
        """Lines of a (global) rank that may tell why it has failed, and may not be its last ones."""


@runtime_checkable
class ClueSource(Protocol):
    """A watcher that knows something of a failure which the failure itself doesn't say."""

    def clues(self) -> Sequence[str]:
        """Clues for the Error that is about to be told, in the words of `core.diagnosis.recovery`. After
        `ended`.
        """


# Gets `wake`, which may be called from any thread: its news have changed and are to be reported now. Between
# two calls the last report is repeated as it is.
MakeWatcher = Callable[[Callable[[], None]], Watcher]


class Watchers:
    """All watchers of an agent, each behind a wall."""

    def __init__(self, makers: Iterable[MakeWatcher], wake: Callable[[], None]) -> None:
        self._all: list[Watcher] = []
        self._wake = wake
        self._woken = False
        for make in makers:
            try:
                self._all.append(make(self._wake_once))
            except Exception:  # a watcher's fault is never the training's
                logger.exception("cannot start a watcher: training goes on without it")

    def environment(self) -> dict[str, str]:
        """What the ranks are to have beside their own environment."""
        merged: dict[str, str] = {}
        self._each(lambda watcher: merged.update(watcher.environment()))
        return merged

    def started(self, ranks: Watched) -> None:
        """Tell all of them."""
        self._each(lambda watcher: watcher.started(ranks))

    def ended(self) -> None:
        """Tell all of them."""
        self._each(lambda watcher: watcher.ended())

    def news(self) -> dict[str, msgspec.Raw]:
        """Every watcher's facts under its name, for a report."""
        told: dict[str, msgspec.Raw] = {}
        self._woken = False

        def ask(watcher: Watcher) -> None:
            news = watcher.news()
            if news is None:
                return
            encoded = msgspec.json.encode(news)
            if len(encoded) > WATCHED_BYTES_MAX:
                raise ValueError(f"its news have {len(encoded)} bytes, at most {WATCHED_BYTES_MAX}")
            told[watcher.name] = msgspec.Raw(encoded)

        self._each(ask)
        return told

    def words(self, rank: int) -> tuple[str, ...]:
        """What this rank has said of importance, however long before its end."""
        said: list[str] = []
        self._each(
            lambda watcher: said.extend(watcher.words(rank)) if isinstance(watcher, LogListener) else None
        )
        return tuple(said)

    def close(self) -> None:
        """End all of them."""
        self._each(lambda watcher: watcher.close())
        self._all.clear()

    def clues(self) -> tuple[str, ...]:
        """What they know of a failure that is being told, in the words of `core.diagnosis.recovery`."""
        known: list[str] = []
        self._each(lambda watcher: known.extend(watcher.clues()) if isinstance(watcher, ClueSource) else None)
        return tuple(known)

    def _wake_once(self) -> None:
        if not self._woken:  # one report tells the news of all
            self._woken = True
            self._wake()

    def _each(self, act: Callable[[Watcher], None]) -> None:
        for watcher in list(self._all):
            try:
                act(watcher)
            except Exception:  # as above
                logger.exception("the watcher %s failed: training goes on without it", watcher.name)
                self._all.remove(watcher)
                _end(watcher)


def _end(watcher: Watcher) -> None:
    try:
        watcher.close()
    except Exception:  # it has failed before, and that was said
        logger.exception("the watcher %s can't be closed", watcher.name)
