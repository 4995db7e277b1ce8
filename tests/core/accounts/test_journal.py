"""The journal: a run can be followed again from its lines, and a forged line shows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aegis_elastic.core.accounts import journal
from aegis_elastic.core.accounts.journal import (
    Adopt,
    BadJournal,
    Line,
    adopted,
    encode_line,
    line_of,
    read,
    replay,
)
from aegis_elastic.core.events import Error, Finish, Join, Reconcile
from aegis_elastic.core.machine import step
from aegis_elastic.core.model import JobSpec, Phase
from tests.core.machine.walks import Choice, Walk, moves, specs

FORWARD, ERROR = (0, 0, 11), (0, 0, 9)
SPEC = JobSpec("job", "default", 2, min_worker_num=2, max_retry=1)


def recorded() -> Walk:
    """A run through two failures to its end."""
    run = Walk(SPEC, [FORWARD, FORWARD, ERROR, FORWARD, ERROR, FORWARD])
    assert run.status.phase is Phase.FAILED
    return run


def written(lines: list[Line]) -> list[bytes]:
    return [encode_line(line) for line in lines]


@given(specs(), moves)
@settings(max_examples=50)
def test_any_run_can_be_followed_again_from_its_file(spec: JobSpec, walk: list[Choice]) -> None:
    run = Walk(spec, walk)
    lines = read(written(run.lines))
    assert lines == run.lines
    assert replay(lines) == (True, len(run.lines), "")


def test_a_line_reads_as_the_interface_says() -> None:
    line = msgspec.json.decode(encode_line(recorded().lines[5]))
    assert list(line) == ["t", "seq", "event", "transition", "reason", "effects", "statusDigest"]
    assert encode_line(recorded().lines[0]).startswith(
        b'{"t":1000.0,"seq":1,"event":{"type":"create","spec":'
    )


@given(st.integers(1, 10_000))
@settings(max_examples=60)
def test_one_altered_event_is_noticed(which: int) -> None:
    lines = recorded().lines
    place = which % len(lines)
    forged = _forge(lines[place])
    if forged is None:
        return
    result = replay([*lines[:place], forged, *lines[place + 1 :]])
    assert not result.ok
    assert f"line {forged.seq}" in result.first_difference
    assert result.lines == place


def _forge(line: Line) -> Line | None:
    """The same line about another worker (or None: nothing in it to forge)."""
    event = line.event
    if isinstance(event, Error):
        return msgspec.structs.replace(line, event=msgspec.structs.replace(event, worker="w9"))
    if isinstance(event, Finish) and line.transition == "finished":
        return msgspec.structs.replace(line, event=msgspec.structs.replace(event, seq_num=event.seq_num + 1))
    if isinstance(event, Join) and line.transition == "joined":
        return msgspec.structs.replace(line, event=msgspec.structs.replace(event, node_name="elsewhere"))
    return None


def test_forged_reasons_effects_digests_and_numbers_are_noticed() -> None:
    lines = recorded().lines
    at = next(place for place, line in enumerate(lines) if line.effects)
    for changes in (
        {"reason": "x"},
        {"effects": ()},
        {"status_digest": "0" * 16},
        {"transition": "x"},
        {"seq": 99},
    ):
        forged = msgspec.structs.replace(lines[at], **changes)
        assert not replay([*lines[:at], forged, *lines[at + 1 :]]).ok


def test_a_missing_line_is_noticed() -> None:
    lines = recorded().lines
    assert replay([*lines[:4], *lines[5:]]).first_difference == "line 6 follows line 4"


def test_a_journal_without_its_beginning_or_with_two_is_refused() -> None:
    lines = recorded().lines
    assert "nothing creates the job" in replay(lines[1:]).first_difference
    assert not replay([*lines, lines[0]]).ok
    with pytest.raises(BadJournal, match="a second job begins"):
        list(journal.walk([*lines, lines[0]]))


def test_a_torn_last_line_is_what_a_dying_writer_leaves(tmp_path: Path) -> None:
    lines = recorded().lines
    file = tmp_path / "journal.jsonl"
    file.write_bytes(b"".join(written(lines))[:-25])
    assert read(file) == lines[:-1]


def test_a_master_that_takes_over_adopts_after_the_torn_line(tmp_path: Path) -> None:
    run = recorded()
    cut = 9
    status = run.steps[cut - 2].made.status  # the status after line `cut`, of which only half was written
    torn = encode_line(run.lines[cut - 1])[:30]
    seq = cut + 1
    takeover = line_of(2000.0, seq, Adopt(status), adopted(status))
    made = step(status, Reconcile(), 2001.0)
    after = line_of(2001.0, seq + 1, Reconcile(), made)
    file = tmp_path / "journal.jsonl"
    file.write_bytes(b"".join([*written(run.lines[: cut - 1]), torn, b"\n", *written([takeover, after])]))
    lines = read(file)
    assert lines == [*run.lines[: cut - 1], takeover, after]
    assert replay(lines).ok


def test_damage_in_the_middle_names_file_and_line(tmp_path: Path) -> None:
    texts = written(recorded().lines)
    texts[3] = b'{"t": "yesterday"}\n'
    file = tmp_path / "journal.jsonl"
    file.write_bytes(b"".join(texts))
    with pytest.raises(BadJournal, match=r"journal\.jsonl:4: "):
        read(file)
    with pytest.raises(BadJournal, match="nowhere"):
        read(tmp_path / "nowhere")


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_fuzz_junk_is_one_error(junk: list[bytes]) -> None:
    try:
        read([*junk, *written(recorded().lines[:2])])
    except BadJournal:
        pass
