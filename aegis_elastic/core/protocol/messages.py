"""The message that travels on the bus, in both directions.

One form for everything (section 6 of the specification). The bus is at most once, so a message says what
*is*, not what changed: a heartbeat repeats a worker's newest report, the master repeats its newest order.
A receiver may have read it before; (uid, incarnation, seqNum) decide whether it still counts.

`decode` is the border to the network: what passes it is well typed and within sane bounds, everything else
raises `BadMessage`.
"""

from __future__ import annotations

import enum
import math

import msgspec

from aegis_elastic.core.events import Finding
from aegis_elastic.core.model import CheckResult, Failure
from aegis_elastic.core.protocol.orders import Order

SCHEMA = 1
MESSAGE_BYTES_MAX = 1 << 20
WATCHERS_MAX = 16
WATCHED_BYTES_MAX = 1 << 15  # of one watcher
NAME_CHARS_MAX = 512
COUNTER_MAX = 1 << 53  # what every JSON reader can hold exactly
TIME_MAX = 1e11  # seconds; as wall time that is the year 5138


class BadMessage(ValueError):
    """Bytes that are no valid message; the text says what is wrong with them. The sender's fault."""


class MessageType(str, enum.Enum):
    """The type of a message. `ACK` is also the heartbeat: it acknowledges the newest order received."""

    ACK = "ACK"
    ORDER = "Order"
    ERROR = "Error"
    FINISH = "Finish"


class WirePhase(str, enum.Enum):
    """The phase label of section 6: information for people, nothing is decided by it."""

    BOOTCHECK = "bootcheck"
    COMMAND = "command"
    TROUBLESHOOT = "troubleshoot"


class IndependentEnd(msgspec.Struct, frozen=True, rename="camel"):
    """How an incarnation ended while no master could be reached; every agent of it reports the same."""

    worker: str
    incarnation: int
    reason: str
    failures: tuple[Failure, ...] = ()
    ended: bool = False


class ReportData(msgspec.Struct, frozen=True, omit_defaults=True):
    """The data of a report; which fields apply depends on the message's type.

    `state`: what the agent is doing, one word. `store`: `host:port` of the empty TCPStore that it holds
    ready. `findings`, `checks` belong to Finish, `failures`, `clues`, `reason` to Error, `timings_s`
    (seconds) to either or to `started`: the ranks of this incarnation are running. `alive`: workers that it
    has seen over the training network recently. `independent`: standalone ends that the master may not know
    yet. `heard`: when the newest order was sent by the master's clock, and when it was received by this
    node's. `watched`: the facts of each watcher of its ranks, by the watcher's name; validated by the
    controller that reads them.
    """

    state: str = ""
    store: str = ""
    findings: tuple[Finding, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    failures: tuple[Failure, ...] = ()
    clues: tuple[str, ...] = ()
    reason: str = ""
    timings_s: dict[str, float] = {}
    independent: tuple[IndependentEnd, ...] = ()
    started: bool = False
    alive: tuple[str, ...] = ()
    heard: tuple[float, float] | None = None
    watched: dict[str, msgspec.Raw] = {}


_WIRE_NAMES = {
    "aegis_name": "AegisName",
    "aegis_namespace": "AegisNamespace",
    "worker": "podName",
    "time_stamp": "timeStamp",
    "seq_num": "seqNum",
}


class _Head(msgspec.Struct, frozen=True, kw_only=True, rename=_WIRE_NAMES):
    aegis_name: str
    aegis_namespace: str
    worker: str
    type: MessageType
    phase: WirePhase
    time_stamp: float
    seq_num: int
    uid: str
    incarnation: int
    schema: int = SCHEMA


class _Envelope(_Head, frozen=True, kw_only=True):
    data: msgspec.Raw


class Message(_Head, frozen=True, kw_only=True):
    """One message. `worker` is the sender, or "master" for the master to all.

    `data` is an `Order` for an Order and a `ReportData` for the other types. `time_stamp` is wall time in
    seconds at the sender: information only, clocks differ. `uid` names the life of the agent that sends it
    ("" from the master); `incarnation` and `seq_num` are those of the order that it follows.
    """

    data: Order | ReportData

    def __post_init__(self) -> None:
        if isinstance(self.data, Order) != (self.type is MessageType.ORDER):
            raise ValueError(f"cannot make a message: {self.type.value} with {type(self.data).__name__}")


class _Schema(msgspec.Struct, frozen=True):
    schema: int = SCHEMA


_encoder = msgspec.json.Encoder()
_schema_decoder = msgspec.json.Decoder(_Schema)
_envelope_decoder = msgspec.json.Decoder(_Envelope)
_order_decoder = msgspec.json.Decoder(Order)
_report_decoder = msgspec.json.Decoder(ReportData)


def encode(message: Message) -> bytes:
    """The message as JSON. Raises BadMessage if no receiver would take it (too large, or not UTF-8)."""
    try:
        raw = _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise BadMessage(f"cannot send a message: {error}") from error
    if len(raw) > MESSAGE_BYTES_MAX:
        raise BadMessage(f"cannot send {len(raw)} bytes: a message has at most {MESSAGE_BYTES_MAX}")
    return raw


def decode(raw: bytes) -> Message:
    """The message in these bytes, or BadMessage: whatever they are, never another exception."""
    if len(raw) > MESSAGE_BYTES_MAX:
        raise BadMessage(f"cannot read {len(raw)} bytes: a message has at most {MESSAGE_BYTES_MAX}")
    try:
        # A newer schema may differ everywhere else, so it is decoded first and by itself.
        schema = _schema_decoder.decode(raw).schema
        if schema == SCHEMA:
            return _checked(_envelope_decoder.decode(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"cannot read a message: {error}") from error
    newer = "newer than ours: update this side" if schema > SCHEMA else "no schema that ever was"
    raise BadMessage(f"cannot read a message of schema {schema}: {newer} (ours is {SCHEMA})")


def _checked(envelope: _Envelope) -> Message:
    data: Order | ReportData
    if envelope.type is MessageType.ORDER:
        data = _order_decoder.decode(envelope.data)
        _check_order(data)
    else:
        data = _report_decoder.decode(envelope.data)
        _check_report(data)
    for name in ("aegis_name", "aegis_namespace", "worker"):
        value = getattr(envelope, name)
        if not 0 < len(value) <= NAME_CHARS_MAX:
            raise BadMessage(f"cannot read a message: {_WIRE_NAMES[name]} has {len(value)} characters")
    if len(envelope.uid) > NAME_CHARS_MAX:
        raise BadMessage(f"cannot read a message: uid has {len(envelope.uid)} characters")
    _check_counters(seqNum=envelope.seq_num, incarnation=envelope.incarnation)
    _check_times(timeStamp=envelope.time_stamp)
    head = {name: getattr(envelope, name) for name in _Head.__struct_fields__}
    return Message(**head, data=data)


def _check_order(order: Order) -> None:
    _check_counters(
        seqNum=order.seq_num,
        incarnation=order.incarnation,
        restartCount=order.restart_count,
        recoverCount=order.recover_count,
        maxRetry=order.max_retry,
    )
    for assignment in order.assignments:
        _check_counters(
            groupRank=assignment.group_rank, rankOffset=assignment.rank_offset, nproc=assignment.nproc
        )


def _check_report(data: ReportData) -> None:
    _check_store(data.store)
    _check_times(**data.timings_s)
    if data.heard is not None:
        _check_times(heardSent=data.heard[0], heardAt=data.heard[1])
    _check_watched(data.watched)
    for check in data.checks:
        _check_times(timeStamp=check.time_stamp, durationS=check.duration_s)
    for end in data.independent:
        _check_counters(incarnation=end.incarnation)
    for failure in (*data.failures, *(failure for end in data.independent for failure in end.failures)):
        _check_counters(rank=failure.rank, localRank=failure.local_rank)
        _check_times(time=failure.time)


def _check_watched(watched: dict[str, msgspec.Raw]) -> None:
    if len(watched) > WATCHERS_MAX:
        raise BadMessage(f"cannot read a message: {len(watched)} watchers, at most {WATCHERS_MAX}")
    for name, facts in watched.items():
        size = len(memoryview(facts))
        if size > WATCHED_BYTES_MAX:
            raise BadMessage(
                f"cannot read a message: the facts of {name[:40]!r} have {size} bytes, "
                f"at most {WATCHED_BYTES_MAX}"
            )


def _check_store(address: str) -> None:
    # The order will send every agent there.
    host, _, port = address.rpartition(":")
    if address and not (host and port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= 65535):
        raise BadMessage(f"cannot read a message: store is {address[:100]!r}, want HOST:PORT")


def _check_counters(**counters: int) -> None:
    for name, value in counters.items():
        if not 0 <= value <= COUNTER_MAX:
            raise BadMessage(f"cannot read a message: {name} is {value}, which is no count")


def _check_times(**times: float) -> None:
    for name, value in times.items():
        if not (math.isfinite(value) and 0.0 <= value <= TIME_MAX):
            raise BadMessage(f"cannot read a message: {name} is {value}, which is no time in seconds")
