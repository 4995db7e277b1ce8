"""The values that decisions are made over: a job's specification, its status, and what the status is made of.

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
    """Who leads the job's ranks: the master, or the agents among themselves (as plain torchelastic)."""

    PROTECTED = "protected"
    INDEPENDENT = "independent"


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
    """One training process that ended badly, as its agent saw it. `time` in wall seconds of that node."""

    rank: int
    local_rank: int
    time: float
    exit_code: int | None = None
    signal: str | None = None
    exception: str | None = None
    last_lines: tuple[str, ...] = ()
    after_stop: bool = False


class ErrorNode(msgspec.Struct, frozen=True, rename="camel"):
    """A node that must not take part again, and why. `kind` is "hardware", "slow" or "manual"."""

    node_name: str
    reason: str
    kind: str
    time: float
    job: str


class JobSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a job is asked to be; never changes during its life. Waits in seconds.

    `worker_num` seats are filled where possible, `min_worker_num` are enough after a loss.
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

    def __post_init__(self) -> None:
        if not 0 < self.min_worker_num <= self.worker_num:
            raise ValueError(
                f"cannot run {self.job_name!r}: 0 < minWorkerNum <= workerNum does not hold "
                f"({self.min_worker_num}, {self.worker_num})"
            )
        if self.max_retry < 0 or self.recovery_budget < 1:
            raise ValueError(f"cannot run {self.job_name!r}: maxRetry must be >= 0 and recoveryBudget >= 1")


def _pod_name(field: str) -> str:
    """The wire name of a `PodInfo` field: camelCase, with the address as the specification spells it."""
    head, *tail = field.split("_")
    return {"pod_ip": "podIP"}.get(field, head + "".join(part.capitalize() for part in tail))


class PodInfo(msgspec.Struct, frozen=True, rename=_pod_name):
    """One worker: an agent and the training processes it manages.

    Its place in `Status.pods` is its group rank. The last four fields are facts that have arrived and that
    the next `Reconcile` will act upon: `gone` (no live agent), `restarted` (the agent was lost or replaced),
    `failed` (the first Error of this incarnation is ours), `faulty` (code of the failing check for which
    this node must leave).
    """

    name: str
    uid: str
    node_name: str
    pod_ip: str
    nproc: int
    inner_phase: Phase
    finished: bool = False
    retries: int = 0
    last_failed_reason: str = ""
    updated_timestamp: float = 0.0
    ordinal: int = -1
    store: str = ""
    gone: bool = False
    restarted: bool = False
    failed: bool = False
    faulty: str = ""


class Status(msgspec.Struct, frozen=True, rename="camel"):
    """A job's durable record: the only state that decisions depend on.

    `entries` counts the entries into Restarting (or back into Pending) since training last ran; `deadline`
    is the wall time at which waiting ends, 0 for none; `store` is the address of the TCPStore that the
    newest order hands out; `checks` the checks that it asks for; `step` the id of the last transition.
    """

    spec: JobSpec
    phase: Phase
    pods: tuple[PodInfo, ...] = ()
    spares: tuple[PodInfo, ...] = ()
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
    step: int = 0

    def pod(self, name: str) -> PodInfo | None:
        """The seated worker of that name, or None."""
        return next((pod for pod in self.pods if pod.name == name), None)


def digest(status: Status) -> str:
    """A short fingerprint of a status: equal statuses, equal digests (first 16 hex digits of a sha256)."""
    return hashlib.sha256(msgspec.json.encode(status)).hexdigest()[:16]
