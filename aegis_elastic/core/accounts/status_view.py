"""The view of a status for people and programs: the fields of `aegisctl status --json`."""

from __future__ import annotations

from typing import Any

import msgspec

from aegis_elastic.core.model import Status
from aegis_elastic.core.rank_assignment import assign_ranks


class WorkerView(msgspec.Struct, frozen=True, rename="camel"):
    """One worker with ranks; `ranks` are the global ranks of its training processes."""

    name: str
    node: str
    inner_phase: str
    finished: bool
    retries: int
    last_failed_reason: str
    ranks: tuple[int, ...]


def worker_views(status: Status) -> tuple[WorkerView, ...]:
    """The workers with ranks, in group-rank order."""
    return tuple(
        WorkerView(
            name=worker.name,
            node=worker.node_name,
            inner_phase=worker.inner_phase.value,
            finished=worker.finished,
            retries=worker.retries,
            last_failed_reason=worker.last_failed_reason,
            ranks=tuple(range(assignment.rank_offset, assignment.rank_offset + assignment.nproc)),
        )
        for worker, assignment in zip(status.workers, assign_ranks(status.workers), strict=True)
    )


def status_view(status: Status, plane: dict[str, Any]) -> dict[str, Any]:
    """The status as plain JSON values. `plane`: the control plane's own state, passed on unchanged."""
    spec = status.spec
    return {
        "job": spec.job_name,
        "namespace": spec.namespace,
        "generation": spec.generation,
        "phase": status.phase.value,
        "incarnation": status.incarnation,
        "seqNum": status.seq_num,
        "maxRetry": spec.max_retry,
        "recoverCount": status.recover_count,
        "workers": [
            {**msgspec.to_builtins(worker), "ranks": list(worker.ranks)} for worker in worker_views(status)
        ],
        "errorNodes": [msgspec.to_builtins(node) for node in status.error_nodes],
        "plane": plane,
    }


def beside_training(status: Status) -> dict[str, Any]:
    """Marks, holds, evictions and steps, where there are any; part of `plane` in the view."""
    known = {
        "marks": [msgspec.to_builtins(mark) for mark in status.marks],
        "held": status.held,
        "evictions": status.evictions,
    }
    steps = {"highestStep": status.highest_step, "savedStep": status.saved_step}
    return {
        **{name: value for name, value in known.items() if value},
        **{name: step for name, step in steps.items() if step >= 0},
    }
