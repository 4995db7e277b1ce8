"""The values that decisions are based on: a job's specification, its status, and the parts of the status.

Everything here is immutable and has one JSON form (the names of `spec/interfaces.md`: camelCase, units last
in our own additions). Only `core.machine` constructs or changes a `Status`; a test holds that.
"""

from __future__ import annotations

import enum
import hashlib

import msgspec


class Phase(str, enum.Enum):
    """Where a job (or one worker of it) stands."""

    PENDING = "Pending"
    BOOT_CHECKING = "BootChecking"
    RUN_COMMAND = "RunCommand"
    RESTARTING = "Restarting"
    TROUBLESHOOTING = "Troubleshooting"
    SUCCEED = "Succeed"
    FAILED = "Failed"


TERMINAL = frozenset({Phase.SUCCEED, Phase.FAILED})
RECOVERING = frozenset({Phase.RESTARTING, Phase.TROUBLESHOOTING})
BOOTING = frozenset({Phase.PENDING, Phase.BOOT_CHECKING})


class Mode(str, enum.Enum):
    """Who leads the job's ranks: the master, or the agents among themselves, as in plain torchelastic."""

    PROTECTED = "protected"
    INDEPENDENT = "independent"


class Verdict(str, enum.Enum):
    """A detector's opinion of a node while training runs."""

    FROZEN = "frozen"
    DESYNC = "desync"
    STALLED = "stalled"
    UNREACHABLE = "unreachable"
    SLOW = "slow"


class CheckResult(msgspec.Struct, frozen=True, rename="camel"):
    """What one check of one worker found.

    `finding` is a code for machines ("io.timeout", "gpu.missing"; "" when passed), `scope` whose fault the
    finding points at: "hardware", "node", "network", "slow", "software", "unknown" or "". Times in seconds.
    """

    check_type: str
    passed: bool = msgspec.field(name="pass")
    result: str
    time_stamp: float
    duration_s: float
    finding: str = ""
    scope: str = ""
    details: dict[str, float | int | str | bool | None] = {}


class Failure(msgspec.Struct, frozen=True, rename="camel"):
    """One training process that ended badly, as its agent saw it. `time` in wall seconds of that node.

    `frame` is where its exception was raised, "FILE:LINE FUNCTION", "" if it recorded none.
    """

    rank: int
    local_rank: int
    time: float
    exit_code: int | None = None
    signal: str | None = None
    exception: str | None = None
    last_lines: tuple[str, ...] = ()
    after_stop: bool = False
    frame: str = ""


class ErrorNode(msgspec.Struct, frozen=True, rename="camel"):
    """A node that must not take part again, and why. `kind` is "hardware", "slow", "hang" or "manual".

    `time` and `until` (0: no end) in wall seconds; `job` is the one that found it ("" if it wasn't a job).
    """

    node_name: str
    reason: str
    kind: str
    time: float
    job: str
    until: float = 0.0


class NodeMark(msgspec.Struct, frozen=True, rename="camel"):
    """A detector's verdict on a node: a mark only. `time` (wall s) is when it was first made.

    `evict` is the storm guard's reason for allowing the eviction ("" while it has not); `safe`: a checkpoint
    has completed since the mark, so the node can leave.
    """

    node_name: str
    worker: str
    verdict: Verdict
    reason: str
    time: float
    evict: str = ""
    safe: bool = False


class JobSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a job is asked to be; never changes during its life. Waits in seconds.

    The job runs with `worker_num` workers where possible; `min_worker_num` are enough after a loss.
    `requeue`: where too few machines are left, a scheduler starts the job anew.
    """

    job_name: str
    namespace: str
    worker_num: int
    min_worker_num: int
    max_retry: int
    generation: int = 1
    recovery_budget: int = 10
    bootcheck: str = "full"
    bootcheck_attempts: int = 2
    troubleshoot: str = "adaptive"
    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    rejoin_timeout_s: float = 600.0
    retry_decay: int = 0
    requeue: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.min_worker_num <= self.worker_num:
            raise ValueError(
                f"cannot run {self.job_name!r}: 0 < minWorkerNum <= workerNum does not hold "
                f"({self.min_worker_num}, {self.worker_num})"
            )
        if self.max_retry < 0 or self.recovery_budget < 1:
            raise ValueError(f"cannot run {self.job_name!r}: maxRetry must be >= 0 and recoveryBudget >= 1")
        if self.retry_decay < 0:
            raise ValueError(f"cannot run {self.job_name!r}: retryDecay must be >= 0, 0 for never")


def _wire_name(field: str) -> str:
    """The wire name of a `Worker` field: camelCase, with the address as the specification spells it."""
    head, *tail = field.split("_")
    return {"node_ip": "podIP"}.get(field, head + "".join(part.capitalize() for part in tail))


class Worker(msgspec.Struct, frozen=True, rename=_wire_name):
    """One worker: an agent and the training processes it manages.

    Its index in `Status.workers` is its group rank. `risk`: its node's score when it joined
    (`core.policy.node_records`); `fit`: it passed its checks while it waited as a spare. The fields from
    `gone` on are facts that have arrived and that the next `Reconcile` will act upon: `gone` (no live agent),
    `restarted` (the agent was lost or replaced), `failed` (the first Error of this incarnation is this
    worker's), `faulty` (code of the failing check for which this node must leave), `renew` (why this agent
    must re-execute itself; it is doing so while it is `gone`, too), `relieve` (why a spare should replace it,
    as long as a fit one waits).
    """

    name: str
    uid: str
    node_name: str
    node_ip: str
    nproc: int
    inner_phase: Phase
    finished: bool = False
    retries: int = 0
    last_failed_reason: str = ""
    updated_timestamp: float = 0.0
    ordinal: int = -1
    risk: float = 0.0
    store: str = ""
    fit: bool = False
    gone: bool = False
    restarted: bool = False
    failed: bool = False
    faulty: str = ""
    renew: str = ""
    relieve: str = ""


class Status(msgspec.Struct, frozen=True, rename="camel"):
    """A job's durable record: the only state that decisions depend on.

    `entries` counts the entries into Restarting (or back into Pending) since training last ran; `deadline`
    is the wall time at which waiting ends, 0 for none; `store` is the address of the TCPStore that the
    newest order hands out; `checks` the checks that it asks for; `step` the id of the last transition.

    `highest_step`, `saved_step` (the newest checkpoint's, completed at `saved_at` in incarnation `saved_in`)
    and `highest_saved` are training steps, -1 while unknown; `saves` counts checkpoints. `charged`: a failure
    of this incarnation has been charged. `held` (why) and `held_until` (wall s): the recovery waits.
    `last_root`, `last_level`, `last_step`: whose failure the last recovery answered, its level, and the
    highest step then; `renewed`: this recovery has been at level 2. `attempt`: how often the scheduler has
    started the job anew; `suspended`: why it is to do so.
    """

    spec: JobSpec
    phase: Phase
    workers: tuple[Worker, ...] = msgspec.field(name="pods", default=())
    spares: tuple[Worker, ...] = ()
    recover_count: int = 0
    seq_num: int = 0
    incarnation: int = 0
    should_quit: bool = False
    fail_reason: str = ""
    error_nodes: tuple[ErrorNode, ...] = ()
    mode: Mode = Mode.PROTECTED
    entries: int = 0
    deadline: float = 0.0
    store: str = ""
    checks: tuple[str, ...] = ()
    clues: tuple[str, ...] = ()
    root: str = ""
    reschedules: int = 0
    evictions: int = 0
    step: int = 0
    highest_step: int = -1
    saved_step: int = -1
    saved_at: float = 0.0
    saved_in: int = 0
    highest_saved: int = -1
    saves: int = 0
    marks: tuple[NodeMark, ...] = ()
    charged: bool = False
    held: str = ""
    held_until: float = 0.0
    last_root: str = ""
    last_level: int = 0
    last_step: int = -1
    renewed: bool = False
    attempt: int = 0
    suspended: str = ""

    def worker(self, name: str) -> Worker | None:
        """The worker of that name (spares aside), or None."""
        return next((worker for worker in self.workers if worker.name == name), None)

    @property
    def waits(self) -> bool:
        """Whether something is waited for until a wall time."""
        return self.deadline > 0 or self.held_until > 0

    def due_after(self, now: float) -> float:
        """The first wall time after `now` at which waiting ends and a decision is due; 0 for none.

        What ended before has been decided, or waits for more than time.
        """
        return min((at for at in (self.deadline, self.held_until) if at > now), default=0.0)


def digest(status: Status) -> str:
    """A short fingerprint of a status: equal statuses, equal digests (first 16 hex digits of a sha256)."""
    return hashlib.sha256(msgspec.json.encode(status)).hexdigest()[:16]
