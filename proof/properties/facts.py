"""What must hold of every fact that is recorded, and of every message that must change nothing."""

from __future__ import annotations

from collections.abc import Callable

from aegis_elastic.core.events import Dismiss
from aegis_elastic.core.model import TERMINAL, Mode, Phase, Status, Worker
from proof.explore import Edge, Machine
from proof.properties.stale import not_current
from proof.worlds import NOW

FactProperty = Callable[[Edge], bool]


def _worker(e: Edge) -> tuple[Worker | None, Worker | None]:
    return e.before.worker(e.move.worker), e.transition.status.worker(e.move.worker)


def _others_untouched(e: Edge) -> bool:
    """A fact changes only the worker that it is about; one of a node (`ReliefIsNoted`) all its workers."""
    all_of_them = ("Reconcile", "LostTogether", "Expire", "Saved", "Relieve")
    if e.move.label in all_of_them or e.move.label.startswith("Independent"):
        return True
    a, b = e.before, e.transition.status
    return [p for p in a.workers if p.name != e.move.worker] == [
        p for p in b.workers if p.name != e.move.worker
    ]


def _finish(e: Edge) -> bool:
    was, now = _worker(e)
    if not e.move.label.startswith("Finish") or was is None or now is None:
        return True
    if e.before.phase in TERMINAL or was.finished:
        return e.transition.status is e.before
    checked = e.before.phase in (Phase.BOOT_CHECKING, Phase.TROUBLESHOOTING)
    found = checked and e.move.label != "Finish"
    faulty = checked and e.move.label == "FinishFaulty"
    # A node that is only slow keeps no worker from training.
    failed = (e.move.label == "FinishBad") if found else was.failed
    return (
        now.finished
        and bool(now.faulty) == faulty
        and now.failed == failed
        and bool(now.last_failed_reason) == found
        and now.updated_timestamp == NOW
        and now.store == getattr(e.move.event, "store", "")
        and (now.gone, now.restarted, now.retries) == (was.gone, was.restarted, was.retries)
    )


def _error(e: Edge) -> bool:
    was, now = _worker(e)
    a, b = e.before, e.transition.status
    if e.move.label != "Error" or was is None or now is None:
        return True
    independent = a.mode is Mode.INDEPENDENT and a.phase not in TERMINAL
    first = not any(p.failed for p in a.workers) and not was.finished and not was.restarted
    if not first or not (a.phase is Phase.RUN_COMMAND or independent):
        return b is a
    return (
        now.failed
        and b.root == was.name
        and b.clues == getattr(e.move.event, "clues", None)
        and now.last_failed_reason == "exit code 1"
        and now.updated_timestamp == NOW
        and now.store == getattr(e.move.event, "store", "")
        and (now.finished, now.gone, now.restarted) == (was.finished, was.gone, was.restarted)
    )


def _ranks_done(s: Status, worker: Worker) -> bool:
    return s.phase is Phase.RUN_COMMAND and worker.finished


def _loss(e: Edge) -> bool:
    """A loss is recorded on a worker, once, unless its ranks had finished. A lost spare is removed."""
    a, b = e.before, e.transition.status
    if e.move.label not in ("Lost", "LostTogether") or a.phase in TERMINAL:
        return True
    who = {e.move.worker} if e.move.label == "Lost" else {p.name for p in a.workers}
    for was, now in zip(a.workers, b.workers, strict=True):
        marks = (now.gone, now.restarted, now.store, now.updated_timestamp)
        wanted = (True, not _ranks_done(a, was), "", NOW) if was.name in who else (
            was.gone, was.restarted, was.store, was.updated_timestamp,
        )  # fmt: skip
        if marks != wanted or (now.finished, now.failed, now.faulty) != (
            was.finished,
            was.failed,
            was.faulty,
        ):
            return False
    return [p.name for p in b.spares] == [p.name for p in a.spares if p.name not in who]


def _arrival(e: Edge) -> bool:
    """First contact: a tainted node is refused, a known worker is back in a new life, others are spares."""
    a, b = e.before, e.transition.status
    if e.move.label not in ("Join", "Restart") or a.phase in TERMINAL:
        return True
    was, now = _worker(e)
    node = getattr(e.move.event, "node_name", "")
    dismissed = [type(x) for x in e.transition.effects]
    if any(n.node_name == node for n in a.error_nodes):
        return b is a and dismissed == [Dismiss]
    if dismissed:
        return False
    if was is None or now is None:
        return _spare_waits(a, b, e.move.worker, getattr(e.move.event, "ordinal", None))
    missed = was.restarted or (not was.gone and not _ranks_done(a, was))
    life = (now.uid, now.node_name, now.gone) == (f"{was.name}.2", node, False)
    same = (now.finished, now.failed, now.faulty, now.retries) == (
        was.finished,
        was.failed,
        was.faulty,
        was.retries,
    )
    return life and same and now.restarted == missed and now.updated_timestamp == NOW and b.spares == a.spares


def _spare_waits(a: Status, b: Status, worker: str, ordinal: int | None) -> bool:
    waiting = [p for p in b.spares if p.name == worker]
    fresh = (
        len(waiting) == 1 and waiting[0].inner_phase is Phase.PENDING and waiting[0].updated_timestamp == NOW
    )
    return (
        fresh
        and waiting[0].ordinal == ordinal
        and b.workers == a.workers
        and [p.name for p in b.spares if p.name != worker] == [p.name for p in a.spares if p.name != worker]
    )


def _offer(e: Edge) -> bool:
    was, now = _worker(e)
    if e.move.label != "Offer" or e.before.phase in TERMINAL or was is None or now is None:
        return True
    return now.store == getattr(e.move.event, "store", "") and now.finished == was.finished


def _quit(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if e.move.label != "Quit" or a.phase in TERMINAL:
        return a.should_quit == b.should_quit
    return b.should_quit and bool(b.fail_reason) and (not a.should_quit or b is a)


def _silent(e: Edge) -> bool:
    """A fact has no effect but the dismissal of an agent that may not join."""
    decided = e.move.label == "Reconcile" or e.move.label.startswith("Independent")
    return decided or all(isinstance(x, Dismiss) for x in e.transition.effects)


FACTS: dict[str, FactProperty] = {
    "FactsAreLocal": _others_untouched,
    "FinishIsNoted": _finish,
    "FirstErrorIsNoted": _error,
    "LossIsNoted": _loss,
    "ArrivalIsNoted": _arrival,
    "OfferIsNoted": _offer,
    "QuitIsNoted": _quit,
    "FactsAreSilent": _silent,
}


def stale_is_rejected(machine: Machine, s: Status) -> str | None:
    """The messages that must change nothing in `s`: the name of the property that one broke, or None.

    NoFinishDoubleProcessed: a second Finish of the same order; StaleFinishRejected: anything of an earlier
    life, incarnation or order, or of an order that was never given.
    """
    if s.phase in TERMINAL:
        return None
    for event in not_current(s):
        if machine.step(s, event, NOW).status is not s:
            duplicate = getattr(event, "uid", "").endswith(".1") and getattr(event, "seq_num", 0) == s.seq_num
            return "NoFinishDoubleProcessed" if duplicate else "StaleFinishRejected"
    return None
