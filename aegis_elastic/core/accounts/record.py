"""The job record: a status as it is stored, one small value under compare-and-swap and slow-changing ones
beside.

The job record holds everything that a decision depends on: what is global, and those workers whose state is
not what phase and recoverCount imply (the *exceptions*). Of all others it has only the name; their identity
is in a record of their own, since 16,000 of them in one value would be megabytes. The *worker order* is the
list of worker names in group-rank order ("seats" in stored records); from 512 workers on it is a record of
its own, too, which the job record names by its digest. While all workers finish a round of checks one after
the other, almost all are exceptions: a job record that is large for that is compressed.

Order of writing, so that a master can die anywhere:

1. `worker_order`, if `worker_order_id` is new (its key contains the digest, so it is never overwritten);
2. `job`, by compare-and-swap: from here on the transition has happened;
3. `workers` (`split` gives those that have changed), before the next transition's job record.

Between 2 and 3 the record of a worker may be old or missing. That does no harm: a worker that is new or
changes its identity is an exception in that transition, and an exception's identity is in the job record.
Only a store address that was offered a moment ago may be missing then; the heartbeat offers it again. A
master that adopts a job writes the workers' records first, since its predecessor may have died between 2 and
3.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from aegis_elastic.core.model import Phase, Status, Worker

INLINE_WORKERS_MAX = 512
# No JSON begins with this letter, and names and addresses shrink to a sixth of their size.
_PACKED = b"z"
_PLAIN_BYTES_MAX = 32 * 1024
_UNPACKED_BYTES_MAX = 64 << 20

_IDENTITY = ("name", "uid", "node_name", "node_ip", "nproc", "ordinal", "risk")
_DYNAMIC = tuple(name for name in Worker.__struct_fields__ if name not in _IDENTITY)
_WIRE = dict(zip(Worker.__struct_fields__, Worker.__struct_encode_fields__, strict=True))


class BadRecord(ValueError):
    """Stored records that make no status; the text says which and why."""


class Records(NamedTuple):
    """What is to be stored. `worker_order` is b"" and its id "" if the job record has the list inside."""

    job: bytes
    workers: dict[str, bytes]
    worker_order: bytes
    worker_order_id: str


class _JobRecord(msgspec.Struct, frozen=True, rename="camel"):
    status: dict[str, Any]
    typical_timestamp: float
    exceptions: tuple[dict[str, Any], ...]
    worker_order: tuple[str, ...] = msgspec.field(name="seats", default=())
    worker_order_id: str = msgspec.field(name="seatsId", default="")


class _WorkerRecord(msgspec.Struct, frozen=True, rename="camel"):
    """`store` was offered in the phase that this worker entered `at`; in any other it has been used."""

    identity: dict[str, Any]
    store: str
    at: float


_encode = msgspec.json.Encoder().encode
_job_decoder = msgspec.json.Decoder(_JobRecord)
_worker_decoder = msgspec.json.Decoder(_WorkerRecord)
_worker_order_decoder = msgspec.json.Decoder(tuple[str, ...])


def split(status: Status, before: Status | None = None) -> Records:
    """The records of this status; of the workers only what differs from `before`, if that is given."""
    counted = Counter(worker.updated_timestamp for worker in status.workers)
    timestamp = counted.most_common(1)[0][0] if counted else 0.0
    typical = _typical(status.phase, status.recover_count, timestamp)
    known = _known(before)
    exceptions = []
    for group_rank, worker in enumerate(status.workers):
        # The store of group rank 0 is what the next order hands out, so it is always in the job record.
        if (
            group_rank == 0
            or _is_new(worker, known)
            or any(getattr(worker, field) != value for field, value in typical.items())
        ):
            exceptions.append(_exception(worker, typical))
    names = tuple(worker.name for worker in status.workers)
    apart = len(names) > INLINE_WORKERS_MAX
    worker_order = _encode(names) if apart else b""
    record = _JobRecord(
        status={
            wire: getattr(status, field)
            for field, wire in zip(Status.__struct_fields__, Status.__struct_encode_fields__, strict=True)
            if field != "workers"
        },
        typical_timestamp=timestamp,
        exceptions=tuple(exceptions),
        worker_order=() if apart else names,
        worker_order_id=hashlib.sha256(worker_order).hexdigest()[:16] if apart else "",
    )
    job = _encode(record)
    if len(job) > _PLAIN_BYTES_MAX:
        job = _PACKED + zlib.compress(job, 1)
    return Records(job, _workers(status, before), worker_order, record.worker_order_id)


def worker_order_id(job: bytes) -> str:
    """The id of this job record's worker order; "" if the list is inside. Raises BadRecord."""
    return _job(job).worker_order_id


def join(job: bytes, records: Mapping[str, bytes], worker_order: bytes = b"") -> Status:
    """The status in these records. Raises BadRecord if one is missing or invalid."""
    record = _job(job)
    exceptions = {str(entry.get("name")): entry for entry in record.exceptions}
    try:
        names = _worker_order_decoder.decode(worker_order) if record.worker_order_id else record.worker_order
        phase, count = Phase(record.status["phase"]), int(record.status["recoverCount"])
        typical = {
            _WIRE[field]: value for field, value in _typical(phase, count, record.typical_timestamp).items()
        }
        workers = []
        for name in names:
            if name in exceptions:
                workers.append({**typical, **exceptions[name]})
                continue
            worker = _worker_decoder.decode(records[name])
            store = worker.store if worker.at == record.typical_timestamp else ""
            workers.append({**typical, **worker.identity, "store": store})
        return msgspec.convert({**record.status, "pods": workers}, Status)
    except KeyError as error:
        raise BadRecord(f"cannot put the status together: no record of {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRecord(f"cannot put the status together: {error}") from error


def _job(job: bytes) -> _JobRecord:
    try:
        if job.startswith(_PACKED):
            job = zlib.decompressobj().decompress(job[len(_PACKED) :], _UNPACKED_BYTES_MAX)
        return _job_decoder.decode(job)
    except (ValueError, RecursionError, zlib.error) as error:
        raise BadRecord(f"cannot read the job record: {error}") from error


def _typical(phase: Phase, recover_count: int, timestamp: float) -> dict[str, Any]:
    """The state of a worker that is no exception; its store is in its own record."""
    return {
        "inner_phase": phase,
        "finished": phase is Phase.SUCCEED,
        "retries": recover_count,
        "last_failed_reason": "",
        "updated_timestamp": timestamp,
        "gone": False,
        "restarted": False,
        "failed": False,
        "faulty": "",
        "fit": False,
        "renew": "",
        "relieve": "",
    }


def _exception(worker: Worker, typical: dict[str, Any]) -> dict[str, Any]:
    differing = [
        field for field in _DYNAMIC if field not in typical or getattr(worker, field) != typical[field]
    ]
    return {_WIRE[field]: getattr(worker, field) for field in (*_IDENTITY, *differing)}


def _known(before: Status | None) -> dict[str, Worker] | None:
    return {worker.name: worker for worker in (*before.workers, *before.spares)} if before else None


def _is_new(worker: Worker, known: dict[str, Worker] | None) -> bool:
    """Whether this worker's own record doesn't have its identity yet."""
    if known is None:
        return False
    old = known.get(worker.name)
    return old is None or (
        old is not worker and any(getattr(old, f) != getattr(worker, f) for f in _IDENTITY)
    )


def _workers(status: Status, before: Status | None) -> dict[str, bytes]:
    known, changed = _known(before) or {}, {}
    for worker in (*status.workers, *status.spares):
        old = known.get(worker.name)
        if old is worker:
            continue
        record = _worker(worker)
        if old is None or _must_be_written(record, _worker(old)):
            changed[worker.name] = _encode(record)
    return changed


def _must_be_written(record: _WorkerRecord, old: _WorkerRecord) -> bool:
    """Whether it has to be written. A used store need not be: its record shows that by `at`, and all workers
    use theirs in the same moment, in which all wait for the next order.
    """
    return record.identity != old.identity or (bool(record.store) and record != old)


def _worker(worker: Worker) -> _WorkerRecord:
    identity = {_WIRE[field]: getattr(worker, field) for field in _IDENTITY}
    return _WorkerRecord(identity, worker.store, worker.updated_timestamp if worker.store else 0.0)
