"""A store in this process's memory, for tests and simulations, and as the simplest form of the contract."""

import asyncio
from collections.abc import Callable

from aegis_elastic.store.base import StoreBase
from aegis_elastic.store.leases import Lease
from aegis_elastic.store.values import (
    Entry,
    KeyExists,
    LeaseLost,
    RevisionConflict,
    below,
    check_key,
    check_prefix,
    check_ttl,
    check_value,
)
from aegis_elastic.store.watching import Feed

WATCH_TIMEOUT_S = 5.0


class MemoryBackend:
    """The state that several `MemoryStore`s share, as clients share a server."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.revision = 0
        self.feeds: dict[Feed, Callable[[str], bool]] = {}
        self.expiries: dict[str, asyncio.TimerHandle] = {}

    def put(self, key: str, value: bytes) -> int:
        """Set the key; returns the new revision."""
        self.revision += 1
        entry = Entry(key, value, self.revision)
        self.entries[key] = entry
        for feed, is_below in self.feeds.items():
            if is_below(key):
                feed.changed(entry)
        return self.revision

    def remove(self, key: str) -> None:
        """Delete the key if it is there."""
        expiry = self.expiries.pop(key, None)
        if expiry is not None:
            expiry.cancel()
        if self.entries.pop(key, None) is None:
            return
        self.revision += 1
        for feed, is_below in self.feeds.items():
            if is_below(key):
                feed.deleted(key)

    def below(self, prefix: str) -> tuple[Entry, ...]:
        """All entries below the prefix, in order."""
        is_below = below(prefix)
        return tuple(entry for key, entry in sorted(self.entries.items()) if is_below(key))


class MemoryStore(StoreBase):
    """`Store` over a `MemoryBackend` (a private one unless given)."""

    def __init__(self, backend: MemoryBackend | None = None) -> None:
        super().__init__(WATCH_TIMEOUT_S)
        self._backend = backend or MemoryBackend()

    async def get(self, key: str) -> Entry | None:
        """See `Store.get`."""
        self._check_open()
        check_key(key)
        return self._backend.entries.get(key)

    async def create(self, key: str, value: bytes) -> int:
        """See `Store.create`."""
        self._check_open()
        check_value(key, value)
        if key in self._backend.entries:
            raise KeyExists(f"cannot create {key}: it is there")
        return self._backend.put(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """See `Store.update`."""
        self._check_open()
        check_value(key, value)
        self._check_revision("update", key, revision)
        return self._backend.put(key, value)

    async def delete(self, key: str, revision: int | None = None) -> None:
        """See `Store.delete`."""
        self._check_open()
        check_key(key)
        if revision is not None:
            if key not in self._backend.entries:
                return
            self._check_revision("delete", key, revision)
        self._backend.remove(key)

    async def list(self, prefix: str) -> tuple[Entry, ...]:
        """See `Store.list`."""
        self._check_open()
        check_prefix(prefix)
        return self._backend.below(prefix)

    async def lease(self, key: str, value: bytes, ttl_s: float) -> Lease:
        """See `Store.lease`."""
        check_ttl(key, ttl_s)
        taken_at_s = asyncio.get_running_loop().time()
        token = await self.create(key, value)
        return self._register(_MemoryLease(self._backend, key, token, ttl_s, taken_at_s))

    async def _follow(self, prefix: str, sink: Feed) -> None:
        self._backend.feeds[sink] = below(prefix)
        try:
            sink.snapshot(self._backend.below(prefix))
            await asyncio.Event().wait()
        finally:
            del self._backend.feeds[sink]

    def _check_revision(self, operation: str, key: str, revision: int) -> None:
        entry = self._backend.entries.get(key)
        found = entry.revision if entry is not None else None
        if found != revision:
            raise RevisionConflict(f"cannot {operation} {key} at revision {revision}: it is at {found}")


class _MemoryLease(Lease):
    def __init__(self, backend: MemoryBackend, key: str, token: int, ttl_s: float, taken_at_s: float) -> None:
        super().__init__(key, token, ttl_s, taken_at_s)
        self._backend = backend
        self._schedule_expiry()

    def _schedule_expiry(self) -> None:
        later = asyncio.get_running_loop().call_later(self.ttl_s, self._backend.remove, self.key)
        self._backend.expiries[self.key] = later

    async def _refresh(self) -> None:
        if not self._is_ours():
            raise LeaseLost(f"cannot refresh the lease on {self.key}: it is gone or another's")
        self._backend.expiries[self.key].cancel()
        self._schedule_expiry()

    async def _release(self) -> None:
        if self._is_ours():
            self._backend.remove(self.key)

    def _is_ours(self) -> bool:
        entry = self._backend.entries.get(self.key)
        return entry is not None and entry.revision == self.token
