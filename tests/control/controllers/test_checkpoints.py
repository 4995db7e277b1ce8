"""Checkpoints: an event once whoever reports it, late ones noted, doubtful successes doubted."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import pytest

from aegis_elastic.control.controllers.checkpoints import LATE, UNREAD, CheckpointController
from aegis_elastic.control.controllers.contract import Applied
from aegis_elastic.core.accounts.report import FALSE_SUCCESS
from aegis_elastic.core.events import Act, Event, Evict, Finish, Join, Mark, Noted, Reconcile, Saved, Unmark
from aegis_elastic.core.machine import create, step
from aegis_elastic.core.model import JobSpec, Phase, Status, Verdict
from aegis_elastic.core.protocol.messages import Message, MessageType, ReportData, WirePhase, decode, encode


class Harness:
    """The controller beside a machine that runs two workers, a and b."""

    def __init__(self, min_worker_num: int = 2) -> None:
        self.fed: list[Event] = []
        self.controller = CheckpointController(self.fed.append)
        spec = JobSpec("job", "default", 2, min_worker_num, 3, bootcheck="off")
        self.status = create(spec, time.time())
        self.controller.on_transitions(self.status, ())
        for name in ("a", "b"):
            self.step(Join(name, f"uid-{name}", f"node-{name}", "127.0.0.1", 1))
        self.finish()  # getting ready
        self.finish()  # bootcheck
        assert self.status.phase is Phase.RUN_COMMAND

    def finish(self) -> None:
        status = self.status
        for worker in status.workers:
            self.step(
                Finish(worker.name, worker.uid, status.incarnation, status.seq_num, store="127.0.0.1:1")
            )

    def step(self, *events: Event) -> Status:
        done = []
        for event in (*events, *[Reconcile()] * 4):
            transition = step(self.status, event, time.time())
            self.status = transition.status
            done.append(Applied(event, transition))
        self.controller.on_transitions(self.status, done)
        return self.status

    def report(
        self, worker: str, *, now_s: float = 0.0, kind: MessageType = MessageType.ACK, **facts: Any
    ) -> None:
        watched = {"boundary": msgspec.Raw(msgspec.json.encode(facts))}
        state = "finished" if kind is MessageType.FINISH else "running"
        message = Message(
            aegis_name="job", aegis_namespace="default", worker=worker, type=kind, phase=WirePhase.COMMAND,
            time_stamp=1.0, seq_num=self.status.seq_num, uid=f"uid-{worker}",
            incarnation=self.status.incarnation, data=ReportData(state=state, watched=watched),
        )  # fmt: skip
        self.controller.on_report(decode(encode(message)), now_s or time.monotonic())

    def take(self) -> list[Event]:
        """What it has put in line; the machine gets it."""
        fed, self.fed[:] = list(self.fed), []
        self.step(*fed)
        return fed


def seen(number: int, at_step: int, path: str = "/c") -> dict[str, Any]:
    return {"number": number, "step": at_step, "path": path, "kind": "dcp", "time": 5.0}


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_a_checkpoint_is_told_once_however_often_it_is_reported(harness: Harness) -> None:
    for _ in range(3):
        harness.report("a", saved=[seen(1, 10)])
    assert harness.take() == [Saved(10, "/c", "dcp", 5.0)]
    harness.report("a", saved=[seen(1, 10), seen(2, 20)])
    harness.report("b", saved=[seen(1, 20, "/other/mount")])
    assert [event.step for event in harness.take() if isinstance(event, Saved)] == [20]
    assert harness.status.saved_step == 20


def test_reports_that_were_lost_are_made_up_for_in_order(harness: Harness) -> None:
    harness.report("a", saved=[seen(3, 30), seen(1, 10), seen(2, 20)])
    assert [event.step for event in harness.take() if isinstance(event, Saved)] == [10, 20, 30]


def test_one_whose_name_tells_no_step_is_newer_than_the_last(harness: Harness) -> None:
    harness.report("a", saved=[seen(1, -1)])
    harness.report("a", saved=[seen(1, -1), seen(2, 40), seen(3, -1)])
    steps = [event.step for event in harness.take() if isinstance(event, Saved)]
    assert len(steps) == 2, "the third is one of step 40 under another name"
    assert steps[1] == 40


def test_a_new_start_may_come_by_the_same_step_again(harness: Harness) -> None:
    harness.report("a", saved=[seen(1, 10), seen(2, 20)])
    harness.take()
    status = harness.status
    harness.step(Mark("node-b", "b", Verdict.FROZEN, "stands"))
    harness.step(Act("b", "frozen", "stands"))
    harness.finish()
    assert harness.status.incarnation == status.incarnation + 1
    harness.report("a", saved=[seen(2, 20), seen(3, 10)])
    assert [event.step for event in harness.take() if isinstance(event, Saved)] == [10]


def test_a_master_that_takes_over_does_not_take_old_ones_for_new(harness: Harness) -> None:
    harness.report("a", saved=[seen(1, -1)])
    harness.take()
    successor = Harness()
    successor.controller = CheckpointController(successor.fed.append)
    successor.controller.on_transitions(harness.status, ())
    successor.status = harness.status
    successor.report("a", saved=[seen(1, -1)])
    assert successor.fed == []
    successor.report("a", saved=[seen(1, -1), seen(2, -1)])
    assert len(successor.fed) == 1


@pytest.mark.parametrize(
    "facts",
    [
        {"saved": [seen(-1, 1)]},
        {"saved": [{**seen(1, 1), "path": "x" * 5000}]},
        {"saved": [{**seen(1, 1), "time": 1e300}]},
        {"saved": [seen(n, n) for n in range(100)]},
        {"saved": "all"},
        {"saved": [{}]},
    ],
)  # fmt: skip
def test_facts_that_make_no_sense_are_no_checkpoints(harness: Harness, facts: dict[str, Any]) -> None:
    harness.report("a", **facts)
    assert harness.take() == []


def test_who_waits_in_vain_for_a_boundary_is_called_out_once(harness: Harness) -> None:
    """Two checkpoints, 100 s apart; then a slow node waits 300 s for the next."""
    began_s = time.monotonic()
    harness.report("a", now_s=began_s, saved=[seen(1, 10)])
    harness.report("a", now_s=began_s + 100, saved=[seen(1, 10), seen(2, 20)])
    harness.take()
    assert math.isinf(harness.controller.due_s()), "nobody waits"
    harness.step(Mark("node-b", "b", Verdict.SLOW, "1.5 times the others"))
    due_s = harness.controller.due_s()
    assert due_s == pytest.approx(began_s + 400, abs=5)
    assert harness.controller.events_due(due_s - 1) == []
    (noted,) = harness.controller.events_due(due_s)
    assert isinstance(noted, Noted)
    assert (noted.code, noted.node_name) == (LATE, "node-b")
    assert "3 times the usual 100 s" in noted.detail
    assert math.isinf(harness.controller.due_s())


def test_every_boundary_starts_the_wait_anew_and_a_mark_that_goes_ends_it(harness: Harness) -> None:
    """The guard may want one more: one that comes after its own waiting."""
    began_s = time.monotonic()
    harness.report("a", now_s=began_s, saved=[seen(1, 10)])
    harness.report("a", now_s=began_s + 10, saved=[seen(2, 20)])
    harness.take()
    harness.step(Mark("node-b", "b", Verdict.SLOW, "slow"))
    due_s = harness.controller.due_s()
    assert len(harness.controller.events_due(due_s)) == 1
    assert math.isinf(harness.controller.due_s()), "once for each"
    harness.report("a", now_s=due_s, saved=[seen(3, 30)])
    harness.take()
    assert due_s < harness.controller.due_s() < math.inf
    harness.step(Unmark("node-b", Verdict.SLOW, "keeps up"))
    assert math.isinf(harness.controller.due_s())


def test_a_healthy_training_that_never_saves_calls_nobody(harness: Harness) -> None:
    assert math.isinf(harness.controller.due_s())
    assert harness.controller.events_due(time.monotonic() + 1e6) == []


def test_an_end_with_a_tracker_that_nobody_can_read_is_doubted_once(harness: Harness) -> None:
    harness.report("a", unread="/c/latest_checkpointed_iteration.txt")
    harness.report("a", unread="/c/latest_checkpointed_iteration.txt")
    (noted,) = harness.take()
    assert isinstance(noted, Noted)
    assert noted.code == UNREAD, "a warning, once; no doubt before the ranks have ended"
    harness.report("a", kind=MessageType.FINISH, unread="/c/latest_checkpointed_iteration.txt")
    (noted,) = harness.fed
    assert isinstance(noted, Noted)
    assert (noted.code, noted.worker) == (FALSE_SUCCESS, "a")
    assert "latest_checkpointed_iteration.txt" in noted.detail
    harness.take()
    worker = harness.status.workers[0]
    harness.step(Finish("a", worker.uid, harness.status.incarnation, harness.status.seq_num))
    harness.report("a", kind=MessageType.FINISH, unread="/c/latest_checkpointed_iteration.txt")
    assert harness.fed == []


def test_the_boundary_is_what_a_slow_nodes_eviction_waits_for() -> None:
    harness = Harness(min_worker_num=1)
    harness.step(Mark("node-b", "b", Verdict.SLOW, "slow"))
    assert harness.step(Evict("node-b", "slow for 3 min")).phase is Phase.RUN_COMMAND
    harness.report("a", saved=[seen(1, 10)])
    harness.take()
    assert harness.step().phase is Phase.RESTARTING
    assert [node.node_name for node in harness.status.error_nodes] == ["node-b"]
