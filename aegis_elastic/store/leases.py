"""Leases: the part that all stores share, which is mostly about knowing in time that one is lost."""

import asyncio
from abc import ABC, abstractmethod

from aegis_elastic.store.values import LeaseLost, StoreUnavailable


class Lease(ABC):
    """A key that is ours as long as we keep it, and vanishes by itself when we don't.

    `token` is the revision at which the key was created: it grows from holder to holder, so a writer that
    shows it can be told from its successor (fencing). `lost` is set when the lease is known or must be
    assumed to be somebody else's: when a refresh finds it gone, or when none has succeeded for `ttl_s`, by
    our own clock, counted from before the last good one was sent. It is never set late: the store lets go no
    earlier than that. A lease refreshes itself every third of its time.
    """

    def __init__(self, key: str, token: int, ttl_s: float, taken_at_s: float) -> None:
        """`taken_at_s` is the loop's time before the lease was asked for."""
        self.key = key
        self.token = token
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        self._released = False
        self._refreshing = asyncio.Lock()
        self._deadline = asyncio.get_running_loop().call_at(taken_at_s + ttl_s, self.lost.set)
        self._record_store = asyncio.create_task(self._keep(), name=f"lease {key}")

    @property
    def held(self) -> bool:
        """Whether the lease is ours at this moment."""
        return not self._released and not self.lost.is_set()

    async def refresh(self) -> None:
        """Prolong it now. LeaseLost if it is not ours any more; StoreUnavailable: it may still be."""
        async with self._refreshing:
            if not self.held:
                raise LeaseLost(f"cannot refresh the lease on {self.key}: it is not ours any more")
            loop = asyncio.get_running_loop()
            asked_at_s = loop.time()
            try:
                await self._refresh()
            except LeaseLost:
                self._lose()
                raise
            if not self.lost.is_set():  # an answer that came too late revives nothing
                self._deadline.cancel()
                self._deadline = loop.call_at(asked_at_s + self.ttl_s, self.lost.set)

    async def release(self) -> None:
        """Give the key up, if it is still ours; StoreUnavailable: it vanishes when its time is over."""
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
        self._record_store.cancel()

    def _lose(self) -> None:
        self._deadline.cancel()
        self.lost.set()

    async def _keep(self) -> None:
        pause_s = self.ttl_s / 3
        while not self.lost.is_set():
            try:
                await asyncio.wait_for(self.lost.wait(), pause_s)
            except asyncio.TimeoutError:
                pause_s = self.ttl_s / 3
                try:
                    await self.refresh()
                except StoreUnavailable:
                    pause_s = self.ttl_s / 10  # while the deadline runs on
                except LeaseLost:
                    return

    @abstractmethod
    async def _refresh(self) -> None:
        """Prolong the key in the store, or raise LeaseLost."""

    @abstractmethod
    async def _release(self) -> None:
        """Delete the key if it is still this lease's."""
