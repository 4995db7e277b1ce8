"""What all stores share: being open or closed, and ending watches and leases on close."""

import weakref
from abc import ABC, abstractmethod
from typing import TypeVar

from aegis_elastic.store.leases import Lease
from aegis_elastic.store.values import StoreUnavailable, check_prefix
from aegis_elastic.store.watching import Feed, Watch

L = TypeVar("L", bound=Lease)


class StoreBase(ABC):
    """The watches and leases of one store, and `close`. Subclasses add the keys."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: how long an operation waits for its answer."""
        self._timeout_s = timeout_s
        # Weak references: leases and watches in use are referenced elsewhere, and ended ones must not pile up
        # in a master that runs for months.
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._closed = False

    def watch(self, prefix: str) -> Watch:
        """See `Store.watch`."""
        self._check_open()
        check_prefix(prefix)

        async def feed(sink: Feed) -> None:
            await self._follow(prefix, sink)

        watch = Watch(feed, self._timeout_s)
        self._watches.add(watch)
        return watch

    async def close(self) -> None:
        """See `Store.close`."""
        self._closed = True
        for lease in tuple(self._leases):
            lease._end()
        for watch in tuple(self._watches):
            await watch.stop()

    @abstractmethod
    async def _follow(self, prefix: str, sink: Feed) -> None:
        """Feed a watch until cancelled: a snapshot first, then what changes."""

    def _register(self, lease: L) -> L:
        """Register a lease, so that it ends with the store."""
        self._leases.add(lease)
        return lease

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("cannot use the store: it is closed")
