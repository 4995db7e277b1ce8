"""Bounded worlds in which the production `step` is explored: who is there, and what may happen to them.

A world is a job's specification and a set of features (what its environment may do). Exploring needs finite
states, so `canonical` forgets what no decision depends on: numbers that only ever grow (seqNum, incarnation,
step) are put back to a base, uids to the worker's first one, times to "none", "expired" or "to come", and
texts to whether there is one. That this forgets nothing that matters is itself checked: stale and future
messages are probed in every state (`stale`), and the phases world is compared with TLC's graph (`conform`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from aegis_elastic.core.diagnosis import recovery
from aegis_elastic.core.events import (
    Act,
    Error,
    Event,
    Evict,
    Finding,
    Finish,
    Fit,
    Hold,
    Independent,
    Join,
    Lost,
    Mark,
    Offer,
    Progress,
    Quit,
    Reconcile,
    Release,
    Relieve,
    Saved,
    Taint,
    Unmark,
    Untaint,
)
from aegis_elastic.core.model import (
    TERMINAL,
    ErrorNode,
    JobSpec,
    Mode,
    NodeMark,
    Phase,
    Status,
    Verdict,
    Worker,
)

# The base to which growing numbers are put back, and the instant at which every event happens.
SEQ, INCARNATION, STEP, NOW = 10, 5, 100, 1.0
# The very instant: a deadline binds when it is reached, not after it.
EXPIRED = NOW
# A checkpoint so old that it is no boundary any more.
LONG_AGO = -1000.0
# The clues that decide more than which checks are run.
DECISIVE = (recovery.POSITION_CLUE, recovery.CONTAINER_CLUE)
# The step to which that of the newest checkpoint is put back.
SAVED = 5

HARDWARE = (Finding("gpu", "gpu.missing", "hardware"),)
NETWORK = (Finding("health", "health.timeout", "network"),)
SLOW = (Finding("health", "health.slow", "slow"),)
BROKEN = (Finding("runtime", "runtime.broken", "software"),)
BROKEN_IO = (Finding("io", "io.timeout", "node"),)


class World(NamedTuple):
    """What is explored. `features` switch kinds of events on (see `moves`); `workers` may join.

    A world `formed` starts with everybody seated, otherwise with an empty job.
    """

    name: str
    spec: JobSpec
    workers: tuple[str, ...]
    features: frozenset[str]
    formed: bool = True


class Move(NamedTuple):
    """One thing that can happen: its label (the name in the models), whom it concerns, the event."""

    label: str
    worker: str
    event: Event | None


def spec(
    workers: int, max_retry: int, *, least: int | None = None, budget: int = 2, decay: int = 0
) -> JobSpec:
    """A job of that many workers with small bounds, so that every limit is reached."""
    return JobSpec(
        job_name="job",
        namespace="proof",
        worker_num=workers,
        min_worker_num=workers if least is None else least,
        max_retry=max_retry,
        recovery_budget=budget,
        retry_decay=decay,
    )


def names(count: int) -> tuple[str, ...]:
    return tuple(f"w{i + 1}" for i in range(count))


# What `spec/Phases.tla` calls a thing that may happen, and the feature of a world that lets it happen.
# (Of earned retries a property speaks, SavedIsNoted: a checkpoint tells of more than the model knows of.)
RARE = {"hold": "hold", "renew": "broken"}


def phases(workers: int, max_retry: int, budget: int = 2, rare: tuple[str, ...] = ()) -> World:
    """The world of `spec/Phases.tla`: a fixed set of workers that finish, restart, fail; and a quit.

    `rare`: what else may happen, by the names of `RARE`.
    """
    features = frozenset({"finish", "restart", "error", "quit"})
    features |= {RARE[name] for name in rare}
    job = spec(workers, max_retry, budget=budget)
    return World(" ".join([f"phases {workers}/{max_retry}", *rare]), job, names(workers), features)


def _world(name: str, job: JobSpec, workers: int, features: str, formed: bool = False) -> World:
    return World(name, job, names(workers), frozenset(features.split()), formed)


# Each shows one side of a job that the phases world holds still; all begin where their question begins.
ELASTIC: tuple[World, ...] = (
    _world("spares", spec(2, 1), 3, "finish lost together join error", formed=True),
    _world("shrinking", spec(2, 1, least=1), 2, "finish lost join error expire", formed=True),
    _world("faulty nodes", spec(2, 1), 3, "finish hardware lost join error", formed=True),
    _world("bootcheck", spec(2, 0, least=1), 2, "finish software hardware lost join offer quit stores"),
    _world("forming", spec(2, 0, least=1), 3, "finish lost join expire"),
    _world("stores", spec(2, 1), 2, "finish lost join error stores", formed=True),
    _world("outage", spec(2, 2), 2, "finish lost together join error independent ended quit", formed=True),
    _world("independent", spec(2, 0), 2, "finish lost join error expire quit"),
    _world("evictions", spec(2, 1, budget=1), 3, "finish join error slow saved fit", formed=True),
    _world("hangs", spec(2, 1, budget=1), 3, "finish join hung act fit", formed=True),
    _world("holds", spec(2, 1, budget=1), 2, "finish lost join error hold expire quit", formed=True),
    _world("renewals", spec(2, 1, budget=1), 3, "finish lost join broken fit expire", formed=True),
    _world("relieved", spec(2, 1, budget=1), 3, "finish join error relieve fit expire", formed=True),
    _world("moved marks", spec(1, 1, budget=1), 2, "finish lost join slow saved", formed=True),
    _world("stuck", spec(2, 2, budget=1), 2, "finish error join progress", formed=True),
)


def canonical(s: Status) -> Status:
    """The representative of all statuses that differ only in what no decision depends on."""
    return msgspec.structs.replace(
        s,
        workers=tuple(_canonical_pod(worker) for worker in s.workers),
        spares=tuple(_canonical_pod(worker) for worker in s.spares),
        seq_num=SEQ,
        incarnation=INCARNATION,
        step=STEP,
        fail_reason="why" if s.fail_reason else "",
        error_nodes=tuple(
            ErrorNode(n, "", "hardware", 0.0, "job") for n in sorted({n.node_name for n in s.error_nodes})
        ),
        deadline=_canonical_time(s.deadline),
        store="",
        checks=(),
        clues=tuple(clue for clue in s.clues if clue in DECISIVE and s.phase is Phase.RUN_COMMAND),
        root=next((worker.name for worker in s.workers if worker.failed), ""),
        reschedules=0,
        evictions=0,
        saves=s.saves % s.spec.retry_decay if s.spec.retry_decay else 0,
        saved_in=INCARNATION if s.saved_step >= 0 and s.saved_in == s.incarnation else 0,
        **_canonical_marks(s),
        **_canonical_progress(s),
    )


def _canonical_marks(s: Status) -> dict[str, Any]:
    """Marks without their reasons. The time of the last checkpoint matters as long as it could be used."""
    # What is left standing when all is over is nobody's any more.
    if s.phase in TERMINAL:
        return {
            "marks": (),
            "saved_at": 0.0,
            "charged": False,
            "renewed": False,
            "held": "",
            "held_until": 0.0,
        }
    marks = [NodeMark(m.node_name, "", m.verdict, "", 0.0, "yes" if m.evict else "", m.safe) for m in s.marks]
    usable = any(m.safe and not m.evict for m in marks)
    return {
        "marks": tuple(sorted(marks, key=lambda m: (m.node_name, m.verdict.value))),
        "saved_at": s.saved_at if usable and s.saved_at == NOW else LONG_AGO,
        "held": "why" if s.held else "",
        "held_until": _canonical_time(s.held_until),
    }


def _canonical_progress(s: Status) -> dict[str, Any]:
    """Steps are unknown, further than at the last failure, or stuck there; only then its root matters."""
    stuck = 0 <= s.highest_step <= s.last_step
    return {
        "highest_step": min(s.highest_step, 0),
        "last_step": 0 if stuck else -1,
        "last_root": s.last_root if stuck else "",
        "last_level": s.last_level if stuck else 0,
        # A newer checkpoint may be of a lower step than an older one: after a restart from farther back.
        "saved_step": SAVED if s.saved_step >= 0 else -1,
        "highest_saved": SAVED + (s.highest_saved > s.saved_step) if s.saved_step >= 0 else -1,
    }


def _canonical_pod(worker: Worker) -> Worker:
    return Worker(
        name=worker.name,
        uid=f"{worker.name}.1" if worker.uid else "",
        node_name=worker.node_name,
        node_ip="",
        nproc=1,
        ordinal=worker.ordinal,
        inner_phase=worker.inner_phase,
        finished=worker.finished,
        retries=worker.retries,
        store=worker.store,
        gone=worker.gone,
        restarted=worker.restarted,
        failed=worker.failed,
        faulty="yes" if worker.faulty else "",
        fit=worker.fit,
        renew=_canonical_renew(worker.renew),
        relieve="yes" if worker.relieve else "",
    )


def _canonical_renew(why: str) -> str:
    """Broken io may be the node's; whatever else is broken is not."""
    return "io.x" if why.startswith("io.") else "yes" if why else ""


def _canonical_time(deadline: float) -> float:
    return deadline if deadline == 0.0 or deadline > NOW else EXPIRED


def moves(world: World, s: Status) -> Iterator[Move]:
    """Everything that can happen next in this world. `event` None stands for time passing the deadline."""
    on = world.features
    yield Move("Reconcile", "", Reconcile())
    if "quit" in on:
        yield Move("Quit", "", Quit("someone asked"))
    if "expire" in on and s.deadline > NOW:
        yield Move("Expire", "", None)
    if "together" in on and all(not worker.gone for worker in s.workers):
        yield Move("LostTogether", "", Lost(tuple((worker.name, worker.uid) for worker in s.workers), "rack"))
    for worker in s.workers:
        yield from _moves_of(on, s, worker)
    for spare in s.spares:
        yield from _moves_of_taints(on, spare.node_name)
        if "fit" in on:
            yield Move("Fit", spare.name, Fit(spare.name, spare.uid, not spare.fit))
        if "lost" in on:
            yield Move("Lost", spare.name, Lost(((spare.name, spare.uid),), "killed"))
        if "join" in on:
            yield Move("Join", spare.name, join(spare.name, 2, on))
    if "join" in on:
        yield from (Move("Join", w, join(w, 2, on)) for w in world.workers if not _present(s, w))
    yield from _moves_of_all(on, s)


def _moves_of_all(on: frozenset[str], s: Status) -> Iterator[Move]:
    """What concerns no single worker: checkpoints, what is known of progress, and dependencies."""
    if "saved" in on:
        new = SAVED + 10
        yield Move("Saved", "", Saved(new, "ckpt", "dcp", NOW))
        if s.saved_step >= 0:
            yield Move("SavedAgain", "", Saved(s.saved_step, "ckpt", "dcp", NOW))
            yield Move("SavedLower", "", Saved(s.saved_step - 1, "ckpt", "dcp", NOW))
        if s.saved_at == NOW:
            yield Move("TrainsOn", "", None)
    if "progress" in on:
        # The step of the last failure once more, and one that nobody has seen before.
        yield Move("Progress", "", Progress(s.highest_step + 1))
        yield Move("ProgressAgain", "", Progress(s.highest_step))
    if "hold" in on:
        yield Move("Hold", "", Hold("storage is down", NOW + 100.0))
        yield Move("Release", "", Release("storage is back"))
        yield Move("HoldOver", "", Hold("too late", NOW))
    if "slow" in on:
        # A mark stays with its node when the worker moves: no worker is there that could leave.
        seated = {worker.node_name for worker in s.workers}
        for mark in s.marks:
            if mark.node_name not in seated:
                yield Move("EvictGone", mark.node_name, Evict(mark.node_name, "persisted"))
    if "taint" in on:
        for node in s.error_nodes:
            yield Move("Untaint", node.node_name, Untaint(node.node_name, "repaired"))
            yield Move("TaintAgain", node.node_name, Taint(node.node_name, node.reason, node.kind))


def _moves_of_marks(on: frozenset[str], s: Status, worker: Worker) -> Iterator[Move]:
    who, node = worker.name, worker.node_name
    for kind, verdict in (("slow", Verdict.SLOW), ("hung", Verdict.DESYNC)):
        if kind in on:
            yield Move(f"Mark {kind}", who, Mark(node, who, verdict, "behind"))
            yield Move(f"Unmark {kind}", who, Unmark(node, verdict, "caught up"))
    if "slow" in on or "hung" in on:
        yield Move("Evict", who, Evict(node, "persisted"))
    if "act" in on:
        yield Move("Act", who, Act(who, Verdict.DESYNC.value, "persisted"))
        yield Move("ActManual", who, Act(who, "manual", "asked"))


def _moves_of_taints(on: frozenset[str], node: str) -> Iterator[Move]:
    if "taint" in on:
        yield Move("Taint", node, Taint(node, "bad", "hardware"))
        yield Move("Untaint", node, Untaint(node, "repaired"))


def _moves_of(on: frozenset[str], s: Status, worker: Worker) -> Iterator[Move]:
    who = worker.name
    if "restart" in on:
        yield Move("Restart", who, join(who, 2, on))
    if "lost" in on and not worker.gone:
        yield Move("Lost", who, Lost(((who, worker.uid),), "killed"))
    if "independent" in on:
        yield Move("Independent", who, Independent(who, s.incarnation, "exit code 1"))
    if "ended" in on:
        yield Move("IndependentEnd", who, Independent(who, s.incarnation, "exit code 1", ended=True))
    yield from _moves_of_marks(on, s, worker)
    if "relieve" in on:
        yield Move("Relieve", who, Relieve(worker.node_name, "failed too often today"))
    if worker.gone:
        return
    held = address(who) if "stores" in on else ""
    yield Move("Finish", who, finish(s, worker, store=held))
    if "error" in on:
        yield Move("Error", who, error(s, worker, store=held))
    if "progress" in on:
        for clue in DECISIVE:
            with_clue = msgspec.structs.replace(error(s, worker), clues=(clue,))
            yield Move(f"Error {clue}", who, with_clue)
    if "offer" in on and s.phase is Phase.PENDING and not worker.store:
        yield Move("Offer", who, Offer(who, worker.uid, address(who)))
    if worker.finished:
        return
    # Findings that come while training runs (they can't, in truth) are nobody's verdict.
    if "hardware" in on and s.phase in (Phase.BOOT_CHECKING, Phase.TROUBLESHOOTING, Phase.RUN_COMMAND):
        yield Move("FinishFaulty", who, finish(s, worker, findings=HARDWARE, store=held))
    if "broken" in on and s.phase is Phase.TROUBLESHOOTING:
        yield Move("FinishBroken", who, finish(s, worker, findings=BROKEN, store=held))
    if "io" in on and s.phase is Phase.TROUBLESHOOTING:
        yield Move("FinishBrokenIo", who, finish(s, worker, findings=BROKEN_IO, store=held))
    if "software" in on and s.phase is Phase.BOOT_CHECKING:
        yield Move("FinishBad", who, finish(s, worker, findings=NETWORK, store=held))
        yield Move("FinishSlow", who, finish(s, worker, findings=SLOW, store=held))


def _present(s: Status, name: str) -> bool:
    return any(worker.name == name and not worker.gone for worker in (*s.workers, *s.spares))


def address(worker: str) -> str:
    return f"{worker}:1"


def join(worker: str, life: int, on: frozenset[str] = frozenset()) -> Join:
    """First contact of that life of a worker; every worker has a node of its own, or all share one."""
    node = "node-of-all" if "shared" in on else f"node-of-{worker}"
    ordinal = int(worker[1:]) - 1 if "ordinals" in on else -1
    return Join(worker, f"{worker}.{life}", node, "", 1, ordinal)


def finish(s: Status, worker: Worker, *, findings: tuple[Finding, ...] = (), store: str = "") -> Finish:
    """A current Finish of that worker."""
    return Finish(worker.name, worker.uid, s.incarnation, s.seq_num, findings, store)


def error(s: Status, worker: Worker, *, store: str = "") -> Error:
    """A current Error of that worker."""
    return Error(
        worker.name, worker.uid, s.incarnation, s.seq_num, "exit code 1", clues=("network",), store=store
    )


def shape(s: Status) -> tuple[object, ...]:
    """The variables of `spec/Phases.tla`: what the phases world compares with TLC."""
    return (
        s.phase.value,
        s.should_quit,
        s.recover_count,
        s.entries,
        s.charged,
        "over" if s.held and s.held_until <= NOW else "held" if s.held else "no",
        s.renewed,
        tuple(
            (p.inner_phase.value, p.finished, p.retries, p.restarted, p.failed, _renewing(s, p))
            for p in s.workers
        ),
    )


def _renewing(s: Status, worker: Worker) -> str:
    if not worker.renew or s.phase in TERMINAL:
        return "no"
    return "away" if worker.gone else "wanted"


def protected(s: Status) -> bool:
    return s.mode is Mode.PROTECTED


# Small worlds in which mutants are hunted, smallest first: every kind of event, every bound reached soon.
SMALL: tuple[World, ...] = (
    _world("small stuck", spec(1, 2, budget=1), 1, "finish join error progress", formed=True),
    _world("relief", spec(1, 1, budget=1), 2, "finish lost join error relieve hardware fit", formed=True),
    _world("shared relief", spec(2, 1, budget=1), 3, "finish join error relieve fit shared", formed=True),
    _world("both ways", spec(1, 1), 2, "finish join error relieve broken hardware slow fit", formed=True),
    _world("small taints", spec(1, 0, budget=1), 3, "finish join taint", formed=True),
    _world("earning", spec(1, 1, budget=1, decay=1), 1, "finish error saved", formed=True),
    _world("small renewals", spec(2, 1, budget=2), 2, "finish join broken io error", formed=True),
    _world("late renewals", spec(1, 1, budget=1), 2, "finish join io fit expire error", formed=True),
    _world("held renewals", spec(1, 1, budget=2), 1, "finish join broken error hold", formed=True),
    _world("replaced renewals", spec(2, 1, budget=2), 3, "finish join io fit error", formed=True),
    _world("spared", spec(2, 0, least=1, budget=1), 2, "finish slow saved expire", formed=True),
    _world("lost while hung", spec(1, 1, budget=1), 1, "finish lost restart hung act", formed=True),
    _world("small hangs", spec(2, 1, budget=1), 2, "finish hung act", formed=True),
    _world("long holds", spec(1, 1, budget=2), 1, "finish lost join hold expire", formed=True),
    _world("small holds", spec(2, 0, budget=1), 2, "finish lost error hold hardware expire", formed=True),
    _world("decay", spec(2, 2, budget=1, decay=2), 2, "finish error saved", formed=True),
    _world(
        "small bootcheck", spec(2, 0, budget=1), 2, "finish software hardware lost join offer stores ordinals"
    ),
    _world("shared node", spec(2, 1, budget=1), 3, "finish hardware join error shared", formed=True),
    _world("small faulty", spec(2, 1, budget=1), 3, "finish hardware join error", formed=True),
    _world(
        "small outage",
        spec(2, 1, budget=1),
        2,
        "finish lost join error independent ended stores",
        formed=True,
    ),
    _world("small stores", spec(2, 0, budget=1), 2, "finish lost join error stores", formed=True),
    _world("three independent", spec(3, 0, budget=1), 3, "finish lost error expire", formed=True),
    _world("small forming", spec(2, 0, least=1, budget=1), 2, "finish lost join expire"),
    phases(2, 1),
    _world("crowd", spec(3, 1, least=2, budget=1), 3, "finish lost error expire", formed=True),
    _world("small independent", spec(2, 0, budget=1), 2, "finish lost join error expire quit"),
    _world("small spares", spec(2, 0, budget=1), 3, "finish together lost join", formed=True),
    _world("small shrinking", spec(2, 0, least=1, budget=1), 2, "finish lost join error expire", formed=True),
    _world("small evictions", spec(2, 0, budget=1), 3, "finish join slow saved fit", formed=True),
)
