"""Events: what can happen to a job, as values. Effects: what `step` wants done.

Events are facts from outside (a worker joined, was lost, finished its order, failed, a request to quit), and
`Reconcile`, on which the machine decides what follows from the facts. Facts that arrive together are
therefore judged together: two agents lost in one moment are two counted losses, not one counted and one free.
"""

from __future__ import annotations

from typing import ClassVar, get_args

import msgspec

from aegis_elastic.core.model import CheckResult, Failure, Verdict


class _Event(msgspec.Struct, frozen=True, tag_field="type", rename="camel"):
    """Base of all events: one JSON object each, distinguished by `type`.

    `in_log`: worth a line of the log for people. `in_journal_unchanged`: worth a line of the journal even if
    it changed nothing and has no effects; what is reported again and again is not.
    """

    in_log: ClassVar[bool] = True
    in_journal_unchanged: ClassVar[bool] = True


class Finding(msgspec.Struct, frozen=True, rename="camel"):
    """A failed check: its name, the code of what it found, and whose fault that points at."""

    check: str
    finding: str
    scope: str


class Join(_Event, tag="join", frozen=True, rename="camel"):
    """An agent made first contact. A known `worker` with another `uid` is that agent's next life.

    `nproc` training processes; `ordinal` the node rank that the user gave (-1: none); `node_ip` numeric;
    `risk` the node's score over jobs (`core.policy.node_records`, 0: clean), which orders waiting spares.
    """

    in_log: ClassVar[bool] = False
    in_journal_unchanged: ClassVar[bool] = False

    worker: str
    uid: str
    node_name: str
    node_ip: str
    nproc: int
    ordinal: int = -1
    risk: float = 0.0

    def __post_init__(self) -> None:
        if not self.worker or not self.uid or self.nproc < 1:
            raise ValueError(f"cannot join: worker, uid and nproc >= 1 are needed (got {self!r})")


class Lost(_Event, tag="lost", frozen=True, rename="camel"):
    """Agents that are known to have ended: the (worker, uid) pairs detected together."""

    agents: tuple[tuple[str, str], ...]
    reason: str


class Offer(_Event, tag="offer", frozen=True, rename="camel"):
    """A worker holds an empty TCPStore ready at `store` (`host:port`) for the next process group."""

    in_log: ClassVar[bool] = False
    in_journal_unchanged: ClassVar[bool] = False

    worker: str
    uid: str
    store: str


class Finish(_Event, tag="finish", frozen=True, rename="camel"):
    """A worker has carried out the order `seq_num` of this incarnation.

    `findings`: its failed checks. `store`: address of the TCPStore that it holds ready for the next start.
    `timings_s`: how long the parts of its work took ("stop_s", "diagnose_s").
    """

    in_log: ClassVar[bool] = False
    in_journal_unchanged: ClassVar[bool] = False

    worker: str
    uid: str
    incarnation: int
    seq_num: int
    findings: tuple[Finding, ...] = ()
    store: str = ""
    checks: tuple[CheckResult, ...] = ()
    timings_s: dict[str, float] = {}


class Started(_Event, tag="started", frozen=True, rename="camel"):
    """A worker's training processes of this incarnation are running; recorded, nothing is decided by it.

    `timings_s`: "rendezvous_s" and "start_s", from the order's arrival to the last process started; later,
    once for all ranks, "first_step_s", from there until every rank had made a step.
    """

    worker: str
    uid: str
    incarnation: int
    timings_s: dict[str, float] = {}


class Error(_Event, tag="error", frozen=True, rename="camel"):
    """Training failed on a worker whose agent lives.

    `clues` are codes that troubleshooting may need (`core.diagnosis.recovery`); `timings_s` has "detect_s",
    from the death of the process to this report. `clock`: between which seconds the master's clock is ahead
    of that node's (`core.diagnosis.clocks`), None if that isn't known.
    """

    worker: str
    uid: str
    incarnation: int
    seq_num: int
    reason: str
    failures: tuple[Failure, ...] = ()
    clues: tuple[str, ...] = ()
    store: str = ""
    timings_s: dict[str, float] = {}
    clock: tuple[float, float] | None = None


class Independent(_Event, tag="independent", frozen=True, rename="camel"):
    """While the plane was unreachable, `incarnation` ended by `worker`'s failure and the agents restarted
    standalone.

    Every agent reports it when the plane is back; the first report counts, the others change nothing.
    `ended`: the limit was reached and the agents closed the job instead of restarting.
    """

    worker: str
    incarnation: int
    reason: str
    failures: tuple[Failure, ...] = ()
    ended: bool = False


class Quit(_Event, tag="quit", frozen=True, rename="camel"):
    """A request from outside to close the job."""

    reason: str


class Requeued(_Event, tag="requeued", frozen=True, rename="camel"):
    """The scheduler has ended all agents and started others, for the `attempt`-th time."""

    attempt: int


class Noted(_Event, tag="noted", frozen=True, rename="camel"):
    """An observation for the journal; nothing is decided by it.

    `code` is for machines ("memory.leak", "guard.would_act"), `time` in wall seconds of the observer.
    """

    worker: str
    node_name: str
    code: str
    detail: str
    time: float


class Progress(_Event, tag="progress", frozen=True, rename="camel"):
    """The highest step that training is known to have reached; given before a decision that depends on it."""

    in_log: ClassVar[bool] = False
    in_journal_unchanged: ClassVar[bool] = False

    step: int


class Saved(_Event, tag="saved", frozen=True, rename="camel"):
    """A checkpoint of this step is complete: from here training can go on, so now a node may be evicted.

    `kind` is the framework's ("dcp", "megatron", ...), `time` in wall seconds of the observer.
    """

    in_journal_unchanged: ClassVar[bool] = False

    step: int
    path: str
    kind: str
    time: float


class Mark(_Event, tag="mark", frozen=True, rename="camel"):
    """A detector's verdict on a node. It ends nothing: that needs the storm guard's `Act` or `Evict`.

    `worker` is the one that showed it; the mark belongs to the node and stays when the worker moves.
    """

    in_journal_unchanged: ClassVar[bool] = False

    node_name: str
    worker: str
    verdict: Verdict
    reason: str


class Unmark(_Event, tag="unmark", frozen=True, rename="camel"):
    """The condition is over: what was allowed because of it no longer is."""

    in_journal_unchanged: ClassVar[bool] = False

    node_name: str
    verdict: Verdict
    reason: str


class Act(_Event, tag="act", frozen=True, rename="camel"):
    """The storm guard allows the restart of a frozen or desynced rank now: counts as an Error of that worker.

    `verdict` is that of the mark, or "manual": a restart on request, which needs no mark.
    """

    worker: str
    verdict: str
    reason: str


class Evict(_Event, tag="evict", frozen=True, rename="camel"):
    """The storm guard allows an eviction: of a slow node at a checkpoint boundary, of a hung one now."""

    node_name: str
    reason: str


class Relieve(_Event, tag="relieve", frozen=True, rename="camel"):
    """Automation has done all that it may to this node today: recovery from its exit should replace its
    workers by spares rather than start there once more.
    """

    node_name: str
    reason: str


class Fit(_Event, tag="fit", frozen=True, rename="camel"):
    """A waiting spare has been checked: `fit` if it passed bootcheck and performance."""

    in_journal_unchanged: ClassVar[bool] = False

    worker: str
    uid: str
    fit: bool
    reason: str = ""


class Taint(_Event, tag="taint", frozen=True, rename="camel"):
    """The cluster's ErrorNodes list this node: it is refused, until `until` (wall seconds; 0: no end)."""

    in_journal_unchanged: ClassVar[bool] = False

    node_name: str
    reason: str
    kind: str
    until: float = 0.0


class Untaint(_Event, tag="untaint", frozen=True, rename="camel"):
    """The node may be used again."""

    in_journal_unchanged: ClassVar[bool] = False

    node_name: str
    reason: str


class Hold(_Event, tag="hold", frozen=True, rename="camel"):
    """The nodes are not at fault: a dependency is down for all, or too many fail together.

    The recovery waits for `Release`, at most until `until` (wall s); this incarnation's charge is refunded.
    """

    in_journal_unchanged: ClassVar[bool] = False

    reason: str
    until: float


class Release(_Event, tag="release", frozen=True, rename="camel"):
    """The dependency that the recovery waited for is back."""

    in_journal_unchanged: ClassVar[bool] = False

    reason: str


class Relaunched(_Event, tag="relaunched", frozen=True, rename="camel"):
    """The platform recreates these machines, whose workers never joined; wait until `until` (wall s)."""

    machines: tuple[str, ...]
    until: float
    reason: str


class Cleared(_Event, tag="cleared", frozen=True, rename="camel"):
    """Workers never joined, and the platform doesn't control this job: all its machines are recreated, one
    retry is counted, and what joins in their place runs as a plain job.
    """

    machines: tuple[str, ...]
    reason: str


class Reconcile(_Event, tag="reconcile", frozen=True, rename="camel"):
    """Decide what follows from the facts and from the time that has passed."""


Event = (
    Join | Lost | Offer | Finish | Started | Error | Independent | Quit | Requeued | Noted | Progress | Saved
    | Mark | Unmark | Act | Evict | Relieve | Fit | Taint | Untaint | Hold | Release | Relaunched | Cleared
    | Reconcile
)  # fmt: skip
EVENT_TYPES: tuple[type, ...] = get_args(Event)


class Publish(msgspec.Struct, frozen=True, tag_field="type", tag="publish", rename="camel"):
    """Send the new status's order (`core.protocol.orders.derive_order`), and repeat it until acknowledged."""

    step: int
    seq_num: int


class RecordErrorNode(msgspec.Struct, frozen=True, tag_field="type", tag="recordErrorNode", rename="camel"):
    """Write the node into the cluster's ErrorNodes, so that later rendezvous refuse it; have it isolated."""

    step: int
    node_name: str
    reason: str
    kind: str


class Dismiss(msgspec.Struct, frozen=True, tag_field="type", tag="dismiss", rename="camel"):
    """Direct this agent to leave: its node is faulty or refused, or the agent is unknown here."""

    step: int
    worker: str
    uid: str
    reason: str


class Renew(msgspec.Struct, frozen=True, tag_field="type", tag="renew", rename="camel"):
    """Level 2: this agent re-executes itself in a clean process, and joins with a new uid."""

    step: int
    worker: str
    uid: str
    reason: str


class Page(msgspec.Struct, frozen=True, tag_field="type", tag="page", rename="camel"):
    """Call an operator. Pages of one `key` are one incident."""

    step: int
    key: str
    text: str
    urgent: bool = False


class Close(msgspec.Struct, frozen=True, tag_field="type", tag="close", rename="camel"):
    """The job has ended: order all to close, write the report, archive the record."""

    step: int
    outcome: str
    reason: str


class Remake(msgspec.Struct, frozen=True, tag_field="type", tag="remake", rename="camel"):
    """Have the platform recreate these machines."""

    step: int
    machines: tuple[str, ...]
    reason: str


Effect = Publish | RecordErrorNode | Dismiss | Renew | Page | Close | Remake
