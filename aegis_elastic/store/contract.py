"""What every store guarantees.

A store holds small values under dotted keys. Every write gives the key a new revision; revisions only grow,
over the whole store. Writes are conditional: create if absent, update if unchanged (compare-and-swap). Only
that prevents two masters from both acting. `tests/store/test_contract.py` is the executable form of this
contract.
"""

from typing import Protocol

from aegis_elastic.store.leases import Lease
from aegis_elastic.store.values import (
    BadKey,
    Change,
    Entry,
    KeyExists,
    LeaseLost,
    RevisionConflict,
    StoreError,
    StoreUnavailable,
)
from aegis_elastic.store.watching import Watch

__all__ = [
    "BadKey",
    "Change",
    "Entry",
    "KeyExists",
    "Lease",
    "LeaseLost",
    "RevisionConflict",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "Watch",
]


class Store(Protocol):
    """The shared state of a job or the cluster. Use from one event loop; every method may raise
    StoreUnavailable.
    """

    async def get(self, key: str) -> Entry | None:
        """Return the newest entry, None if there is none."""

    async def create(self, key: str, value: bytes) -> int:
        """Create the key and return its revision; KeyExists if there is one. Of concurrent calls one wins."""

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Replace the value that has `revision`, return the new one; RevisionConflict if that is not the
        newest.
        """

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Delete the key, only if it has `revision` when given (RevisionConflict). Does nothing if
        it is gone already.
        """

    async def list(self, prefix: str) -> tuple[Entry, ...]:
        """Return all entries below `prefix` in the order of their keys: "a" has "a.b" but neither "a" nor
        "ab".
        """

    async def lease(self, key: str, value: bytes, ttl_s: float) -> Lease:
        """Create the key for as long as it is refreshed; KeyExists if it is there. `ttl_s`: 1 or more."""

    def watch(self, prefix: str) -> Watch:
        """Follow all keys below `prefix` ("" for all): see `Watch`."""

    async def close(self) -> None:
        """End watches and refreshes; entries stay. Leases are left to expire."""
