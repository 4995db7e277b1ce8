"""A store in a NATS JetStream key-value bucket, over the bus connection.

The client library's own KeyValue doesn't fit, as experiments have shown: its `update` drops a key's time
to live; its `create` fails on a key that has expired until the marker of the expiry is gone; its `get` takes
that marker for an empty value; its watches stay silent for many seconds after a server's restart. So writes
are plain publishes with an expected revision here, and a watch is opened again on every new connection.
"""

import asyncio
import hashlib
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import RawStreamMsg
from nats.js.kv import KV_DEL, KV_PURGE, KeyValue

from aegis_elastic.bus.errors import BusError
from aegis_elastic.store.base import StoreBase
from aegis_elastic.store.leases import Lease
from aegis_elastic.store.values import (
    Entry,
    KeyExists,
    LeaseLost,
    RevisionConflict,
    StoreError,
    StoreUnavailable,
    check_key,
    check_prefix,
    check_ttl,
    check_value,
)
from aegis_elastic.store.watching import Feed

logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.02
RETRY_MAX_S = 0.5
# How long an expired key leaves a marker: long enough for watches to see it, short enough not to pile up.
MARKER_TTL_S = 60.0
# In each round somebody else has changed the key between our read and our write.
ROUNDS_MAX = 16

BUCKET_CHARS_MAX = 200

_BUCKET_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-")
_HOLDER = "Aegis-Lease"
_EXPECT = "Nats-Expected-Last-Subject-Sequence"
_OPERATION = "KV-Operation"
_MARKER = "Nats-Marker-Reason"
_WRONG_SEQUENCE = (10071, 10164)
_NO_MESSAGE = 10037
_UNAVAILABLE = 503

T = TypeVar("T")


class Bus(Protocol):
    """What the store needs of a bus connection."""

    async def call(self, operation: Callable[[Client], Awaitable[T]], timeout_s: float) -> T:
        """Return what `do` does with nats-py's client."""

    def on_new_client(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever the client is a new one; returns how to stop that."""


def bucket_name(*parts: str) -> str:
    """Return a bucket name for these parts (namespace, job, generation ...); different parts, different
    names.

    Bucket names take `[A-Za-z0-9_-]` only: other bytes become `_XX`, the parts are joined by `__`, and what
    is too long for a directory's name is cut and gets a digest.
    """
    name = "__".join(
        "".join(chr(byte) if byte in _BUCKET_PLAIN else f"_{byte:02X}" for byte in part.encode())
        for part in parts
    )
    if len(name) <= BUCKET_CHARS_MAX:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{name[: BUCKET_CHARS_MAX - len(digest) - 2]}__{digest}"


class JetStreamStore(StoreBase):
    """`Store` in one bucket. Make it with `open`; closing it leaves the bus connection alone."""

    def __init__(self, bus: Bus, bucket: str, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._bus = bus
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._subjects = f"$KV.{bucket}."

    @classmethod
    async def open(
        cls, bus: Bus, bucket: str, *, replicas: int = 1, timeout_s: float = 5.0
    ) -> "JetStreamStore":
        """Open the bucket, made if it is not there. Every operation takes `timeout_s` at most, then it is
        StoreUnavailable; while the server restarts, operations wait for it that long.
        """
        store = cls(bus, bucket, timeout_s)
        await store._call(
            lambda nc: nc.jetstream(timeout=timeout_s).create_key_value(
                bucket=bucket, history=1, replicas=replicas, limit_marker_ttl=MARKER_TTL_S
            )
        )
        return store

    async def get(self, key: str) -> Entry | None:
        """See `Store.get`."""
        check_key(key)
        return _entry(key, await self._last(key))

    async def create(self, key: str, value: bytes) -> int:
        """See `Store.create`."""
        check_value(key, value)
        return await self._create(key, value, {})

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """See `Store.update`."""
        check_value(key, value)
        if revision < 1:  # 0 would mean "absent" to the server
            raise RevisionConflict(f"cannot update {key} at revision {revision}: no entry ever has that")
        return await self._write(key, value, revision, {})

    async def delete(self, key: str, revision: int | None = None) -> None:
        """See `Store.delete`."""
        check_key(key)
        for _ in range(ROUNDS_MAX):
            entry = await self.get(key)
            if entry is None:
                return
            if revision not in (None, entry.revision):
                raise RevisionConflict(
                    f"cannot delete {key} at revision {revision}: it is at {entry.revision}"
                )
            try:
                await self._write(key, b"", entry.revision, {_OPERATION: KV_DEL})
            except RevisionConflict:
                continue
            return
        raise StoreUnavailable(f"cannot delete {key}: it changes all the time")

    async def list(self, prefix: str) -> tuple[Entry, ...]:
        """See `Store.list`."""
        check_prefix(prefix)

        async def read(nc: Client) -> tuple[Entry, ...]:
            watcher = await self._open_watcher(nc, prefix)
            try:
                return await _read_snapshot(watcher)
            finally:
                await _stop(watcher)

        return await self._call(read)

    async def lease(self, key: str, value: bytes, ttl_s: float) -> Lease:
        """See `Store.lease`."""
        check_value(key, value)
        check_ttl(key, ttl_s)
        taken_at_s = asyncio.get_running_loop().time()
        headers = {"Nats-TTL": str(math.ceil(ttl_s)), _HOLDER: secrets.token_hex(16)}
        token = await self._create(key, value, headers)
        return self._register(_JetStreamLease(self, key, value, headers, token, ttl_s, taken_at_s))

    async def _create(self, key: str, value: bytes, headers: Mapping[str, str]) -> int:
        """Create the key if it is absent, expired or deleted: an expired or deleted one has left a marker
        with a revision.
        """
        revision = 0
        for _ in range(ROUNDS_MAX):
            try:
                return await self._write(key, value, revision, headers)
            except RevisionConflict:
                last = await self._last(key)
                if _entry(key, last) is not None:
                    raise KeyExists(f"cannot create {key}: it is there") from None
                revision = last.seq or 0 if last is not None else 0
        raise StoreUnavailable(f"cannot create {key}: it changes all the time")

    async def _last(self, key: str) -> RawStreamMsg | None:
        async def read(nc: Client) -> RawStreamMsg | None:
            try:
                return await nc.jetstream(timeout=self._timeout_s).get_msg(
                    self._stream, subject=self._subjects + key
                )
            except nats.js.errors.NotFoundError as error:
                if error.err_code == _NO_MESSAGE:
                    return None
                raise

        return await self._call(read)

    async def _write(self, key: str, value: bytes, revision: int, headers: Mapping[str, str]) -> int:
        """Write if the key's last message has `revision`; returns the new one."""
        expecting = {_EXPECT: str(revision), **headers}

        async def write(nc: Client) -> int:
            js = nc.jetstream(timeout=self._timeout_s)
            try:
                ack = await js.publish(self._subjects + key, value, headers=dict(expecting))
            except nats.js.errors.APIError as error:
                if error.err_code in _WRONG_SEQUENCE:
                    raise RevisionConflict(
                        f"cannot write {key} at revision {revision}: {error.description}"
                    ) from None
                raise
            return int(ack.seq)

        return await self._call(write)

    async def _call(self, operation: Callable[[Client], Awaitable[T]]) -> T:
        """Run the operation, repeatedly within the timeout as long as the server has certainly not done it:
        after a restart JetStream is ready later than the server.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + self._timeout_s, RETRY_FIRST_S
        while True:
            try:
                return await self._bus.call(operation, deadline - loop.time())
            except (nats.js.errors.NoStreamResponseError, nats.errors.NoRespondersError) as error:
                problem: Exception = error
            except nats.js.errors.APIError as error:
                if error.code != _UNAVAILABLE:
                    raise StoreError(f"cannot use bucket {self._bucket}: {error.description}") from error
                problem = error
            except (BusError, nats.errors.Error, OSError) as error:
                raise StoreUnavailable(f"cannot reach bucket {self._bucket}: {error}") from error
            if loop.time() + pause_s >= deadline:
                raise StoreUnavailable(f"cannot reach bucket {self._bucket}: {problem}") from problem
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_MAX_S)

    async def _open_watcher(self, nc: Client, prefix: str) -> KeyValue.KeyWatcher:
        js = nc.jetstream(timeout=self._timeout_s)
        bucket = KeyValue(name=self._bucket, stream=self._stream, pre=self._subjects, js=js, direct=False)
        return await bucket.watch(f"{prefix}.>" if prefix else ">")

    async def _follow(self, prefix: str, sink: Feed) -> None:
        """Feed a watch for ever, opened again on every new connection."""
        new_client = asyncio.Event()
        stop_listening = self._bus.on_new_client(new_client.set)
        try:
            while True:
                new_client.clear()
                reader = asyncio.ensure_future(self._read_on(prefix, sink))
                renewed = asyncio.ensure_future(new_client.wait())
                try:
                    await asyncio.wait({reader, renewed}, return_when="FIRST_COMPLETED")
                    if reader.done():
                        reader.result()
                finally:
                    renewed.cancel()
                    reader.cancel()
                    await asyncio.wait({reader, renewed})
        finally:
            stop_listening()

    async def _read_on(self, prefix: str, sink: Feed) -> None:
        """Read a snapshot, then changes, as long as this connection lives; ends by cancellation."""
        while True:
            try:
                watcher, entries = await self._call(lambda nc: self._open_with_snapshot(nc, prefix))
            except StoreUnavailable as error:
                logger.debug("watch of %s.%s: %s", self._bucket, prefix, error)
                await asyncio.sleep(RETRY_MAX_S)
                continue
            try:
                sink.snapshot(entries)
                async for update in watcher:
                    if update is not None:
                        _pass_on(update, sink)
                return
            finally:
                await _stop(watcher)

    async def _open_with_snapshot(
        self, nc: Client, prefix: str
    ) -> tuple[KeyValue.KeyWatcher, tuple[Entry, ...]]:
        watcher = await self._open_watcher(nc, prefix)
        try:
            return watcher, await _read_snapshot(watcher)
        except BaseException:
            await _stop(watcher)
            raise


class _JetStreamLease(Lease):
    def __init__(
        self,
        store: JetStreamStore,
        key: str,
        value: bytes,
        headers: Mapping[str, str],
        token: int,
        ttl_s: float,
        taken_at_s: float,
    ) -> None:
        super().__init__(key, token, ttl_s, taken_at_s)
        self._store = store
        self._value = value
        self._headers = headers
        self._revision = token

    async def _refresh(self) -> None:
        try:
            self._revision = await self._store._write(self.key, self._value, self._revision, self._headers)
        except RevisionConflict:
            # It may be our own write, whose answer was lost: then it has our holder id.
            last = await self._store._last(self.key)
            holder = (last.headers or {}).get(_HOLDER) if last is not None else None
            if last is None or last.seq is None or holder != self._headers[_HOLDER]:
                raise LeaseLost(f"cannot refresh the lease on {self.key}: it is gone or another's") from None
            self._revision = last.seq

    async def _release(self) -> None:
        try:
            await self._store.delete(self.key, self._revision)
        except RevisionConflict:
            return  # another holder's already


def _entry(key: str, message: RawStreamMsg | None) -> Entry | None:
    """The entry in a key's last message; None for the marker of a deletion or an expiry."""
    if message is None or message.seq is None:
        return None
    headers = message.headers or {}
    if headers.get(_OPERATION) in (KV_DEL, KV_PURGE) or _MARKER in headers:
        return None
    return Entry(key, message.data or b"", message.seq)


async def _read_snapshot(watcher: KeyValue.KeyWatcher) -> tuple[Entry, ...]:
    entries: dict[str, Entry] = {}
    async for update in watcher:
        if update is None:
            break
        if update.operation in (KV_DEL, KV_PURGE):
            entries.pop(update.key, None)
        else:
            entries[update.key] = Entry(update.key, update.value or b"", update.revision or 0)
    return tuple(entries[key] for key in sorted(entries))


def _pass_on(update: KeyValue.Entry, sink: Feed) -> None:
    if update.operation in (KV_DEL, KV_PURGE):
        sink.deleted(update.key)
    else:
        sink.changed(Entry(update.key, update.value or b"", update.revision or 0))


async def _stop(watcher: KeyValue.KeyWatcher) -> None:
    try:
        await watcher.stop()  # type: ignore[no-untyped-call]
    except (nats.errors.Error, OSError) as error:  # its connection is gone
        logger.debug("stop a watch: %r", error)
