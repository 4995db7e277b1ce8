"""An eviction as the journal, the report and the screen tell it: mark, boundary, eviction, in that order."""

from __future__ import annotations

import io

from rich.console import Console

from aegis_elastic.core.accounts import journal, report
from aegis_elastic.core.accounts.journal import Create, line_of
from aegis_elastic.core.accounts.status_view import beside_training, status_view
from aegis_elastic.core.events import Event, Evict, Fit, Join, Mark, Progress, Reconcile, Saved
from aegis_elastic.core.machine import step
from aegis_elastic.core.model import JobSpec, Phase, Verdict
from aegis_elastic.launch.screens.status import render_line, render_status
from tests.core.machine.walks import Walk


def evicted() -> Walk:
    """Two workers train, a checked spare waits, and the second one's node is slow."""
    run = Walk(JobSpec("job", "default", 2, 2, 3), [(0, 0, 11)] * 2)
    assert run.status.phase is Phase.RUN_COMMAND
    slow = run.status.workers[1]
    run.tell(Join("w4", "w4/1", "node-w4", "10.0.0.9", 2))
    run.tell(Fit("w4", "w4/1", True))
    run.tell(Mark(slow.node_name, slow.name, Verdict.SLOW, "31 % behind its peers for 50 steps"))
    run.tell(Reconcile())
    run.tell(Evict(slow.node_name, "still 31 % behind after 180 s"))
    run.tell(Reconcile())
    run.tell(Progress(41))
    run.tell(Saved(40, "ckpt/40", "dcp", run.now))
    run.tell(Reconcile())
    return run


def test_the_journal_shows_mark_boundary_and_eviction_in_that_order_and_replays() -> None:
    run = evicted()
    told = [line.transition for line in run.lines if line.transition in ("marked", "saved", "evict")]
    assert told == ["marked", "saved", "evict"]
    assert run.status.phase is Phase.RESTARTING
    assert [worker.name for worker in run.status.workers] == ["w0", "w4"]
    assert journal.replay(journal.read([journal.encode_line(line) for line in run.lines])).ok


def test_the_report_counts_it_as_slowness_and_not_as_a_failure() -> None:
    run = evicted()
    made = report.build(run.lines, run.status)
    assert made.summary == "at most 3 restarts, 0 used; 0 reschedules for hardware, 1 for slowness"
    assert made.failures == ()
    assert [node.kind for node in made.error_nodes] == ["slow"]
    assert "after the checkpoint of step 40" in made.incarnations[0].cause


def test_people_see_the_marks_and_what_was_done_about_them() -> None:
    run = evicted()
    before = next(line for line in run.lines if line.transition == "saved")
    walked = next(walked for walked in journal.walk(run.lines) if walked.line == before)
    status = walked.made.status
    screen = Console(file=io.StringIO(), width=160)
    screen.print(render_status(status_view(status, beside_training(status))))
    for walked in journal.walk(run.lines):
        screen.print(render_line(walked))
    assert isinstance(screen.file, io.StringIO)
    said = screen.file.getvalue()
    assert "is slow (31 % behind its peers for 50 steps), leaves at the next checkpoint" in said
    assert "highestStep 41, savedStep 40" in said
    assert "w1 told to leave" in said


def test_every_new_event_survives_the_journal() -> None:
    run = evicted()
    lines = [journal.encode_line(line) for line in run.lines]
    assert [line.event for line in journal.read(lines)] == [line.event for line in run.lines]
    spec = JobSpec("job", "default", 1, 1, 0)
    begun = journal.begin(spec, 1.0)
    book = [line_of(1.0, 1, Create(spec), begun)]
    status = begun.status
    events: list[Event] = list(_one_of_each())
    for number, event in enumerate(events, start=2):
        made = step(status, event, float(number))
        book.append(line_of(float(number), number, event, made))
        status = made.status
    again = journal.read([journal.encode_line(line) for line in book])
    assert [line.event for line in again[1:]] == events
    assert journal.replay(again).ok


def _one_of_each() -> tuple[Event, ...]:
    from aegis_elastic.core import events

    return (
        events.Noted("w", "n", "memory.leak", "12 MB/min", 1.0),
        events.Unmark("n", Verdict.FROZEN, "caught up"),
        events.Act("w", "frozen", "persisted"),
        events.Taint("n", "bad DIMM", "manual", 9.0),
        events.Untaint("n", "repaired"),
        events.Hold("storage is down", 99.0),
        events.Release("it is back"),
    )
