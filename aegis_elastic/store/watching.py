"""Watching keys over a server's restarts: the part that all stores share.

A store feeds a `Watch` with whole snapshots and single changes; the watch reports only what differs from what
it has reported. So a store may take a new snapshot whenever it may have missed changes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any

from aegis_elastic.store.values import Change, Entry, StoreUnavailable

CANCEL_AGAIN_S = 0.5


class Watch:
    """An async context manager and iterator of `Change`.

    On entering it holds `snapshot`, all entries below the prefix at that moment; the iteration begins with
    these as changes, then waits for more, through every restart of the server, until the store is
    closed. State is level-triggered: of several changes of one key that the listener has not fetched yet, it
    gets the newest only, so a slow listener costs one slot a key. A refresh of a lease may or may not show as
    a change.
    """

    def __init__(self, feed: Callable[["Feed"], Awaitable[None]], timeout_s: float) -> None:
        """`feed` runs from enter to exit. StoreUnavailable on enter if it gives no snapshot within
        `timeout_s`.
        """
        self._feed = feed
        self._timeout_s = timeout_s
        self._state = Feed()
        self._task: asyncio.Future[None] | None = None
        self.snapshot: tuple[Entry, ...] = ()

    async def __aenter__(self) -> "Watch":
        assert self._task is None, "a watch is entered once"
        self._task = asyncio.ensure_future(self._feed(self._state))
        ready = asyncio.ensure_future(self._state.ready.wait())
        try:
            either: set[asyncio.Future[Any]] = {self._task, ready}
            await asyncio.wait(either, timeout=self._timeout_s, return_when="FIRST_COMPLETED")
            if self._task.done():
                self._task.result()
            if not self._state.ready.is_set():
                raise StoreUnavailable(f"cannot watch: no answer in {self._timeout_s} s")
        except BaseException:
            await self.stop()
            raise
        finally:
            ready.cancel()
        self.snapshot = self._state.first
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End the watch; an iteration that waits ends too."""
        while self._task is not None and not self._task.done():
            # Repeatedly: before Python 3.12 `wait_for` swallows a cancellation that comes with its result.
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CANCEL_AGAIN_S)
        self._state.changes_pending.set()

    def __aiter__(self) -> "Watch":
        return self

    async def __anext__(self) -> Change:
        while True:
            if (change := self._state.take()) is not None:
                return change
            if self._task is None or self._task.done():
                if self._task is not None and not self._task.cancelled():
                    self._task.result()  # raises what has ended it, if anything has
                raise StopAsyncIteration
            waiting = asyncio.ensure_future(self._state.changes_pending.wait())
            either: set[asyncio.Future[Any]] = {waiting, self._task}
            try:
                await asyncio.wait(either, return_when="FIRST_COMPLETED")
            finally:
                waiting.cancel()


class Feed:
    """Takes what a store sees; keeps changes that the listener has not fetched."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.changes_pending = asyncio.Event()
        self.first: tuple[Entry, ...] = ()
        self._known: dict[str, int] = {}
        self._pending: dict[str, Change] = {}

    def snapshot(self, entries: Iterable[Entry]) -> None:
        """Take the whole state; what differs from what was reported becomes a change."""
        entries = tuple(entries)
        for key in self._known.keys() - {entry.key for entry in entries}:
            self.deleted(key)
        for entry in entries:
            self.changed(entry)
        if not self.ready.is_set():
            self.first = entries
            self.ready.set()

    def changed(self, entry: Entry) -> None:
        """Take a new value; an old one is ignored."""
        if entry.revision > self._known.get(entry.key, 0):
            self._known[entry.key] = entry.revision
            self._add_pending(Change(entry.key, entry))

    def deleted(self, key: str) -> None:
        """Take the end of a key; ignored if it was not there."""
        if self._known.pop(key, None) is not None:
            self._add_pending(Change(key, None))

    def take(self) -> Change | None:
        """Remove and return the change that waits longest."""
        for key in self._pending:
            change = self._pending.pop(key)
            if not self._pending:
                self.changes_pending.clear()
            return change
        self.changes_pending.clear()
        return None

    def _add_pending(self, change: Change) -> None:
        self._pending.pop(change.key, None)
        self._pending[change.key] = change
        self.changes_pending.set()
