"""A store in a directory that several hosts may share: for records that outlive jobs, without a server.

`directory.py` has the format, and the guarantees on a network file system.
"""

import asyncio
import concurrent.futures
import logging
import math
import queue
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from aegis_elastic.store.base import StoreBase
from aegis_elastic.store.directory import Directory
from aegis_elastic.store.leases import Lease
from aegis_elastic.store.values import (
    Entry,
    StoreUnavailable,
    check_key,
    check_prefix,
    check_ttl,
    check_value,
)
from aegis_elastic.store.watching import Feed

logger = logging.getLogger(__name__)

T = TypeVar("T")

WATCH_S = 0.5


class FileStore(StoreBase):
    """`Store` in one directory. Make it with `open`, end it with `close`.

    All file operations run in one thread of the store, so that a file server that doesn't answer makes an
    operation time out (StoreUnavailable) and never blocks the event loop.
    """

    def __init__(self, directory: Path, timeout_s: float) -> None:
        """`prepare` it before it is used."""
        super().__init__(timeout_s)
        self._files = Directory(directory)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        # A daemon thread: if it hangs on a dead file server, the process can still exit.
        self._thread = threading.Thread(target=self._work, name=f"store {directory}", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, directory: Path, *, timeout_s: float = 5.0) -> "FileStore":
        """Open the directory, made (0700) if it isn't there. StoreUnavailable if it can't be used, StoreError
        if everybody may write to it. In a directory that its group may write to, so are the entries.
        """
        store = cls(directory, timeout_s)
        try:
            await store.prepare()
        except BaseException:
            await store.close()
            raise
        return store

    async def prepare(self) -> None:
        """What `open` does. To try again, use the same store: its thread may still hang on the file server,
        and another one would hang, too.
        """
        await self._run(self._files.prepare)

    async def get(self, key: str) -> Entry | None:
        """See `Store.get`."""
        check_key(key)
        stored = await self._run(lambda: self._files.read(key))
        return stored.entry if stored else None

    async def create(self, key: str, value: bytes) -> int:
        """See `Store.create`."""
        check_value(key, value)
        return await self._run(lambda: self._files.create(key, value, "", 0.0))

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """See `Store.update`."""
        check_value(key, value)
        return await self._run(lambda: self._files.update(key, value, revision))

    async def delete(self, key: str, revision: int | None = None) -> None:
        """See `Store.delete`."""
        check_key(key)
        await self._run(lambda: self._files.delete(key, revision))

    async def list(self, prefix: str) -> tuple[Entry, ...]:
        """See `Store.list`."""
        check_prefix(prefix)
        found, _ = await self._run(lambda: self._files.list(prefix))
        return tuple(stored.entry for stored in found)

    async def lease(self, key: str, value: bytes, ttl_s: float) -> Lease:
        """See `Store.lease`."""
        check_value(key, value)
        check_ttl(key, ttl_s)
        taken_at_s = asyncio.get_running_loop().time()
        holder = secrets.token_hex(16)
        token = await self._run(lambda: self._files.create(key, value, holder, ttl_s))
        return self._register(_FileLease(self, holder, key, token, ttl_s, taken_at_s))

    async def close(self) -> None:
        """See `Store.close`."""
        await super().close()
        self._jobs.put(None)

    async def _follow(self, prefix: str, sink: Feed) -> None:
        loop = asyncio.get_running_loop()
        last_revision, list_again_s = -1, math.inf
        while True:
            try:
                # The revision first: a write during the listing causes another one.
                revision = await self._run(self._files.revision)
                if revision != last_revision or loop.time() >= list_again_s:
                    found, left_s = await self._run(lambda: self._files.list(prefix))
                    sink.snapshot(stored.entry for stored in found)
                    # The expiry of a lease changes no revision.
                    last_revision, list_again_s = revision, loop.time() + left_s
            except StoreUnavailable as error:
                logger.debug("watch of %s: %s", prefix, error)
            await asyncio.sleep(WATCH_S)

    async def _run(self, work: Callable[[], T]) -> T:
        """Run it in the store's thread. After a timeout, work that hasn't begun is not done."""
        self._check_open()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._jobs.put((work, future))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
        except asyncio.TimeoutError:
            raise StoreUnavailable(
                f"cannot use the store in {self._files.path}: no answer in {self._timeout_s} s (is its "
                "lock held by a stopped process, or its file server away?)"
            ) from None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except OSError as error:
                why = f"cannot use the store in {self._files.path}: {error.strerror or error}"
                future.set_exception(StoreUnavailable(why))
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                future.set_exception(error)


class _FileLease(Lease):
    def __init__(
        self, store: FileStore, holder: str, key: str, token: int, ttl_s: float, taken_at_s: float
    ) -> None:
        super().__init__(key, token, ttl_s, taken_at_s)
        self._store = store
        self._holder = holder

    async def _refresh(self) -> None:
        await self._store._run(lambda: self._store._files.refresh(self.key, self._holder, self.ttl_s))

    async def _release(self) -> None:
        await self._store._run(lambda: self._store._files.delete(self.key, None, self._holder))
