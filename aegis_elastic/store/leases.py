"""Leases: the part that all stores share, above all noticing in time that one is lost."""

import asyncio
from abc import ABC, abstractmethod

from aegis_elastic.store.values import LeaseLost, StoreUnavailable


class Lease(ABC):
    """A key that exists as long as we refresh it, and expires otherwise.

    `token` is the revision at which the key was created: it grows from holder to holder, so it tells a writer
    from its successor (fencing). `lost` is set when the lease is lost or must be assumed to be: when a
    refresh finds it gone, or when none has succeeded for `ttl_s`, by our own clock, counted from before the
    last successful one was sent. It is never set late: the store doesn't expire the key earlier. A lease
    refreshes itself every third of `ttl_s`.
    """

    def __init__(self, key: str, token: int, ttl_s: float, taken_at_s: float) -> None:
        """`taken_at_s`: the loop's time before the lease was requested."""
        self.key = key
        self.token = token
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        self._released = False
        self._refreshing = asyncio.Lock()
        self._deadline = asyncio.get_running_loop().call_at(taken_at_s + ttl_s, self.lost.set)
        self._refresh_task = asyncio.create_task(self._refresh_regularly(), name=f"lease {key}")

    @property
    def held(self) -> bool:
        """Whether the lease is ours at this moment."""
        return not self._released and not self.lost.is_set()

    async def refresh(self) -> None:
        """Extend it now. LeaseLost if it is not ours any more; StoreUnavailable: it may still be."""
        async with self._refreshing:
            if not self.held:
                raise LeaseLost(f"cannot refresh the lease on {self.key}: it is not ours any more")
            loop = asyncio.get_running_loop()
            sent_at_s = loop.time()
            try:
                await self._refresh()
            except LeaseLost:
                self._lose()
                raise
            if not self.lost.is_set():  # an answer that came too late doesn't count
                self._deadline.cancel()
                self._deadline = loop.call_at(sent_at_s + self.ttl_s, self.lost.set)

    async def release(self) -> None:
        """Delete the key, if it is still ours. StoreUnavailable: it will expire."""
        if self._released:
            return
        self._end()
        async with self._refreshing:
            if not self.lost.is_set():
                await self._release()

    def _end(self) -> None:
        """Stop refreshing; the key is left to expire. Stores call it when they close."""
        self._released = True
        self._deadline.cancel()
        self._refresh_task.cancel()

    def _lose(self) -> None:
        self._deadline.cancel()
        self.lost.set()

    async def _refresh_regularly(self) -> None:
        pause_s = self.ttl_s / 3
        while not self.lost.is_set():
            try:
                await asyncio.wait_for(self.lost.wait(), pause_s)
            except asyncio.TimeoutError:
                pause_s = self.ttl_s / 3
                try:
                    await self.refresh()
                except StoreUnavailable:
                    pause_s = self.ttl_s / 10  # the deadline stays
                except LeaseLost:
                    return

    @abstractmethod
    async def _refresh(self) -> None:
        """Extend the key in the store, or raise LeaseLost."""

    @abstractmethod
    async def _release(self) -> None:
        """Delete the key if it is still this lease's."""
