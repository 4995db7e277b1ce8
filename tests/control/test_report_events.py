"""Which events of an agent's reports are put in line."""

from __future__ import annotations

from aegis_elastic.control import report_events
from aegis_elastic.control.membership import Membership
from aegis_elastic.control.report_events import ReportEvents
from aegis_elastic.core.accounts.journal import begin
from aegis_elastic.core.detection.liveness import Patience
from aegis_elastic.core.events import Event, Started
from aegis_elastic.core.protocol.messages import Message, MessageType, ReportData, WirePhase
from tests.control.planes import spec

STATUS = begin(spec(), 1.0).status


def new_events(events: ReportEvents, uid: str, incarnation: int) -> list[Event]:
    report = Message(
        aegis_name="job",
        aegis_namespace="team",
        worker="a",
        type=MessageType.ACK,
        phase=WirePhase.COMMAND,
        time_stamp=1.0,
        seq_num=1,
        uid=uid,
        incarnation=incarnation,
        data=ReportData(started=True),
    )
    return events.new_events(STATUS, report, 1.0)


def test_a_start_is_an_event_once_and_nothing_of_ten_thousand_restarts_is_kept() -> None:
    events = ReportEvents(Membership(Patience()), 1.0)
    for incarnation in range(1, 10_001):
        assert new_events(events, "u", incarnation) == [Started("a", "u", incarnation)]
        assert new_events(events, "u", incarnation) == []
    assert len(events._started) == 1
    for life in range(1000):
        assert new_events(events, f"u{life}", 10_001) == [Started("a", f"u{life}", 10_001)]
    assert len(events._started) <= report_events.STARTED_MIN + 3
