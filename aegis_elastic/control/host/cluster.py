"""What outlives a job: the store that all jobs of a cluster share, and the records of its nodes in it.

The cluster scope lies in the file store under `--aegis-state-dir`, or in etcd (`--aegis-store`). With neither
it is the job's own store, and what is known of nodes ends with the job.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from aegis_elastic.core.policy import node_records
from aegis_elastic.core.policy.node_records import NodeRecord
from aegis_elastic.store.contract import (
    Entry,
    KeyExists,
    RevisionConflict,
    Store,
    StoreUnavailable,
    Watch,
)
from aegis_elastic.store.files import FileStore

logger = logging.getLogger(__name__)

NODES_PREFIX = "nodes"
FOLDER = "cluster"  # below the state directory, where the join secret may lie, too
ETCD_ROOT = "aegis-cluster"
ETCD_SCHEME = "etcd://"
# Others change the same node at the same time, if at all, a few times a day.
TRIES_MAX = 16
FILES_TIMEOUT_S = 5.0
TOKEN_CHARS_MAX = 200

Edit = Callable[[NodeRecord], NodeRecord]
Opener = Callable[[], Awaitable[Store]]
Closer = Callable[[], Awaitable[None]]


class VersionedRecord(NamedTuple):
    """A node's record and its revision (0: there is none)."""

    record: NodeRecord
    revision: int


class ClusterScope:
    """The records of nodes in one store, opened when it is first needed, and again when that failed."""

    def __init__(self, opener: Opener, where: str, *, shared: bool, close: Closer | None = None) -> None:
        """`where`: for people; `shared`: whether it outlives the job, and is ours to close; `close` gives
        back what the opener has in hand while it fails.
        """
        self.where = where
        self.shared = shared
        self._opener = opener
        self._close = close
        self._store: Store | None = None
        self._opening = asyncio.Lock()

    async def store(self) -> Store:
        """The store itself, for whoever keeps other records beside ours. StoreError: not to be had now."""
        async with self._opening:
            if self._store is None:
                self._store = await self._opener()
        return self._store

    async def records(self) -> dict[str, NodeRecord]:
        """All nodes of which something is known, by name. StoreUnavailable."""
        found = (record_of(entry) for entry in await (await self.store()).list(NODES_PREFIX))
        return {record.node_name: record for record in found if record is not None}

    async def record(self, node_name: str) -> NodeRecord:
        """What is known of this node, nothing if there is no record. StoreUnavailable."""
        return (await self.read(node_name)).record

    async def read(self, node_name: str) -> VersionedRecord:
        """The same with its revision."""
        entry = await (await self.store()).get(node_key(node_name))
        return _versioned(node_name, entry)

    async def change(self, node_name: str, edit: Edit) -> NodeRecord:
        """Change one node's record as `changed` does."""
        return (await self.changed(node_name, edit)).record

    async def changed(self, node_name: str, edit: Edit) -> VersionedRecord:
        """Change one node's record by compare-and-swap; `edit` may be called several times. StoreUnavailable.

        A record that makes no sense is replaced: it keeps no node out, and would be in the way for ever.
        """
        key, store = node_key(node_name), await self.store()
        for _ in range(TRIES_MAX):
            before = _versioned(node_name, await store.get(key))
            after = edit(before.record)
            if after == before.record:
                return before
            try:
                if before.revision == 0:
                    revision = await store.create(key, msgspec.json.encode(after))
                else:
                    revision = await store.update(key, msgspec.json.encode(after), before.revision)
            except (KeyExists, RevisionConflict):
                continue
            return VersionedRecord(after, revision)
        raise StoreUnavailable(f"cannot change the record of node {node_name}: others change it all the time")

    async def forget(self, now: float) -> int:
        """Delete the records in which nothing matters any more; returns how many. StoreUnavailable."""
        gone, store = 0, await self.store()
        for entry in await store.list(NODES_PREFIX):
            record = record_of(entry)
            if record is None or node_records.is_idle(record, now):
                try:
                    await store.delete(entry.key, entry.revision)
                except RevisionConflict:
                    continue  # it matters to somebody
                gone += 1
        return gone

    async def clear(self) -> None:
        """Delete all records of nodes, of a store that is not shared. StoreUnavailable."""
        assert not self.shared, "a cluster's records are nobody's to delete"
        store = await self.store()
        for entry in await store.list(NODES_PREFIX):
            await store.delete(entry.key)

    async def watch(self) -> Watch:
        """Follow the records; `record_of` reads a change's entry. StoreUnavailable."""
        return (await self.store()).watch(NODES_PREFIX)

    async def close(self) -> None:
        """Give the store back, if it isn't the job's."""
        if self.shared and self._store is not None:
            await self._store.close()
        elif self._close is not None:
            await self._close()


class _Files:
    """Opens the file store. One for all tries, so that a file server that is away holds one thread, not one
    for each.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: FileStore | None = None

    async def open(self) -> Store:
        self._files = self._files or FileStore(self.directory, FILES_TIMEOUT_S)
        await self._files.prepare()
        return self._files

    async def close(self) -> None:
        if self._files is not None:
            await self._files.close()


def of_cluster(state_dir: str, etcd: str) -> ClusterScope | None:
    """The scope in etcd (`etcd://HOST:PORT[,HOST:PORT]`), else in the state directory; None with neither."""
    if etcd:
        addresses = endpoints(etcd)

        async def open_etcd() -> Store:
            # Only here, because it belongs to an extra that most don't install.
            from aegis_elastic.store.etcd import EtcdStore

            return await EtcdStore.open(addresses, ETCD_ROOT)

        return ClusterScope(open_etcd, etcd, shared=True)
    if state_dir:
        files = _Files(Path(state_dir) / FOLDER)
        return ClusterScope(files.open, str(files.directory), shared=True, close=files.close)
    return None


def of_job(store: Store) -> ClusterScope:
    """The scope of a job that was given no other: its own store, and gone with it."""

    async def have() -> Store:
        return store

    return ClusterScope(have, "this job's own store", shared=False)


def endpoints(etcd: str) -> list[str]:
    """The addresses in `etcd://HOST:PORT[,HOST:PORT]`. ValueError for anything else."""
    listed = etcd.removeprefix(ETCD_SCHEME).rstrip("/").split(",")
    if not etcd.startswith(ETCD_SCHEME) or not all(_is_address(each) for each in listed):
        raise ValueError(f"{etcd!r} is not etcd://HOST:PORT[,HOST:PORT...]")
    return listed


def record_of(entry: Entry) -> NodeRecord | None:
    """The record in a store's entry; None, and a line in the log, if it makes no sense."""
    try:
        return msgspec.json.decode(entry.value, type=NodeRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("ignored the record %s: %s", entry.key, error)
        return None


def _versioned(node_name: str, entry: Entry | None) -> VersionedRecord:
    record = record_of(entry) if entry else None
    return VersionedRecord(record or NodeRecord(node_name), entry.revision if entry else 0)


def node_key(node_name: str) -> str:
    """The key of a node's record: names may have any characters and be long, keys may not."""
    token = node_name.encode(errors="replace").hex()
    if len(token) > TOKEN_CHARS_MAX:
        token = hashlib.sha256(node_name.encode(errors="replace")).hexdigest()
    return f"{NODES_PREFIX}.{token}"


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and "/" not in host and "@" not in host and port.isdigit() and 0 < int(port) < 65536
