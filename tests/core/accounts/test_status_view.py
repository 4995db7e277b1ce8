"""The status as programs read it, and the order and the ranks that follow from one."""

from __future__ import annotations

from aegis_elastic.core.accounts.status_view import status_view
from aegis_elastic.core.events import Error, Join, Reconcile
from aegis_elastic.core.machine import create, step
from aegis_elastic.core.model import JobSpec, Phase, Worker
from aegis_elastic.core.protocol.orders import derive_order
from aegis_elastic.core.rank_assignment import assign_ranks, first_order
from tests.core.machine.walks import Walk


def test_the_view_has_exactly_the_fields_of_the_interface() -> None:
    run = Walk(JobSpec("job", "team", 2, 2, 3, generation=4), [(0, 0, 11), (0, 0, 11)])
    worker = run.status.workers[1]
    run.tell(Error(worker.name, worker.uid, 1, run.status.seq_num, "exit code 1"))
    run.tell(Reconcile())
    view = status_view(run.status, {"bus": "up"})
    assert list(view) == [
        "job", "namespace", "generation", "phase", "incarnation", "seqNum", "maxRetry", "recoverCount",
        "workers", "errorNodes", "plane",
    ]  # fmt: skip
    head = (view["job"], view["namespace"], view["generation"], view["phase"], view["incarnation"])
    assert head == ("job", "team", 4, "Troubleshooting", 1)
    assert (view["maxRetry"], view["recoverCount"], view["plane"]) == (3, 1, {"bus": "up"})
    assert view["workers"][1] == {
        "name": "w1", "node": "node-w1-False", "innerPhase": "Troubleshooting", "finished": False,
        "retries": 1, "lastFailedReason": "exit code 1", "ranks": [2, 3],
    }  # fmt: skip


def test_an_error_node_is_shown_with_its_reason() -> None:
    status = create(JobSpec("job", "default", 1, 1, 0), 0.0)
    assert status_view(status, {})["errorNodes"] == []
    run = Walk(JobSpec("job", "default", 2, 2, 3), [(0, 0, 11)] * 2)
    run.tell(Error("w0", run.status.workers[0].uid, 1, run.status.seq_num, "x"))
    run.tell(Reconcile())
    for event in run._events("finding", "w0", 0):
        run.tell(event)
    for event in run._events("finish", "w1", 9):
        run.tell(event)
    run.tell(Reconcile())
    (node,) = status_view(run.status, {})["errorNodes"]
    assert (node["nodeName"], node["reason"], node["kind"]) == ("node-w0-False", "gpu.bad", "hardware")


def worker(name: str, ordinal: int = -1, nproc: int = 1) -> Worker:
    return Worker(name, f"{name}/1", f"node-{name}", "10.0.0.1", nproc, Phase.PENDING, ordinal=ordinal)


def test_who_gave_a_node_rank_has_it() -> None:
    came = (worker("c"), worker("b", 2), worker("a", 0), worker("d"))
    assert [assignment.worker for assignment in assign_ranks(first_order(came))] == ["a", "c", "b", "d"]


def test_a_node_rank_beyond_the_world_comes_last() -> None:
    assert [p.name for p in first_order((worker("a", 7), worker("b", 0)))] == ["b", "a"]


def test_global_ranks_are_consecutive_over_unequal_workers() -> None:
    assignments = assign_ranks((worker("a", nproc=2), worker("b", nproc=8), worker("c", nproc=1)))
    assert [
        (assignment.group_rank, assignment.rank_offset, assignment.nproc) for assignment in assignments
    ] == [
        (0, 0, 2),
        (1, 2, 8),
        (2, 10, 1),
    ]


def test_the_order_follows_from_the_status_alone() -> None:
    status = create(JobSpec("job", "default", 1, 1, 3), 0.0)
    status = step(status, Join("w0", "w0/1", "node", "10.0.0.1", 4), 1.0).status
    assert derive_order(status) == derive_order(status)
    order = derive_order(status)
    assert (order.action.value, order.assignments, order.max_retry) == ("ready", (), 3)
