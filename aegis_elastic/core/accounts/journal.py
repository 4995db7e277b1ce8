"""The journal: every event that was given to `step` and its transition, one JSON object a line.

Because `step` depends on nothing but its arguments, the events alone reproduce the run: `walk` gives them to
`step` again. Each line also has the recorded result (transition, reason, effects and a digest of the status),
so `replay` detects a journal that was altered, and a `step` that decides differently from the one that
recorded it.

The first line creates the status (`create`). After a master's restart an `adopt` line carries the status that
it found in the store: its predecessor may have died between writing the status and writing the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from aegis_elastic.core.events import Effect, Event
from aegis_elastic.core.machine import Transition, create, step
from aegis_elastic.core.model import JobSpec, Status, digest

# Lines times workers.
WALK_MAX = 20_000_000


class BadJournal(ValueError):
    """A journal that can't be read or followed; the text names file and line."""


class Create(msgspec.Struct, frozen=True, tag_field="type", tag="create", rename="camel"):
    """The job's record was created. Not an event of `step`: it is where the first status comes from."""

    spec: JobSpec


class Adopt(msgspec.Struct, frozen=True, tag_field="type", tag="adopt", rename="camel"):
    """A master took the job over with the status in the store."""

    status: Status


StepEvent = Event


class Line(msgspec.Struct, frozen=True, rename="camel"):
    """One line. `t`: the `now` that `step` was given (wall seconds); `seq`: its number, from 1."""

    t: float
    seq: int
    event: Create | Adopt | StepEvent
    transition: str
    reason: str
    effects: tuple[Effect, ...]
    status_digest: str


class Walked(NamedTuple):
    """A line, the status before it (None at the first) and what `step` makes of its event now."""

    line: Line
    before: Status | None
    made: Transition


class ReplayResult(NamedTuple):
    """Whether the journal follows from its events; how many lines were compared; the first difference."""

    ok: bool
    lines: int
    first_difference: str


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)


def begin(spec: JobSpec, now: float) -> Transition:
    """The transition that a `create` line records."""
    return Transition(create(spec, now), (), f"job {spec.job_name} created", "create")


def adopted(status: Status) -> Transition:
    """The transition that an `adopt` line records."""
    return Transition(status, (), f"adopted in {status.phase.value} at seqNum {status.seq_num}", "adopt")


def line_of(t: float, seq: int, event: Create | Adopt | StepEvent, made: Transition) -> Line:
    """The line that records this transition."""
    return Line(t, seq, event, made.name, made.reason, made.effects, digest(made.status))


def encode_line(line: Line) -> bytes:
    """The line as it is appended to the file, newline included.

    A master that continues a file without a final newline (its writer died in the middle of a line) writes
    one first: a torn line before an `adopt` is then distinguished from damage.
    """
    return _encoder.encode(line) + b"\n"


def read(source: str | Path | Iterable[bytes | str]) -> list[Line]:
    """The lines of a journal (a file, or its lines). Raises BadJournal with name and number of a bad line.

    A torn last line, or one just before an `adopt`, is no damage: a dying writer leaves it.
    """
    if isinstance(source, (str, Path)):
        try:
            raw: list[bytes | str] = [*Path(source).read_bytes().split(b"\n")]
        except OSError as error:
            raise BadJournal(f"cannot read the journal {source}: {error.strerror or error}") from error
        name = str(source)
    else:
        raw, name = list(source), "journal"
    lines: list[Line] = []
    torn: BadJournal | None = None
    for number, text in enumerate(raw, start=1):
        if not text.strip():
            continue
        line = _parse(text, f"{name}:{number}")
        if torn and not (isinstance(line, Line) and isinstance(line.event, Adopt)):
            raise torn
        torn = line if isinstance(line, BadJournal) else None
        if isinstance(line, Line):
            lines.append(line)
    return lines


def _parse(text: bytes | str, where: str) -> Line | BadJournal:
    try:
        return _decoder.decode(text)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, bad values
        return BadJournal(f"cannot read the journal at {where}: {error}")


def takes_long(lines: Sequence[Line]) -> bool:
    """Whether walking a journal that a master adopts (its last line is `adopt`) takes more than about a
    second, for which all agents would wait.
    """
    adopted = lines[-1].event if lines else None
    workers = len(adopted.status.workers) if isinstance(adopted, Adopt) else 1
    return len(lines) * workers > WALK_MAX


def walk(lines: Iterable[Line]) -> Iterator[Walked]:
    """Replay the run: each line's event given to `step`, from the status that the lines before it lead to.

    Raises BadJournal if the journal doesn't begin with `create` or `adopt`, or has a `create` further on.
    """
    status: Status | None = None
    for line in lines:
        if isinstance(line.event, Adopt):
            made = adopted(line.event.status)
        elif isinstance(line.event, Create):
            if status is not None:
                raise BadJournal(f"cannot follow the journal at line {line.seq}: a second job begins")
            made = begin(line.event.spec, line.t)
        elif status is None:
            raise BadJournal(
                f"cannot follow the journal at line {line.seq}: nothing creates the job before it"
            )
        else:
            made = step(status, line.event, line.t)
        yield Walked(line, status, made)
        status = made.status


def replay(lines: Iterable[Line]) -> ReplayResult:
    """Compare each line with what `step` makes of its event now; stop at the first difference (of digest,
    transition, reason, effects or line number)."""
    count, seq = 0, 0
    try:
        for walked in walk(lines):
            line = walked.line
            # A torn line had a number, so an `adopt` may have skipped one.
            numbered = line.seq > seq if isinstance(line.event, Adopt) else line.seq == seq + 1
            if not numbered:
                return ReplayResult(False, count, f"line {line.seq} follows line {seq}")
            difference = _difference(line, walked.made)
            if difference:
                return ReplayResult(False, count, f"line {line.seq}: {difference}")
            count, seq = count + 1, line.seq
    except BadJournal as error:
        return ReplayResult(False, count, str(error))
    return ReplayResult(True, count, "")


def _difference(line: Line, made: Transition) -> str:
    found = line_of(line.t, line.seq, line.event, made)
    for field in ("transition", "reason", "effects", "status_digest"):
        recorded, now = getattr(line, field), getattr(found, field)
        if recorded != now:
            return f"{field} was recorded as {recorded!r}, but step makes it {now!r}"
    return ""
