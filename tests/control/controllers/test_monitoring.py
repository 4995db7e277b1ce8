"""Notes of agents to the master: by gRPC, signed with what first contact gave; into the journal, once,
bounded.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from aegis_elastic.bus import tls
from aegis_elastic.bus.contact import notes
from aegis_elastic.bus.contact.notes import Envelope, Note, NoteRefused
from aegis_elastic.bus.credentials import NKey
from aegis_elastic.control.controllers.monitoring import NOTED_MAX, MonitoringController
from aegis_elastic.core.detection.anomalies import Anomaly
from aegis_elastic.core.events import Noted
from aegis_elastic.core.machine.change import create
from aegis_elastic.core.model import JobSpec
from aegis_elastic.core.protocol.messages import Message, MessageType, ReportData, WirePhase
from tests.control.conftest import Hold, MakeAgent
from tests.control.host.test_grpc_server import call
from tests.control.planes import Held, children, meet, wait_for

LEAK = Anomaly("memory.growth", 3, 1234.5, "rank 3: grows", {"slope_bytes_s": 2.5})


def noted(plane: Held, worker: str = "a") -> list[Noted]:
    events = [line.event for line in plane.journal()]
    return [event for event in events if isinstance(event, Noted) and event.worker == worker]


class Writer:
    """A worker that has made first contact and does nothing but write notes."""

    def __init__(self, plane: Held) -> None:
        self.plane, self.worker, self.uid = plane, f"w-{os.urandom(4).hex()}", os.urandom(8).hex()
        self.key = NKey.generate()
        self.place = meet(plane, self.worker, self.key, uid=self.uid)

    def note(self, *anomalies: Anomaly, number: int = 1, **changes: Any) -> Note:
        spec = self.plane.config.spec
        whole = Note(spec.namespace, spec.job_name, self.worker, self.uid, number, anomalies or (LEAK,))
        return msgspec.structs.replace(whole, **changes)

    def send(self, note: Note, key: NKey | None = None, jwt: str = "") -> None:
        where = "127.0.0.1", self.plane.host.port, self.place.certificate_pem
        notes.send(*where, key or self.key, jwt or self.place.welcome.jwt, note, 10.0)

    def noted(self) -> list[Noted]:
        return noted(self.plane, self.worker)


def test_what_an_agent_notes_is_a_line_of_the_journal_and_changes_nothing(
    hold: Hold, agent: MakeAgent
) -> None:
    plane = hold()
    one = agent(plane, "a")
    one.run()
    before = plane.ask()
    one.link.note(
        [LEAK, msgspec.structs.replace(LEAK, code="signature.cuda_oom", detail="a \x1b[31mred\nline")]
    )
    first, second = wait_for(lambda: len(noted(plane)) == 2 and noted(plane), "the notes")  # type: ignore[misc]
    assert first == Noted("a", "a", "memory.growth", "rank 3: grows [slope_bytes_s=2.5]", 1234.5)
    assert second.code == "signature.cuda_oom"
    assert second.detail.startswith("a  [31mred line"), "what a terminal would take for an order is gone"
    assert plane.ask() == before


def test_a_note_that_is_repeated_counts_once(shared_plane: Held) -> None:
    writer = Writer(shared_plane)
    for number in (1, 1, 2, 1):
        writer.send(writer.note(number=number))
    writer.send(writer.note(msgspec.structs.replace(LEAK, code="cpu.zero"), number=3))
    wait_for(lambda: writer.noted() and writer.noted()[-1].code == "cpu.zero", "the last note")
    assert len(writer.noted()) == 3


def test_nobody_notes_in_the_name_of_another(shared_plane: Held) -> None:
    mine, other = Writer(shared_plane), Writer(shared_plane)
    ours, theirs = mine.place.welcome.jwt, other.place.welcome.jwt
    for key, jwt in ((other.key, ours), (other.key, theirs), (mine.key, theirs), (mine.key, "a.b.c")):
        with pytest.raises(NoteRefused, match=r"signature is not|not that of 'w|none of this"):
            mine.send(mine.note(), key, jwt)
    with pytest.raises(NoteRefused, match="no agent"):
        mine.send(mine.note(uid=other.uid))
    with pytest.raises(NoteRefused, match="not that of"):
        mine.send(mine.note(job="another"))
    assert mine.noted() == other.noted() == []


def test_a_note_cannot_be_changed_or_passed_on_by_somebody_in_between(
    shared_plane: Held, tmp_path: Path
) -> None:
    writer = Writer(shared_plane)
    encoded = msgspec.json.encode(writer.note())
    middleman = tls.make_certificate(tmp_path, ["127.0.0.1"]).fingerprint
    ours = tls.fingerprint(writer.place.certificate_pem)
    changed = encoded.replace(b"grows", b"falls")
    for signed, sent in (((middleman, encoded), encoded), ((ours, encoded), changed)):
        signature = writer.key.sign(notes.signed_part(*signed))
        payload = msgspec.msgpack.encode(Envelope(writer.place.welcome.jwt, signature, sent))
        assert call(shared_plane, notes.METHOD, payload) is grpc.StatusCode.UNAUTHENTICATED
    assert writer.noted() == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x93\x01\x02\x03",
        msgspec.msgpack.encode(Envelope("a.b", b"", b"{}")),
        b"\xc1" * 9,
        b"x" * 300_000,
    ],
)
def test_nonsense_is_refused(shared_plane: Held, payload: bytes) -> None:
    assert call(shared_plane, notes.METHOD, payload) is grpc.StatusCode.INVALID_ARGUMENT


def test_what_is_no_anomaly_is_refused_for_good(shared_plane: Held) -> None:
    writer = Writer(shared_plane)
    changes: tuple[dict[str, Any], ...] = (
        {"code": ""},
        {"code": "x" * 101},
        {"code": "a\nb"},
        {"time": -1.0},
        {"numbers": {str(n): 1.0 for n in range(17)}},
    )
    for wrong in changes:
        with pytest.raises(NoteRefused) as refused:
            writer.send(writer.note(msgspec.structs.replace(LEAK, **wrong)))
        assert not refused.value.retry
    with pytest.raises(NoteRefused, match="at most"):
        writer.send(writer.note(*[LEAK] * (notes.ANOMALIES_MAX + 1)))
    assert writer.noted() == []


def test_a_worker_that_notes_without_end_fills_no_journal(shared_plane: Held) -> None:
    writer, another = Writer(shared_plane), Writer(shared_plane)
    for number in range(1, 4):
        writer.send(writer.note(*[LEAK] * notes.ANOMALIES_MAX, number=number))
    another.send(another.note())
    wait_for(another.noted, "the other's note")
    assert len(writer.noted()) == NOTED_MAX


def test_what_was_noted_while_the_master_was_away_arrives_when_it_is_back(
    hold: Hold, agent: MakeAgent
) -> None:
    plane = hold(restarts_max=3)
    one = agent(plane, "a")
    one.run()
    os.kill(children(plane.pid)["master"], signal.SIGKILL)
    one.link.note([LEAK])
    wait_for(lambda: noted(plane), "the note")
    one.link.note([msgspec.structs.replace(LEAK, code="cpu.zero")])
    wait_for(lambda: len(noted(plane)) == 2, "the next note")
    assert [event.code for event in noted(plane)] == ["memory.growth", "cpu.zero"]


def test_what_a_worker_says_of_its_usage_is_kept_if_it_makes_sense_and_goes_with_it() -> None:
    status = create(JobSpec("job", "team", 1, 1, 2), 0.0)
    controller = MonitoringController(lambda event: None, status)
    good = {"time": 1.0, "cpuCores": 2.0, "availableBytes": 1, "totalBytes": 2, "networkBytesS": 3.0}
    for facts in (b'{"time": "now"}', b"[]", b"null", msgspec.json.encode(good)):
        controller.on_report(reported(facts), 0.0)
        assert set(controller.usage) == ({"a"} if facts.startswith(b'{"time":1') else set())
    controller.on_report(reported(b'"nonsense"'), 0.0)
    assert controller.usage["a"].cpu_cores == 2.0, "what was known is not forgotten for it"
    controller.on_transitions(status, ())
    assert controller.usage == {}, "no such worker takes part any more"


def reported(facts: bytes) -> Message:
    return Message(
        aegis_name="job", aegis_namespace="team", worker="a", type=MessageType.ACK, phase=WirePhase.COMMAND,
        data=ReportData(watched={"monitor": msgspec.Raw(facts)}), time_stamp=0.0, seq_num=1, uid="u",
        incarnation=1,
    )  # fmt: skip
