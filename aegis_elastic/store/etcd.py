"""A store in etcd, for records that must survive any one host.

The messages are those of the package cslab-etcd3 (`import etcd3`); its client is not used: it is synchronous,
marks an endpoint dead for minutes after one failure, and its watch does not come back after a restart of the
server. The few calls that the contract needs are made on its stubs over gRPC's asyncio channel, without
a thread.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from etcd3 import etcdrpc

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

RETRY_S = 0.2
# Pings notice a peer that has vanished silently; etcd refuses a client that pings more often.
_CHANNEL = (
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_TRANSIENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
_TXN = etcdrpc.Compare


class EtcdStore(StoreBase):
    """`Store` below one root in etcd. Make it with `open`, end it with `close`."""

    def __init__(self, channel: Any, root: str, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._channel = channel
        self._kv = etcdrpc.KVStub(channel)
        self._leaser = etcdrpc.LeaseStub(channel)
        self._watcher = etcdrpc.WatchStub(channel)
        self._root = root.encode() + b"/"

    @classmethod
    async def open(
        cls,
        endpoints: Sequence[str],
        root: str,
        *,
        credentials: Any = None,
        timeout_s: float = 5.0,
    ) -> "EtcdStore":
        """Connect to one of `endpoints` ("address:port"; with several, IP addresses of one family) and check
        it.

        `root` keeps this store's keys apart from others'; `credentials` are gRPC channel credentials for TLS.
        Every operation takes `timeout_s` at most, then it is StoreUnavailable; while the server restarts,
        operations wait for it that long.
        """
        if not endpoints:
            raise ValueError("cannot open an etcd store: give at least one endpoint")
        target = endpoints[0]
        if len(endpoints) > 1:
            target = ("ipv6:" if endpoints[0].startswith("[") else "ipv4:") + ",".join(endpoints)
        if credentials is None:
            channel = grpc.aio.insecure_channel(target, options=_CHANNEL)
        else:
            channel = grpc.aio.secure_channel(target, credentials, options=_CHANNEL)
        store = cls(channel, root, timeout_s)
        try:
            await store.get("probe")
        except BaseException:
            await store.close()
            raise
        return store

    async def get(self, key: str) -> Entry | None:
        """See `Store.get`."""
        check_key(key)
        response = await self._call(self._kv.Range, etcdrpc.RangeRequest(key=self._full(key)))
        return self._entry(response.kvs[0]) if response.kvs else None

    async def create(self, key: str, value: bytes) -> int:
        """See `Store.create`."""
        check_value(key, value)
        return await self._create(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """See `Store.update`."""
        check_value(key, value)
        # The value changes, the lease stays: an update must not remove a key's lease.
        put = etcdrpc.PutRequest(key=self._full(key), value=value, ignore_lease=True)
        response = await self._if_at(key, revision, etcdrpc.RequestOp(request_put=put))
        if not response.succeeded:
            raise RevisionConflict(f"cannot update {key} at revision {revision}: {self._found(response)}")
        return int(response.header.revision)

    async def delete(self, key: str, revision: int | None = None) -> None:
        """See `Store.delete`."""
        check_key(key)
        request = etcdrpc.DeleteRangeRequest(key=self._full(key))
        if revision is None:
            await self._call(self._kv.DeleteRange, request)
            return
        response = await self._if_at(key, revision, etcdrpc.RequestOp(request_delete_range=request))
        if not response.succeeded and response.responses[0].response_range.kvs:
            raise RevisionConflict(f"cannot delete {key} at revision {revision}: {self._found(response)}")

    async def list(self, prefix: str) -> tuple[Entry, ...]:
        """See `Store.list`."""
        check_prefix(prefix)
        return (await self._range(prefix))[0]

    async def lease(self, key: str, value: bytes, ttl_s: float) -> Lease:
        """See `Store.lease`."""
        check_value(key, value)
        check_ttl(key, ttl_s)
        taken_at_s = asyncio.get_running_loop().time()
        granted = await self._call(self._leaser.LeaseGrant, etcdrpc.LeaseGrantRequest(TTL=math.ceil(ttl_s)))
        try:
            token = await self._create(key, value, granted.ID)
        except KeyExists:
            await self._call(self._leaser.LeaseRevoke, etcdrpc.LeaseRevokeRequest(ID=granted.ID))
            raise
        return self._register(_EtcdLease(self, key, granted.ID, token, ttl_s, taken_at_s))

    async def close(self) -> None:
        """See `Store.close`."""
        await super().close()
        await self._channel.close()

    async def _create(self, key: str, value: bytes, lease_id: int) -> int:
        full = self._full(key)
        absent = _TXN(key=full, target=_TXN.CREATE, result=_TXN.EQUAL, create_revision=0)
        put = etcdrpc.RequestOp(request_put=etcdrpc.PutRequest(key=full, value=value, lease=lease_id))
        response = await self._call(self._kv.Txn, etcdrpc.TxnRequest(compare=[absent], success=[put]))
        if not response.succeeded:
            raise KeyExists(f"cannot create {key}: it is there")
        return int(response.header.revision)

    async def _if_at(self, key: str, revision: int, then: Any) -> Any:
        full = self._full(key)
        # An absent key counts as revision 0 to etcd, but no entry ever has that.
        at = _TXN(key=full, target=_TXN.MOD, result=_TXN.EQUAL, mod_revision=revision if revision > 0 else -1)
        read_back = etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=full))
        request = etcdrpc.TxnRequest(compare=[at], success=[then], failure=[read_back])
        return await self._call(self._kv.Txn, request)

    async def _range(self, prefix: str) -> tuple[tuple[Entry, ...], int]:
        """Return all entries below `prefix` and the store's revision at that moment."""
        start, end = self._bounds(prefix)
        response = await self._call(self._kv.Range, etcdrpc.RangeRequest(key=start, range_end=end))
        return tuple(self._entry(pair) for pair in response.kvs), int(response.header.revision)

    async def _follow(self, prefix: str, sink: Feed) -> None:
        """Feed a watch for ever: after a loss from the last revision seen, or by a new snapshot if that
        revision was compacted.
        """
        last_revision = 0
        while True:
            try:
                if not last_revision:
                    entries, last_revision = await self._range(prefix)
                    sink.snapshot(entries)
                async for response in self._watch_from(prefix, last_revision + 1):
                    if response.compact_revision or response.canceled:
                        last_revision = 0
                        break
                    for event in response.events:
                        if event.type == event.DELETE:
                            sink.deleted(self._key(event.kv))
                        else:
                            sink.changed(self._entry(event.kv))
                    # A header's revision may be ahead of events still to come, so it counts only without
                    # events.
                    if response.events:
                        last_revision = max(last_revision, int(response.events[-1].kv.mod_revision))
                    elif not response.created:
                        last_revision = max(last_revision, int(response.header.revision))
            except (StoreUnavailable, grpc.aio.AioRpcError) as error:
                logger.debug("watch of %s: %s", prefix, error)
            await asyncio.sleep(RETRY_S)

    async def _watch_from(self, prefix: str, revision: int) -> AsyncIterator[Any]:
        start, end = self._bounds(prefix)
        request = etcdrpc.WatchCreateRequest(
            key=start, range_end=end, start_revision=revision, progress_notify=True
        )
        call = self._watcher.Watch(wait_for_ready=True)
        try:
            await call.write(etcdrpc.WatchRequest(create_request=request))
            while (response := await call.read()) is not grpc.aio.EOF:
                yield response
        finally:
            call.cancel()

    async def _call(self, method: Callable[..., Any], request: Any) -> Any:
        self._check_open()
        try:
            # The request isn't sent while we wait for the server, so a timeout then leaves nothing unclear.
            return await method(request, timeout=self._timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error

    async def _keep_lease(self, lease_id: int) -> int:
        """Extend a lease; returns the seconds that it has now, 0 if it is gone."""
        self._check_open()
        call = self._leaser.LeaseKeepAlive(timeout=self._timeout_s, wait_for_ready=True)
        try:
            await call.write(etcdrpc.LeaseKeepAliveRequest(ID=lease_id))
            response = await call.read()
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        finally:
            call.cancel()
        if response is grpc.aio.EOF:
            raise StoreUnavailable("cannot extend a lease: etcd ended the call without an answer")
        return int(response.TTL)

    def _full(self, key: str) -> bytes:
        return self._root + key.encode()

    def _bounds(self, prefix: str) -> tuple[bytes, bytes]:
        start = self._full(prefix + "." if prefix else "")
        return start, start[:-1] + bytes([start[-1] + 1])

    def _key(self, pair: Any) -> str:
        return bytes(pair.key)[len(self._root) :].decode()

    def _entry(self, pair: Any) -> Entry:
        return Entry(self._key(pair), bytes(pair.value), int(pair.mod_revision))

    def _found(self, response: Any) -> str:
        pairs = response.responses[0].response_range.kvs
        return f"it is at {pairs[0].mod_revision}" if pairs else "it is gone"


class _EtcdLease(Lease):
    def __init__(
        self, store: EtcdStore, key: str, lease_id: int, token: int, ttl_s: float, taken_at_s: float
    ) -> None:
        super().__init__(key, token, ttl_s, taken_at_s)
        self._store = store
        self._id = lease_id

    async def _refresh(self) -> None:
        # etcd's lease outlives the key: a key that was deleted or replaced is not ours any more.
        if await self._store._keep_lease(self._id) > 0:
            entry = await self._store.get(self.key)
            if entry is not None and entry.revision == self.token:
                return
        raise LeaseLost(f"cannot refresh the lease on {self.key}: it is gone or another's")

    async def _release(self) -> None:
        # Deletes the key, too, but only if it still has this lease.
        await self._store._call(self._store._leaser.LeaseRevoke, etcdrpc.LeaseRevokeRequest(ID=self._id))


def _failure(error: Any) -> StoreError:
    text = f"cannot use etcd: {error.code().name}: {error.details()}"
    return StoreUnavailable(text) if error.code() in _TRANSIENT else StoreError(text)
