"""Progress as four agents report it: marks come, move and go with what is seen."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import pytest

from aegis_elastic.control.controllers.contract import Applied
from aegis_elastic.control.controllers.progress import ProgressController
from aegis_elastic.core.detection import stacks
from aegis_elastic.core.detection.progress import WindowWork
from aegis_elastic.core.detection.stacks import Frame
from aegis_elastic.core.detection.straggler import BAD_WINDOWS, GOOD_WINDOWS
from aegis_elastic.core.events import (
    Error,
    Event,
    Finish,
    Join,
    Mark,
    Noted,
    Progress,
    Reconcile,
    Saved,
    Started,
    Unmark,
)
from aegis_elastic.core.machine import create, step
from aegis_elastic.core.model import JobSpec, Phase, Verdict
from aegis_elastic.core.protocol.messages import Message, MessageType, ReportData, WirePhase, decode, encode

NAMES = "abcd"
C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"
WAITS = stacks.pack((Frame("all_reduce", C10D, 2000), Frame("step", "train.py", 40)))
LOOPS = stacks.pack((Frame("spin", "train.py", 12), Frame("step", "train.py", 40)))


class Harness:
    """The controller beside a machine with four workers of one rank. `now_s` is its monotonic clock."""

    def __init__(self) -> None:
        self.fed: list[Event] = []
        self.moved: list[float] = []
        self.controller = ProgressController(
            self.fed.append, floor_s=60.0, silent_s=30.0, on_moved=self.moved.append
        )
        self.status = create(
            JobSpec("job", "default", 4, 2, 3, bootcheck="off", troubleshoot="off"), time.time()
        )
        self.now_s = time.monotonic()
        self.look = 0
        self.done: list[Event] = []
        self.controller.on_transitions(self.status, ())
        for name in NAMES:
            self.step(Join(name, f"uid-{name}", f"node-{name}", "127.0.0.1", 1))
        self.finish()  # getting ready
        self.finish()  # bootcheck
        assert self.status.phase is Phase.RUN_COMMAND

    def finish(self) -> None:
        for worker in self.status.workers:
            self.step(
                Finish(
                    worker.name, worker.uid, self.status.incarnation, self.status.seq_num, store="127.0.0.1:1"
                )
            )

    def step(self, *events: Event) -> None:
        done = []
        for event in (*events, *[Reconcile()] * 4):
            transition = step(self.status, event, time.time())
            self.status = transition.status
            done.append(Applied(event, transition))
        self.controller.on_transitions(self.status, done)

    def report(
        self,
        worker: str,
        *,
        kind: MessageType = MessageType.ACK,
        look: int = 0,
        incarnation: int = 0,
        **facts: Any,
    ) -> None:
        rank = {
            "rank": NAMES.index(worker),
            "step": 100,
            "beats": 100,
            "longestS": 2.0,
            "stepS": 0.2,
            "state": "S",
        }
        saved = facts.pop("saved", None)
        of_node = {
            "look": look or self.look, "incarnation": incarnation or self.status.incarnation,
            "ranks": [rank | facts], **({"saved": saved} if saved else {}),
        }  # fmt: skip
        watched = {"progress": msgspec.Raw(msgspec.json.encode(of_node))}
        message = Message(
            aegis_name="job", aegis_namespace="default", worker=worker, type=kind, phase=WirePhase.COMMAND,
            time_stamp=1.0, seq_num=self.status.seq_num, uid=f"uid-{worker}",
            incarnation=incarnation or self.status.incarnation,
            data=ReportData(state="running", watched=watched),
        )  # fmt: skip
        self.controller.on_report(decode(encode(message)), self.now_s)

    def events_due(self, *, seconds: float = 2.0, but: str = "", **facts: Any) -> list[Event]:
        """Everybody but those is heard, and some time goes by. `told`: of all, or by worker."""
        self.now_s += seconds
        self.look += 1
        for name in NAMES:
            if name not in but:
                common = {key: value for key, value in facts.items() if key not in NAMES}
                self.report(name, **common | facts.get(name, {}))
        events = [*self.fed, *self.controller.events_due(self.now_s)]
        self.fed.clear()
        self.done += events
        self.step(*events)
        return [event for event in events if not isinstance(event, (Progress, Started))]

    def marks(self) -> set[tuple[str, str]]:
        return {(mark.node_name, mark.verdict.value) for mark in self.status.marks}


@pytest.fixture
def harness() -> Harness:
    return Harness()


def stuck(**of_c: Any) -> dict[str, Any]:
    """All wait for c."""
    others = {"idleS": 90.0, "stack": WAITS, "steady": 3}
    return {**others, "c": {**others, "stack": LOOPS, **of_c}}


def test_a_deadlock_is_marked_once_and_the_mark_goes_when_training_moves(harness: Harness) -> None:
    (event,) = harness.events_due(**stuck())
    assert isinstance(event, Mark)
    assert (event.node_name, event.worker, event.verdict) == ("node-c", "c", Verdict.DESYNC)
    assert "rank 2 of node-c stands at train.py:12 (spin)" in event.reason
    assert harness.events_due(**stuck()) == []
    assert harness.events_due(**stuck(steady=0, stack="")) == [], "one look that failed changes nothing"
    (event,) = harness.events_due(idleS=0.1)
    assert isinstance(event, Unmark)
    assert harness.marks() == set()


def test_what_shows_as_something_else_later_is_marked_so(harness: Harness) -> None:
    harness.events_due(idleS=90.0, stack=WAITS, steady=3)
    assert harness.marks() == {("node-a", "stalled")}
    unmark, mark = harness.events_due(**stuck())
    assert isinstance(unmark, Unmark)
    assert isinstance(mark, Mark)
    assert harness.marks() == {("node-c", "desync")}


def test_a_stop_for_whatever_reason_ends_the_marks_of_a_hang(harness: Harness) -> None:
    harness.events_due(**stuck())
    harness.step(Error("a", "uid-a", 1, harness.status.seq_num, "exit code 1"))
    assert [type(event) for event in harness.fed] == [Unmark]
    assert harness.controller.due_s() == math.inf
    assert list(harness.controller.events_due(harness.now_s + 5)) == []


def test_without_word_from_everybody_nothing_is_said_of_a_hang(harness: Harness) -> None:
    assert harness.events_due(but="d", **stuck()) == []
    harness.events_due(idleS=0.1)
    harness.now_s += 25.0
    assert harness.events_due(but="d", **stuck()) == [], "what d said is too old"


def test_facts_of_another_incarnation_or_without_sense_are_nothing(harness: Harness) -> None:
    for name in NAMES:
        harness.report(name, look=1, incarnation=7, **{k: v for k, v in stuck().items() if k != "c"})
    for nonsense in ({"beats": -1}, {"idleS": 1e300}, {"stack": "x" * 9000}, {"state": 7}):
        harness.report("a", look=2, **nonsense)
    assert harness.events_due(but=NAMES) == []


def test_silent_while_steps_advance_is_unreachable_and_back_when_it_is_heard(harness: Harness) -> None:
    """Five minutes without the agent of d: a mark, for people, and nothing more."""
    harness.events_due()
    events = [event for n in range(150) for event in harness.events_due(but="d", step=100 + n, beats=100 + n)]
    assert [(type(event), getattr(event, "verdict", "")) for event in events] == [(Mark, Verdict.UNREACHABLE)]
    assert len(harness.moved) >= 150, "liveness hears of every move"
    (event,) = harness.events_due(beats=900)
    assert isinstance(event, Unmark)
    assert harness.status.phase is Phase.RUN_COMMAND


def test_silent_while_nothing_moves_is_not_ours_to_judge(harness: Harness) -> None:
    harness.events_due()
    assert [event for _ in range(40) for event in harness.events_due(but="d", idleS=5.0)] == []


def windows(serial: int, **ms: float) -> dict[str, Any]:
    return {
        name: {"own": msgspec.to_builtins(WindowWork(serial, 10, ms.get(name, 100.0) * 1e3, 1e5, 2e5, 1e5))}
        for name in NAMES
    }


def test_a_slow_rank_is_marked_after_windows_in_a_row_each_counted_once(harness: Harness) -> None:
    for serial in range(1, BAD_WINDOWS + 1):
        assert not harness.marks()
        for _ in range(3):  # reports repeat a window until the next
            harness.events_due(**windows(serial, b=140.0))
    assert harness.marks() == {("node-b", "slow")}
    (mark,) = harness.status.marks
    assert (
        "rank 1 takes 140 ms of own work before its first collective, its peers 100 ms (1.40 times"
        in mark.reason
    )
    for serial in range(10, 10 + GOOD_WINDOWS):
        harness.events_due(**windows(serial))
    assert harness.marks() == set()


def test_a_slow_mark_outlives_a_restart_and_hangs_of_one_incarnation_dont_count_in_the_next(
    harness: Harness,
) -> None:
    for serial in range(1, BAD_WINDOWS + 1):
        harness.events_due(**windows(serial, b=140.0))
    harness.step(Error("a", "uid-a", 1, harness.status.seq_num, "exit code 1"))
    harness.finish()
    assert (harness.status.phase, harness.status.incarnation) == (Phase.RUN_COMMAND, 2)
    harness.events_due()
    assert harness.marks() == {("node-b", "slow")}


def test_a_new_master_takes_over_the_marks_and_takes_them_away_when_their_time_has_come(
    harness: Harness,
) -> None:
    harness.events_due(**stuck())
    harness.controller = ProgressController(harness.fed.append, floor_s=60.0)
    harness.controller.on_transitions(harness.status, ())
    assert harness.events_due(**stuck()) == []
    harness.events_due(idleS=0.1)
    assert harness.marks() == set()


def test_how_far_training_is_is_told_before_a_failure_is_judged(harness: Harness) -> None:
    harness.events_due(step=120)
    harness.events_due(step=345, beats=300)
    harness.report("a", kind=MessageType.ERROR, look=harness.look)
    assert harness.fed == [Progress(345)]


def test_a_checkpoint_that_the_code_tells_of_is_told_once(harness: Harness) -> None:
    saved = {"rank": 0, "calls": 1, "step": 90, "path": "/c/90", "time": 5.0}
    assert harness.events_due(a={"saved": saved}) == [Saved(90, "/c/90", "called", 5.0)]
    assert harness.events_due(a={"saved": saved}) == []
    assert harness.events_due(a={"saved": saved | {"calls": 2, "step": 99}}) == [
        Saved(99, "/c/90", "called", 5.0)
    ]


def test_a_rank_that_ends_well_before_the_others_is_said_once(harness: Harness) -> None:
    assert harness.events_due(d={"ended": True}) == [], "who is last is always a little later"
    (event,) = harness.events_due(step=140, beats=140, d={"ended": True, "step": 100})
    assert isinstance(event, Noted)
    assert event.code == "rank.ended_early"
    assert event.detail == "rank 3 ended without an error after step 100; others are at step 140"
    assert harness.events_due(step=150, beats=150, d={"ended": True, "step": 100}) == []


def test_a_node_that_is_done_while_others_train_on_is_said_too(harness: Harness) -> None:
    harness.events_due()
    harness.step(Finish("d", "uid-d", 1, harness.status.seq_num))
    (event,) = harness.events_due(but="d", step=140, beats=140)
    assert isinstance(event, Noted)
    assert event.detail.startswith("rank 3 ended without an error after step 100")
    (event,) = harness.events_due(but="d", seconds=40.0, idleS=90.0, stack=WAITS, steady=3)
    assert isinstance(event, Mark)
    assert event.verdict is Verdict.STALLED
    assert "rank 3 has ended already" in event.reason


def test_the_first_step_of_all_ranks_is_told_once(harness: Harness) -> None:
    harness.events_due(firstS=2.5, c={"beats": 0, "step": -1})
    assert not any(isinstance(event, Started) for event in harness.done)
    harness.events_due(firstS=2.5, c={"firstS": 4.5})
    harness.events_due(firstS=2.5, c={"firstS": 4.5})
    (started,) = (event for event in harness.done if isinstance(event, Started))
    assert (started.worker, started.timings_s) == ("c", {"first_step_s": 4.5})


def test_the_record_learns_how_far_training_is_now_and_then(harness: Harness) -> None:
    for n in range(100):
        harness.events_due(step=100 + n, beats=100 + n)
    facts = harness.status.highest_step
    assert 199 > facts > 130, "about once a minute, not at every step"
