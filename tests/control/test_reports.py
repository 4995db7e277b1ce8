"""What of an agent's reports is put in line."""

from __future__ import annotations

from aegis_elastic.control import reports
from aegis_elastic.control.membership import Membership
from aegis_elastic.control.reports import ReportIntake
from aegis_elastic.core.accounts.journal import begin
from aegis_elastic.core.detection.liveness import Patience
from aegis_elastic.core.events import Event, Started
from aegis_elastic.core.protocol.messages import Message, MessageType, ReportData, WirePhase
from tests.control.planes import spec

STATUS = begin(spec(), 1.0).status


def told(all_of: ReportIntake, uid: str, incarnation: int) -> Event | None:
    message = Message(
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
    return all_of.sort_in(STATUS, Started("a", uid, incarnation), message, 1.0)


def test_a_start_is_told_once_and_nothing_of_ten_thousand_restarts_is_kept() -> None:
    all_of = ReportIntake(Membership(Patience()), 1.0)
    for incarnation in range(1, 10_001):
        assert told(all_of, "u", incarnation) is not None
        assert told(all_of, "u", incarnation) is None
    assert len(all_of._told_started) == 1
    for life in range(1000):
        assert told(all_of, f"u{life}", 10_001) is not None
    assert len(all_of._told_started) <= reports.STARTED_MIN + 3
