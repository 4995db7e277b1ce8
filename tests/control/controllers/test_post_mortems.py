"""The desk for failures, and what agents are told of their peers: a real plane, agents of straw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aegis_elastic.control.controllers.contract import Applied
from aegis_elastic.control.controllers.post_mortems import PostMortemController
from aegis_elastic.core.accounts.journal import Create, Line, begin, line_of
from aegis_elastic.core.events import Event, Noted, Progress, Quit
from aegis_elastic.core.machine import step
from aegis_elastic.core.model import CheckResult, Failure
from aegis_elastic.core.protocol.messages import MessageType
from aegis_elastic.core.protocol.orders import Action, Order
from tests.control.planes import Agent, Held, config, wait_for
from tests.core.accounts.test_post_mortem import BUG, FollowedJob

CRASH = Failure(0, 0, 9.0, 1, None, "MyError: of our own", frame="train.py:3 load")


def check(name: str, passed: bool = True, **details: Any) -> CheckResult:
    return CheckResult(name, passed, "looked", 0.0, 0.1, details=details)


def finish_with(agent: Agent, action: Action, *checks: CheckResult) -> Order:
    order = agent.wait(Order, lambda order: order.action is action)
    agent.say(MessageType.FINISH, checks=checks)
    return order


def test_agents_hear_what_their_peers_storage_took_and_versions_that_differ_are_said(tmp_path: Path) -> None:
    spec = {"worker_num": 3, "min_worker_num": 3, "troubleshoot": "adaptive", "bootcheck": "env"}
    plane = Held(config(tmp_path, spec=spec))
    agents = [Agent(plane, f"w{n}") for n in range(3)]
    try:
        for agent in agents:
            agent.join()
        for agent in agents:
            agent.obey(Action.READY)
        for n, agent in enumerate(agents):
            finish_with(agent, Action.BOOTCHECK, check("env", torch="2.13.0" if n else "2.12.1"))
        for agent in agents:
            agent.obey(Action.RUN)
        for took_s in (0.1, 0.3):
            agents[0].say(MessageType.ERROR, reason="exit code 1", failures=(CRASH,))
            orders = [
                finish_with(agent, Action.TROUBLESHOOT, check("io", checkpoint_write_s=took_s + n))
                for n, agent in enumerate(agents)
            ]
            for agent in agents:
                agent.obey(Action.RUN)
            # Of the first round nobody knows anything; in the second the median of the first is known.
            assert {tuple(order.peers.items()) for order in orders} == {
                () if took_s == 0.1 else (("checkpoint_write_s", 1.1),)
            }
        wait_for(lambda: len(_noted(plane)) == 3, "three notes")
        assert _noted(plane)[0] == (
            "bootcheck.versions", "multiple versions: torch 2.13.0 (w1, w2), 2.12.1 (w0)"
        )  # fmt: skip
        assert [code for code, _ in _noted(plane)[1:]] == ["verdict.process"] * 2
        assert all("every check passed" in detail for _, detail in _noted(plane)[1:])
    finally:
        for agent in agents:
            agent.close()
        plane.close()


def _noted(plane: Held) -> list[tuple[str, str]]:
    events = [line.event for line in plane.journal() if isinstance(line.event, Noted)]
    return [(event.code, event.detail) for event in events]


class Recorded(FollowedJob):
    """As `FollowedJob`, with the journal that a master would have written and its transitions."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.transitions: list[Applied] = []
        super().__init__()

    def feed(self, event: Any) -> bool:
        if not self.lines:
            self.lines.append(line_of(0.0, 1, Create(self.status.spec), begin(self.status.spec, 0.0)))
        transition = step(self.status, event, 0.0)
        self.lines.append(line_of(0.0, len(self.lines) + 1, event, transition))
        self.transitions.append(Applied(event, transition))
        return super().feed(event)


def fails_again(job: Recorded, earlier: list[Line]) -> list[Event]:
    """The events with which the controller of a master that came back answers the next failure."""
    events: list[Event] = []
    controller = PostMortemController(events.append, fail_fast=True, earlier=lambda: earlier)
    controller.on_transitions(job.status, ())
    job.transitions.clear()
    job.error("w1", BUG)
    job.settle()
    controller.on_transitions(job.status, job.transitions)
    return events


def test_a_master_that_comes_back_knows_the_failure_before() -> None:
    job = Recorded()
    job.feed(Progress(40))
    job.error("w1", BUG)
    job.settle()
    job.finish()
    (quit_event,) = fails_again(job, job.lines[:])
    assert isinstance(quit_event, Quit)
    assert (
        "--aegis-fail-fast: the same exception at the same place as before (train.py:3 load)"
        in quit_event.reason
    )


def test_with_a_journal_that_can_t_be_followed_it_is_the_first_failure() -> None:
    job = Recorded()
    job.feed(Progress(40))
    job.error("w1", BUG)
    job.settle()
    job.finish()
    assert fails_again(job, job.lines[1:]) == []
