"""The stored form of a status: complete, small, and safe to be torn between its records."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given, settings

from aegis_elastic.core.accounts.record import BadRecord, Records, join, split, worker_order_id
from aegis_elastic.core.events import Error, Finish, Reconcile
from aegis_elastic.core.machine import create, step
from aegis_elastic.core.model import JobSpec, Phase, Status, Worker
from aegis_elastic.store.values import VALUE_BYTES_MAX
from tests.core.machine.walks import Choice, Walk, moves, specs


@given(specs(), moves)
@settings(max_examples=60)
def test_what_is_stored_is_what_there_was(spec: JobSpec, walk: list[Choice]) -> None:
    for told in Walk(spec, walk).steps:
        records = split(told.made.status)
        assert join(records.job, records.workers, records.worker_order) == told.made.status


@given(specs(), moves)
@settings(max_examples=60)
def test_changed_workers_are_enough(spec: JobSpec, walk: list[Choice]) -> None:
    stored: dict[str, bytes] = {}
    before: Status | None = None
    for told in Walk(spec, walk).steps:
        records = split(told.made.status, before)
        stored |= records.workers
        before = told.made.status
        assert join(records.job, stored) == before


@given(specs(), moves)
@settings(max_examples=60)
def test_a_master_may_die_between_the_job_record_and_the_workers(spec: JobSpec, walk: list[Choice]) -> None:
    for before, _, made, _ in Walk(spec, walk).steps:
        found = join(split(made.status).job, split(before).workers)
        # At most a store address is missing, never group rank 0's and never an old one in its place.
        offered = {worker.name: worker.store for worker in made.status.workers}
        assert all(worker.store in ("", offered[worker.name]) for worker in found.workers)
        assert without_stores(found) == without_stores(made.status)
        assert [worker.store for worker in found.workers[:1]] == [
            worker.store for worker in made.status.workers[:1]
        ]


def without_stores(status: Status) -> tuple[object, ...]:
    workers = tuple(msgspec.structs.replace(worker, store="") for worker in status.workers)
    others = (getattr(status, name) for name in Status.__struct_fields__ if name != "workers")
    return workers, *others


def big_job(count: int) -> Status:
    """A job of that many workers in RunCommand."""
    spec = JobSpec("job", "default", count, count, max_retry=1000, troubleshoot="off")
    workers = tuple(
        Worker(
            f"node-{n:05d}.cluster.local", f"u{n:032d}", f"node-{n:05d}", "10.1.2.3", 8, Phase.PENDING,
            finished=True, updated_timestamp=float(n), store=f"10.1.2.3:{n}",
        )
        for n in range(count)
    )  # fmt: skip
    status = msgspec.structs.replace(create(spec, 0.0), workers=workers)
    status = step(status, Reconcile(), 5.0).status
    ready = tuple(msgspec.structs.replace(worker, finished=True) for worker in status.workers)
    status = step(msgspec.structs.replace(status, workers=ready), Reconcile(), 6.5).status
    assert status.phase is Phase.RUN_COMMAND
    return status


def test_sixteen_thousand_workers_fit_into_a_small_record() -> None:
    status = big_job(16_000)
    records = split(status)
    assert len(records.job) < 64 * 1024
    assert len(records.workers) == 16_000
    assert records.worker_order_id == worker_order_id(records.job) != ""
    assert join(records.job, records.workers, records.worker_order) == status
    failed = step(
        status, Error(status.workers[7].name, status.workers[7].uid, 1, status.seq_num, "exit code 1"), 8.0
    ).status
    after = split(failed, status)
    assert after.workers == {}, "a failure is in the job record alone"
    assert len(after.job) < 64 * 1024
    assert join(after.job, records.workers, after.worker_order) == failed


def test_it_fits_while_sixteen_thousand_are_exceptions_one_after_the_other() -> None:
    status = big_job(16_000)
    root = status.workers[0]
    failed = step(status, Error(root.name, root.uid, 1, status.seq_num, "exit code 1"), 8.0).status
    status = step(failed, Reconcile(), 8.0).status
    workers = tuple(
        msgspec.structs.replace(
            worker,
            uid=hashlib.md5(worker.uid.encode()).hexdigest(),
            finished=n > 0,
            updated_timestamp=9.0 + n / 1e4,
        )
        for n, worker in enumerate(status.workers)
    )
    status = msgspec.structs.replace(status, workers=workers)
    records = split(status)
    assert len(records.job) < VALUE_BYTES_MAX
    assert join(records.job, records.workers, records.worker_order) == status


def test_it_fits_when_every_worker_has_failed_with_long_texts() -> None:
    status = big_job(1000)
    for worker in status.workers[:300]:
        text = f"{worker.name}: " + hashlib.sha256(worker.name.encode()).hexdigest() * 70
        status = step(
            status, Error(worker.name, worker.uid, status.incarnation, status.seq_num, text), 8.0
        ).status
        status = step(status, Reconcile(), 8.0).status
        done = tuple(msgspec.structs.replace(each, finished=True) for each in status.workers)
        status = step(msgspec.structs.replace(status, workers=done), Reconcile(), 9.0).status
    assert status.incarnation == 301
    assert len(split(status).job) < VALUE_BYTES_MAX / 4


def test_a_finish_touches_one_workers_record_only() -> None:
    status = big_job(600)
    worker = status.workers[5]
    finished = step(
        status, Finish(worker.name, worker.uid, 1, status.seq_num, store="10.1.2.3:9"), 8.0
    ).status
    assert set(split(finished, status).workers) == {worker.name}


def test_stores_that_are_used_up_are_not_written_one_by_one() -> None:
    status = big_job(600)
    offered = tuple(
        msgspec.structs.replace(worker, store=f"10.1.2.3:{n + 1}") for n, worker in enumerate(status.workers)
    )
    status = msgspec.structs.replace(status, workers=offered)
    stored = dict(split(status).workers)
    root = status.workers[7]
    failed = step(status, Error(root.name, root.uid, 1, status.seq_num, "exit code 1"), 8.0).status
    after = step(failed, Reconcile(), 8.0).status
    assert {worker.store for worker in after.workers} == {""}
    records = split(after, status)
    assert records.workers == {}
    assert join(records.job, stored, records.worker_order) == after


def test_a_short_worker_order_is_inside_the_job_record() -> None:
    records = split(big_job(4))
    assert (records.worker_order, records.worker_order_id) == (b"", "")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda r: (b"{", r.workers, r.worker_order), "cannot read the job record"),
        (lambda r: (b"zjunk", r.workers, r.worker_order), "cannot read the job record"),
        (
            lambda r: (b'{"status":{"x":' + b"[" * 100_000, r.workers, r.worker_order),
            "cannot read the job record",
        ),
        (lambda r: (r.job, {}, r.worker_order), "no record of 'node-00001"),
        (
            lambda r: (r.job, dict.fromkeys(r.workers, b"junk"), r.worker_order),
            "cannot put the status together",
        ),
        (lambda r: (r.job, r.workers, b"junk"), "cannot put the status together"),
        (lambda r: (r.job.replace(b'"RunCommand"', b'"Dancing"'), r.workers, r.worker_order), "Dancing"),
    ],
)
def test_spoiled_records_are_one_error(spoil: object, complaint: str) -> None:
    assert callable(spoil)
    with pytest.raises(BadRecord, match=complaint):
        join(*spoil(_records()))


def _records() -> Records:
    return split(big_job(600))
