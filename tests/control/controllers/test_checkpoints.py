"""The desk of checkpoints: told once whoever tells it, late ones called out, doubtful successes doubted."""

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


class Office:
    """The desk beside a machine that runs two workers, a and b."""

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
            made = step(self.status, event, time.time())
            self.status = made.status
            done.append(Applied(event, made))
        self.controller.on_transitions(self.status, done)
        return self.status

    def hear(
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
        """What it has put in line; the machine hears it."""
        fed, self.fed[:] = list(self.fed), []
        self.step(*fed)
        return fed


def seen(number: int, at_step: int, path: str = "/c") -> dict[str, Any]:
    return {"number": number, "step": at_step, "path": path, "kind": "dcp", "time": 5.0}


@pytest.fixture
def office() -> Office:
    return Office()


def test_a_checkpoint_is_told_once_however_often_it_is_reported(office: Office) -> None:
    for _ in range(3):
        office.hear("a", saved=[seen(1, 10)])
    assert office.take() == [Saved(10, "/c", "dcp", 5.0)]
    office.hear("a", saved=[seen(1, 10), seen(2, 20)])
    office.hear("b", saved=[seen(1, 20, "/other/mount")])
    assert [event.step for event in office.take() if isinstance(event, Saved)] == [20]
    assert office.status.saved_step == 20


def test_reports_that_were_lost_are_made_up_for_in_order(office: Office) -> None:
    office.hear("a", saved=[seen(3, 30), seen(1, 10), seen(2, 20)])
    assert [event.step for event in office.take() if isinstance(event, Saved)] == [10, 20, 30]


def test_one_whose_name_tells_no_step_is_newer_than_the_last(office: Office) -> None:
    office.hear("a", saved=[seen(1, -1)])
    office.hear("a", saved=[seen(1, -1), seen(2, 40), seen(3, -1)])
    steps = [event.step for event in office.take() if isinstance(event, Saved)]
    assert len(steps) == 2, "the third is one of step 40 under another name"
    assert steps[1] == 40


def test_a_new_start_may_come_by_the_same_step_again(office: Office) -> None:
    office.hear("a", saved=[seen(1, 10), seen(2, 20)])
    office.take()
    status = office.status
    office.step(Mark("node-b", "b", Verdict.FROZEN, "stands"))
    office.step(Act("b", "frozen", "stands"))
    office.finish()
    assert office.status.incarnation == status.incarnation + 1
    office.hear("a", saved=[seen(2, 20), seen(3, 10)])
    assert [event.step for event in office.take() if isinstance(event, Saved)] == [10]


def test_a_master_that_takes_over_does_not_take_old_ones_for_new(office: Office) -> None:
    office.hear("a", saved=[seen(1, -1)])
    office.take()
    successor = Office()
    successor.controller = CheckpointController(successor.fed.append)
    successor.controller.on_transitions(office.status, ())
    successor.status = office.status
    successor.hear("a", saved=[seen(1, -1)])
    assert successor.fed == []
    successor.hear("a", saved=[seen(1, -1), seen(2, -1)])
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
def test_facts_that_make_no_sense_are_no_checkpoints(office: Office, facts: dict[str, Any]) -> None:
    office.hear("a", **facts)
    assert office.take() == []


def test_who_waits_in_vain_for_a_boundary_is_called_out_once(office: Office) -> None:
    """Two checkpoints, 100 s apart; then a slow node waits 300 s for the next."""
    began_s = time.monotonic()
    office.hear("a", now_s=began_s, saved=[seen(1, 10)])
    office.hear("a", now_s=began_s + 100, saved=[seen(1, 10), seen(2, 20)])
    office.take()
    assert math.isinf(office.controller.due_s()), "nobody waits"
    office.step(Mark("node-b", "b", Verdict.SLOW, "1.5 times the others"))
    due_s = office.controller.due_s()
    assert due_s == pytest.approx(began_s + 400, abs=5)
    assert office.controller.events_due(due_s - 1) == []
    (noted,) = office.controller.events_due(due_s)
    assert isinstance(noted, Noted)
    assert (noted.code, noted.node_name) == (LATE, "node-b")
    assert "3 times the usual 100 s" in noted.detail
    assert math.isinf(office.controller.due_s())


def test_every_boundary_starts_the_wait_anew_and_a_mark_that_goes_ends_it(office: Office) -> None:
    """The guard may want one more: one that comes after its own waiting."""
    began_s = time.monotonic()
    office.hear("a", now_s=began_s, saved=[seen(1, 10)])
    office.hear("a", now_s=began_s + 10, saved=[seen(2, 20)])
    office.take()
    office.step(Mark("node-b", "b", Verdict.SLOW, "slow"))
    due_s = office.controller.due_s()
    assert len(office.controller.events_due(due_s)) == 1
    assert math.isinf(office.controller.due_s()), "once for each"
    office.hear("a", now_s=due_s, saved=[seen(3, 30)])
    office.take()
    assert due_s < office.controller.due_s() < math.inf
    office.step(Unmark("node-b", Verdict.SLOW, "keeps up"))
    assert math.isinf(office.controller.due_s())


def test_a_healthy_training_that_never_saves_calls_nobody(office: Office) -> None:
    assert math.isinf(office.controller.due_s())
    assert office.controller.events_due(time.monotonic() + 1e6) == []


def test_an_end_with_a_tracker_that_nobody_can_read_is_doubted_once(office: Office) -> None:
    office.hear("a", unread="/c/latest_checkpointed_iteration.txt")
    office.hear("a", unread="/c/latest_checkpointed_iteration.txt")
    (noted,) = office.take()
    assert isinstance(noted, Noted)
    assert noted.code == UNREAD, "a warning, once; no doubt before the ranks have ended"
    office.hear("a", kind=MessageType.FINISH, unread="/c/latest_checkpointed_iteration.txt")
    (noted,) = office.fed
    assert isinstance(noted, Noted)
    assert (noted.code, noted.worker) == (FALSE_SUCCESS, "a")
    assert "latest_checkpointed_iteration.txt" in noted.detail
    office.take()
    worker = office.status.workers[0]
    office.step(Finish("a", worker.uid, office.status.incarnation, office.status.seq_num))
    office.hear("a", kind=MessageType.FINISH, unread="/c/latest_checkpointed_iteration.txt")
    assert office.fed == []


def test_the_boundary_is_what_a_slow_nodes_eviction_waits_for() -> None:
    office = Office(min_worker_num=1)
    office.step(Mark("node-b", "b", Verdict.SLOW, "slow"))
    assert office.step(Evict("node-b", "slow for 3 min")).phase is Phase.RUN_COMMAND
    office.hear("a", saved=[seen(1, 10)])
    office.take()
    assert office.step().phase is Phase.RESTARTING
    assert [node.node_name for node in office.status.error_nodes] == ["node-b"]
