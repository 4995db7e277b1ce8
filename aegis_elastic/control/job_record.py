"""The job's record in the store: found or begun at the start, then changed by compare-and-swap only.

The job record is one value, so count and phase can't come apart. Beside it stand the workers' identities
(and, for large jobs, the order of workers); `core.accounts.record` says in which order they are written, so
that a master can die anywhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging

import msgspec

from aegis_elastic.control.host.tasks import end_all
from aegis_elastic.core.accounts import journal, record
from aegis_elastic.core.machine import Transition
from aegis_elastic.core.model import TERMINAL, JobSpec, Status
from aegis_elastic.store.contract import KeyExists, RevisionConflict, Store

logger = logging.getLogger(__name__)

JOB_KEY = "job"
WORKER_PREFIX = "worker"
WORKER_ORDER_PREFIX = "seats"
ARCHIVE_PREFIX = "archive"

TOKEN_CHARS_MAX = 200
# So many workers' records are written at a time: one after the other, a thousand take longer than all the
# rest of a recovery.
PUTS_MAX = 64


class Fenced(Exception):
    """Another master has changed the record: it leads now, and we must not go on."""


class JobRecordStore:
    """Owns the record of one job in one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._revision = 0
        self._revisions: dict[str, int] = {}  # of what we have written beside the job's record
        self._worker_order_id = ""
        self._saved: Status | None = None

    async def open(self, spec: JobSpec, now: float, *, resume: bool, leads: int = 0) -> Transition:
        """The status to go on with: the record's, or a new one. Named "adopt" or "create" like journal lines.

        A terminal record is archived and the next generation begins; so is one that isn't to be resumed, or
        of a job of another size: its ranks would leave some of the new nodes without work, or wait for ever.
        But a generation that this plane `leads` is always gone on with: its agents know no other, and if it
        has ended they may not have heard so.
        """
        entry = await self._store.get(JOB_KEY)
        if entry is None:
            begun = journal.begin(spec, now)
            await self.save(begun.status)
            return begun
        self._revision = entry.revision
        status = await self._read(entry.value)
        old = status.spec
        same_size = (old.worker_num, old.min_worker_num) == (spec.worker_num, spec.min_worker_num)
        if old.generation == leads or (status.phase not in TERMINAL and resume and same_size):
            if old.max_retry != spec.max_retry:
                logger.warning(
                    "continued with its limit of %d restarts, not %d", old.max_retry, spec.max_retry
                )
            # Our predecessor may have died before it wrote all workers' records: write them all.
            await self._put_workers(record.split(status).workers)
            self._saved = status
            return journal.adopted(status)
        await self._archive(status, entry.value)
        next_generation = msgspec.structs.replace(spec, generation=old.generation + 1)
        begun = journal.begin(next_generation, now)
        await self.save(begun.status)
        return begun

    async def save(self, status: Status) -> None:
        """Make this status the record. Fenced if somebody else has written in between."""
        records = record.split(status, self._saved)
        if records.worker_order_id and records.worker_order_id != self._worker_order_id:
            await self._put(f"{WORKER_ORDER_PREFIX}.{records.worker_order_id}", records.worker_order)
            self._worker_order_id = records.worker_order_id
        try:
            if self._revision:
                self._revision = await self._store.update(JOB_KEY, records.job, self._revision)
            else:
                self._revision = await self._store.create(JOB_KEY, records.job)
        except (RevisionConflict, KeyExists) as error:
            raise Fenced(
                f"another master has written the record of {status.spec.job_name!r}: {error}"
            ) from error
        await self._put_workers(records.workers)
        self._saved = status

    async def _read(self, job: bytes) -> Status:
        found = await self._store.list(WORKER_PREFIX)
        names = {entry.key: entry.value for entry in found}
        workers = {}
        for value in names.values():
            workers[_worker_name(value)] = value
        worker_order_id = record.worker_order_id(job)
        worker_order = (
            await self._store.get(f"{WORKER_ORDER_PREFIX}.{worker_order_id}") if worker_order_id else None
        )
        self._worker_order_id = worker_order_id
        return record.join(job, workers, worker_order.value if worker_order else b"")

    async def _put_workers(self, workers: dict[str, bytes]) -> None:
        left = iter(workers.items())

        async def put_some() -> None:
            for name, value in left:
                await self._put(_worker_key(name), value)

        tasks = [asyncio.create_task(put_some()) for _ in range(min(PUTS_MAX, len(workers)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_all(tasks)

    async def _put(self, key: str, value: bytes) -> None:
        """Write a record that only its newest writer knows: the last one wins, whoever it is."""
        if key in self._revisions:
            try:
                self._revisions[key] = await self._store.update(key, value, self._revisions[key])
                return
            except RevisionConflict:
                del self._revisions[key]  # another's by now
        found = await self._store.get(key)
        try:
            if found is None:
                self._revisions[key] = await self._store.create(key, value)
            elif found.value != value:
                self._revisions[key] = await self._store.update(key, value, found.revision)
        except (RevisionConflict, KeyExists) as error:
            raise Fenced(f"another master writes at the same time: {error}") from error

    async def _archive(self, status: Status, job: bytes) -> None:
        await self._put(f"{ARCHIVE_PREFIX}.{status.spec.generation}", job)
        for entry in await self._store.list(WORKER_PREFIX):
            await self._store.delete(entry.key)
        logger.info("archived generation %d, which ended in %s", status.spec.generation, status.phase.value)


def _worker_key(name: str) -> str:
    # Worker names may have any characters and be long; keys may not, and one worker is one record.
    token = name.encode().hex()
    if len(token) > TOKEN_CHARS_MAX:
        token = hashlib.sha256(name.encode()).hexdigest()
    return f"{WORKER_PREFIX}.{token}"


class _Named(msgspec.Struct):
    name: str


class _WorkerRecord(msgspec.Struct):
    identity: _Named


def _worker_name(value: bytes) -> str:
    return msgspec.json.decode(value, type=_WorkerRecord).identity.name
