"""The wire message: what passes the border is well formed, and everything else is one error."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.control.report_events import events_of
from aegis_elastic.core.events import Error, Finding, Finish, Independent, Offer, Started
from aegis_elastic.core.machine import create
from aegis_elastic.core.model import CheckResult, Failure, JobSpec
from aegis_elastic.core.protocol import messages
from aegis_elastic.core.protocol.messages import (
    BadMessage,
    IndependentEnd,
    Message,
    MessageType,
    ReportData,
    WirePhase,
    decode,
    encode,
)
from aegis_elastic.core.protocol.orders import derive_order

FAILURE = Failure(3, 1, 1700000000.5, exit_code=1, exception="ValueError: no", last_lines=("a", "b"))
CHECK = CheckResult("gpu", False, "1 of 8 missing", 1700000000.0, 0.25, "gpu.missing", "hardware", {"n": 7})
FULL = ReportData(
    state="stopping",
    store="10.0.0.1:4000",
    findings=(Finding("gpu", "gpu.missing", "hardware"),),
    checks=(CHECK,),
    failures=(FAILURE,),
    clues=("network",),
    reason="exit code 1",
    timings_s={"stop_s": 0.5},
    independent=(IndependentEnd("w1", 2, "SIGKILL", (FAILURE,)),),
    started=True,
    alive=("w0", "w2"),
)


def report(data: ReportData, kind: MessageType = MessageType.ACK, **changes: Any) -> Message:
    fields: dict[str, Any] = {
        "aegis_name": "job", "aegis_namespace": "default", "worker": "w0", "phase": WirePhase.COMMAND,
        "time_stamp": 1700000000.25, "seq_num": 7, "uid": "w0/1", "incarnation": 2,
    }  # fmt: skip
    return Message(type=kind, data=data, **{**fields, **changes})


def order() -> Message:
    status = create(JobSpec("job", "default", 2, 2, 3), 0.0)
    fields = {"worker": "master", "uid": "", "seq_num": 1, "incarnation": 0}
    head = {
        name: getattr(report(FULL), name) for name in ("aegis_name", "aegis_namespace", "phase", "time_stamp")
    }
    return Message(type=MessageType.ORDER, data=derive_order(status), **{**head, **fields})


@pytest.mark.parametrize(
    "message",
    [report(FULL), report(ReportData(), MessageType.FINISH), report(FULL, MessageType.ERROR), order()],
)
def test_what_is_sent_arrives(message: Message) -> None:
    assert decode(encode(message)) == message


def test_what_watchers_say_arrives_as_they_wrote_it() -> None:
    facts = msgspec.Raw(b'{"any": [1, null]}')
    arrived = decode(encode(report(ReportData(watched={"pace": facts})))).data
    assert isinstance(arrived, ReportData)
    assert {name: bytes(raw) for name, raw in arrived.watched.items()} == {"pace": bytes(facts)}


def test_the_names_on_the_wire_are_the_specifications() -> None:
    wire = json.loads(encode(report(ReportData(state="running"))))
    assert set(wire) == {
        "AegisName", "AegisNamespace", "podName", "type", "phase", "data", "timeStamp", "seqNum", "uid",
        "incarnation", "schema",
    }  # fmt: skip
    assert (wire["type"], wire["phase"], wire["schema"]) == ("ACK", "command", 1)
    assert wire["data"] == {"state": "running"}, "a heartbeat says no more than there is to say"


def test_an_order_holds_an_order_and_a_report_a_report() -> None:
    with pytest.raises(ValueError, match="cannot make a message"):
        report(ReportData(), MessageType.ORDER)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"seqNum": -1}, "seqNum is -1"),
        ({"incarnation": -1}, "incarnation is -1"),
        ({"seqNum": 10**30}, "seqNum"),
        ({"timeStamp": -5}, "timeStamp is -5"),
        ({"timeStamp": 1e300}, "timeStamp"),
        ({"seqNum": "7"}, "Expected `int`"),
        ({"type": "Gossip"}, "Invalid enum value"),
        ({"podName": ""}, "podName has 0 characters"),
        ({"podName": "x" * 1000}, "podName has 1000"),
        ({"uid": "x" * 1000}, "uid has 1000"),
        ({"schema": 2}, "schema 2: newer than ours"),
        ({"schema": 0}, "schema 0"),
        ({"data": {"timings_s": {"stop_s": -1.0}}}, "stop_s is -1.0"),
        ({"data": {"independent": [{"worker": "w", "incarnation": -2, "reason": ""}]}}, "incarnation is -2"),
        ({"data": {"failures": [{"rank": -1, "localRank": 0, "time": 1.0}]}}, "rank is -1"),
        ({"data": {"watched": {str(n): 1 for n in range(17)}}}, "17 watchers, at most 16"),
        ({"data": {"watched": {"pace": "x" * 40_000}}}, "facts of 'pace' have 40002 bytes"),
        ({"data": {"watched": [1]}}, "Expected `object`"),
        ({"data": []}, "Expected `object`"),
    ],
)
def test_absurd_values_are_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    wire = json.loads(encode(report(ReportData())))
    with pytest.raises(BadMessage, match=complaint):
        decode(json.dumps({**wire, **changes}).encode())


def test_a_newer_schema_is_told_even_if_nothing_else_is_understood() -> None:
    with pytest.raises(BadMessage, match="update this side"):
        decode(b'{"schema": 7, "body": "of another shape"}')


def test_absurd_orders_are_refused() -> None:
    wire = json.loads(encode(order()))
    wire["data"]["seats"] = [{"worker": "w", "uid": "u", "groupRank": 0, "rankOffset": -4, "nproc": 1}]
    with pytest.raises(BadMessage, match="rankOffset is -4"):
        decode(json.dumps(wire).encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"null", b"[]", b"\xff\xfe", b'{"schema": 1}', b"[" * 100_000, b'{"x":' * 50_000, b"{" * 1000,
        b'{"schema": 1, "timeStamp": NaN}', b'{"schema": 1e999}', b" " * ((1 << 20) + 1),
    ],
)  # fmt: skip
def test_junk_is_one_error(raw: bytes) -> None:
    with pytest.raises(BadMessage, match="cannot read"):
        decode(raw)


def test_nothing_is_sent_that_nobody_would_take() -> None:
    long = Failure(0, 0, 1.0, last_lines=("x" * messages.MESSAGE_BYTES_MAX,))
    with pytest.raises(BadMessage, match="cannot send"):
        encode(report(ReportData(failures=(long,)), MessageType.ERROR))
    with pytest.raises(BadMessage, match="cannot send"):
        encode(report(ReportData(reason="\udcff"), MessageType.ERROR))


@given(st.binary(max_size=300))
def test_fuzz_any_bytes(raw: bytes) -> None:
    try:
        decode(raw)
    except BadMessage:
        pass


@given(
    st.sampled_from([encode(report(FULL)), encode(report(FULL, MessageType.ERROR)), encode(order())]),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255), st.booleans()), min_size=1, max_size=8),
)
def test_fuzz_damaged_messages(raw: bytes, damage: list[tuple[int, int, bool]]) -> None:
    bad = bytearray(raw)
    for place, byte, cut in damage:
        bad[place % len(bad)] = byte
        if cut and len(bad) > 2:
            del bad[place % len(bad)]
    try:
        message = decode(bytes(bad))
    except BadMessage:
        return
    events_of(message)  # what passes the border can't surprise anybody behind it
    assert decode(encode(message)) == message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.sampled_from([encode(report(FULL)), encode(report(FULL, MessageType.FINISH)), encode(order())]),
    st.lists(st.tuples(st.integers(0, 200), json_values), min_size=1, max_size=3),
)
def test_fuzz_values_of_other_types(raw: bytes, swaps: list[tuple[int, Any]]) -> None:
    wire = json.loads(raw)
    for place, value in swaps:
        inner = wire["data"] if place % 2 and isinstance(wire.get("data"), dict) and wire["data"] else wire
        inner[sorted(inner)[place // 2 % len(inner)]] = value
    try:
        message = decode(json.dumps(wire).encode())
    except BadMessage:
        return
    events_of(message)
    assert decode(encode(message)) == message


def test_a_heartbeat_offers_its_store_and_says_that_it_runs() -> None:
    data = ReportData(state="running", store="10.0.0.1:4000", started=True, timings_s={"start_s": 1.5})
    assert events_of(report(data)) == (
        Offer("w0", "w0/1", "10.0.0.1:4000"),
        Started("w0", "w0/1", 2, {"start_s": 1.5}),
    )
    assert events_of(report(ReportData(state="idle"))) == ()


def test_a_finish_and_an_error_carry_the_identity_of_their_order() -> None:
    finish, error = report(FULL, MessageType.FINISH), report(FULL, MessageType.ERROR)
    assert events_of(finish)[-1] == Finish(
        "w0", "w0/1", 2, 7, FULL.findings, FULL.store, FULL.checks, FULL.timings_s
    )
    assert events_of(error)[-1] == Error(
        "w0", "w0/1", 2, 7, "exit code 1", FULL.failures, FULL.clues, FULL.store, FULL.timings_s
    )


def test_what_happened_while_the_plane_was_away_comes_first_and_in_order() -> None:
    ends = (IndependentEnd("w2", 4, "later", ended=True), IndependentEnd("w1", 3, "earlier", (FAILURE,)))
    events = events_of(report(ReportData(independent=ends, store="10.0.0.1:1"), MessageType.FINISH))
    assert events[:2] == (
        Independent("w1", 3, "earlier", (FAILURE,)),
        Independent("w2", 4, "later", ended=True),
    )
    assert [type(event) for event in events[2:]] == [Offer, Finish]


def test_an_order_is_no_event() -> None:
    assert events_of(order()) == ()
