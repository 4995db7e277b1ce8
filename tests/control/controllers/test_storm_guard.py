"""The guard's desk and the brake's, fed with real statuses: what they say, and what they do when all goes
wrong.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from aegis_elastic.control.controllers.contract import Applied, Controllers
from aegis_elastic.control.controllers.correlated_failures import CorrelatedFailureController, probe_io
from aegis_elastic.control.controllers.storm_guard import StormGuardController
from aegis_elastic.core.events import (
    Act,
    Error,
    Event,
    Finding,
    Finish,
    Fit,
    Hold,
    Join,
    Mark,
    Noted,
    Page,
    Quit,
    Relieve,
    Unmark,
)
from aegis_elastic.core.machine import Transition, step
from aegis_elastic.core.model import Phase, Verdict
from aegis_elastic.core.policy.settings import Guard, Policy
from aegis_elastic.core.policy.storm_guard import Action
from aegis_elastic.core.protocol.messages import Message, MessageType, ReportData, WirePhase
from aegis_elastic.observe.paging import Pager
from aegis_elastic.store.contract import Store, StoreUnavailable
from aegis_elastic.store.memory import MemoryBackend, MemoryStore
from tests.launch.ctl.test_verdicts import BEGIN, Recorded

QUICK = Policy(
    guard=Guard(observations=1, persistence_s=0, look_s=0.02, act_timeout_s=0.3, error_state_s=0.1)
)


class Told(Pager):
    """A pager that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__((), "job")
        self.pages: list[tuple[str, str, bool]] = []

    async def send(self, key: str, text: str, *, urgent: bool) -> None:
        self.pages.append((key, text, urgent))


class Harness:
    """A job of two workers in RunCommand with the guard beside it; what the guard feeds is stepped at
    once.
    """

    def __init__(self, policy: Policy = QUICK, store: Callable[[], Awaitable[Store]] | None = None) -> None:
        self.recorded = Recorded(2)
        self.backend = MemoryBackend()
        self.fed: list[Event] = []
        self.pager = Told()

        async def have() -> Store:
            return MemoryStore(self.backend)

        self.controller = StormGuardController(
            self.fed.append, "ns/job/1", policy, self.pager, store or have, name="one"
        )
        self.controllers = Controllers()
        self.controllers.add(self.controller)
        self.controllers.on_transitions(self.recorded.status, ())

    def happens(self, *events: Event) -> None:
        """The master's part: step, then tell the desk."""
        before = len(self.recorded.lines)
        self.recorded.at(time.time() - BEGIN, *events)
        done = []
        for line in self.recorded.lines[before:]:
            event = next((e for e in events if e == line.event), line.event)
            made = Transition(self.recorded.status, line.effects, line.reason, line.transition)
            done.append(Applied(event, made))  # type: ignore[arg-type]
        self.controllers.on_transitions(self.recorded.status, done)

    async def until(self, holds: Callable[[], bool], pump: bool = True) -> None:
        """Let the master's loop go round until that holds."""
        deadline = time.monotonic() + 5
        while not holds():
            assert time.monotonic() < deadline, (self.fed, self.pager.pages)
            if pump and self.fed:
                self.happens(self.fed.pop(0))
            await asyncio.sleep(0.005)


def play(story: Callable[[Harness], Awaitable[None]], **how: Any) -> Harness:
    async def whole() -> Harness:
        harness = Harness(**how)
        try:
            await asyncio.wait_for(story(harness), 15)
        finally:
            await harness.controllers.close()
        return harness

    return asyncio.run(whole())


FROZEN = Mark("n1", "w1", Verdict.FROZEN, "no heartbeat")


def test_a_mark_is_acted_on_and_the_outcome_is_what_the_job_made_of_it() -> None:
    async def story(harness: Harness) -> None:
        harness.happens(FROZEN)
        await harness.until(lambda: harness.recorded.status.phase is Phase.TROUBLESHOOTING)
        assert harness.recorded.status.recover_count == 1
        harness.recorded.everybody_finishes(time.time() - BEGIN)
        harness.controllers.on_transitions(harness.recorded.status, ())
        await harness.until(lambda: len(harness.pager.pages) == 2)
        assert harness.pager.pages[0][0].startswith("n1.due.")
        key, text, urgent = harness.pager.pages[1]
        assert key.startswith("n1.done.")
        assert "incarnation 2 runs" in text
        assert not urgent

    play(story)


def test_a_restart_that_never_ends_is_a_failed_action() -> None:
    async def story(harness: Harness) -> None:
        harness.happens(FROZEN)
        await harness.until(lambda: any(key.startswith("n1.failed") for key, _, _ in harness.pager.pages))
        failed = next(page for page in harness.pager.pages if page[0].startswith("n1.failed"))
        assert "training does not run again after 0 s" in failed[1]
        assert failed[2]
        await harness.until(lambda: any("recovery" in key for key, _, _ in harness.pager.pages))
        await asyncio.sleep(0.1)
        assert sum(isinstance(event, Act) for event in harness.fed) == 0, (
            "and nothing more until it has ended"
        )
        assert len(harness.fed) < 5

    play(story)


def test_a_mark_that_goes_before_its_turn_costs_nothing() -> None:
    async def story(harness: Harness) -> None:
        harness.happens(FROZEN)
        await harness.until(lambda: any(isinstance(event, Act) for event in harness.fed), pump=False)
        act = next(event for event in harness.fed if isinstance(event, Act))
        harness.happens(Unmark("n1", Verdict.FROZEN, "it moves again"))
        harness.fed.remove(act)
        harness.happens(act)  # which comes too late
        node, _ = await (await harness.controller._guarded_actions()).node("n1")
        await harness.until(
            lambda: any(isinstance(e, Noted) and e.code == "guard.withdrawn" for e in harness.fed), False
        )
        await asyncio.sleep(0.05)
        node, _ = await (await harness.controller._guarded_actions()).node("n1")
        assert (node.counted, node.cool_until) == ((), 0.0)
        assert harness.recorded.status.recover_count == 0

    play(story)


def test_what_the_machine_pages_and_what_notes_call_for_reaches_humans_once() -> None:
    async def story(harness: Harness) -> None:
        status = harness.recorded.status
        paged = Transition(
            status, (Page(status.step, "evict.n1", "nobody could take its place"),), "", "evict"
        )
        note = Noted("w0", "n0", "success.false", "it couldn't read where it stood", 1.0)
        for _ in range(3):
            harness.controllers.on_transitions(status, [Applied(note, paged)])
        await harness.until(lambda: len(harness.pager.pages) == 2)
        await asyncio.sleep(0.1)
        texts = {text for _, text, _ in harness.pager.pages}
        assert texts == {"nobody could take its place", "w0: it couldn't read where it stood"}
        assert len(harness.pager.pages) == 2

    play(story)


def test_a_guard_without_its_store_allows_nothing_and_goes_on_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend, times = MemoryBackend(), 0

    async def shaky() -> Store:
        nonlocal times
        times += 1
        if times < 4:
            raise StoreUnavailable("cannot reach the store")
        return MemoryStore(backend)

    async def story(harness: Harness) -> None:
        harness.happens(FROZEN)
        await harness.until(lambda: times >= 3, pump=False)
        assert not any(isinstance(event, Act) for event in harness.fed)
        await harness.until(lambda: harness.recorded.status.phase is Phase.TROUBLESHOOTING)
        assert caplog.text.count("THE GUARD CAN'T REACH ITS RECORDS") == 1

    play(story, store=shaky)


def test_a_guard_that_breaks_is_put_aside_and_the_job_goes_on() -> None:
    async def broken() -> Store:
        raise ZeroDivisionError("a mistake of ours")

    async def story(harness: Harness) -> None:
        harness.happens(FROZEN)
        await harness.until(
            lambda: harness.controllers.due_s() == math.inf and bool(harness.controllers.broken)
        )
        assert harness.controllers.broken == {"StormGuardController": "ZeroDivisionError: a mistake of ours"}

    play(story, store=broken)


def test_the_breaker_stops_isolations_and_observing_stops_all() -> None:
    async def story(harness: Harness) -> None:
        guarded_actions = await harness.controller._guarded_actions()
        for number in range(3):
            await guarded_actions.count("n1", Action.ISOLATE, str(number))
            assert await harness.controller.objection("n1") == ""
        await guarded_actions.count("n1", Action.ISOLATE, "once more")
        assert (
            await harness.controller.objection("n1")
            == "the breaker is open: 4 actions in 24 h, 3 are allowed"
        )

    play(story)

    async def observing(harness: Harness) -> None:
        assert await harness.controller.objection("n1") == "the policy is to observe"

    play(observing, policy=Policy(mode="observe"))


def test_old_records_are_forgotten_and_young_ones_are_not() -> None:
    async def story(harness: Harness) -> None:
        guarded_actions = await harness.controller._guarded_actions()
        await guarded_actions.page("n1", "old", "text", urgent=False)
        await guarded_actions.count("n1", Action.LEVEL_1, "old")
        now = time.time
        harness.controller._wall = lambda: now() + 3 * 86400
        await guarded_actions.page("n2", "young", "text", urgent=False)
        await guarded_actions.forget()
        assert [key.split(".")[-1] for key in harness.backend.entries] == [b"young".hex()]

    play(story)


@pytest.mark.parametrize("used", [2, 3])
def test_where_the_breaker_is_open_a_spare_takes_over_from_who_fails_again(used: int) -> None:
    """Section 11: a crash is never left alone because of the breaker, but an open one prefers a spare."""

    async def story(harness: Harness) -> None:
        s = harness.recorded.status
        guarded_actions = await harness.controller._guarded_actions()
        for number in range(used):
            await guarded_actions.count("n1", Action.RESTART_HUNG, f"deed {number}")
        harness.happens(Join("w2", "u2", "n2", "127.0.0.1", 1), Fit("w2", "u2", True))
        await harness.until(lambda: harness.controller._records_in == 1)
        harness.happens(Error("w1", "u1", s.incarnation, s.seq_num, "exit code 1"))
        assert harness.recorded.status.phase is Phase.TROUBLESHOOTING, "at once, whatever the breaker says"
        relief = [event for event in harness.fed if isinstance(event, Relieve)]
        assert len(relief) == (used == 3)
        harness.happens(*relief)
        harness.recorded.everybody_finishes(time.time() - BEGIN)
        seated = [worker.name for worker in harness.recorded.status.workers]
        if used == 3:
            assert seated == ["w0", "w2"]
            assert not harness.recorded.status.error_nodes, "nothing was found broken there"
            reasons = [line.reason for line in harness.recorded.lines if line.transition == "relieve"]
            assert reasons == [
                "w1 is relieved: not counted; n1: the breaker is open: 3 actions in 24 h, 3 are allowed; w2 "
                "steps in"
            ]
        else:
            assert seated == ["w0", "w1"]
        assert harness.recorded.status.recover_count == 1

    play(story)


def test_a_policy_that_observes_only_says_that_a_spare_would_take_over() -> None:
    async def story(harness: Harness) -> None:
        s = harness.recorded.status
        guarded_actions = await harness.controller._guarded_actions()
        for number in range(3):
            await guarded_actions.count("n1", Action.RESTART_HUNG, f"deed {number}")
        harness.happens(Noted("", "", "a.b", "wakes the desk", 0.0))
        await harness.until(lambda: harness.controller._records_in == 1)
        harness.happens(Error("w1", "u1", s.incarnation, s.seq_num, "exit code 1"))
        reasons = [e.detail for e in harness.fed if isinstance(e, Noted) and e.code == "guard.would_act"]
        assert reasons == ["a spare instead: the breaker is open: 3 actions in 24 h, 3 are allowed"]
        assert not any(isinstance(event, Relieve) for event in harness.fed)

    play(story, policy=Policy("observe", QUICK.guard))


# ------------------------------------------------------------ the brake


def finish(recorded: Recorded, name: str, *findings: Finding) -> Message:
    s = recorded.status
    worker = s.worker(name)
    assert worker is not None
    data = ReportData(state="finished", findings=findings)
    return Message(
        aegis_name="job",
        aegis_namespace="default",
        worker=name,
        type=MessageType.FINISH,
        phase=WirePhase.TROUBLESHOOT,
        data=data,
        time_stamp=time.time(),
        seq_num=s.seq_num,
        uid=worker.uid,
        incarnation=s.incarnation,
    )


def brake(
    policy: Policy, recorded: Recorded, clock: Callable[[], float]
) -> tuple[CorrelatedFailureController, list[str]]:
    pages: list[str] = []
    controller = CorrelatedFailureController(
        lambda event: None, policy, lambda key, text, urgent: pages.append(text), {}, now=clock
    )
    recorded.at(100, Act("w0", "manual", "an operator"))
    controller.on_transitions(recorded.status, ())
    return controller, pages


GPU = Finding("gpu", "gpu.missing", "hardware")


def test_the_brake_holds_ever_longer_isolates_nobody_and_ends_at_its_bound() -> None:
    recorded, now = Recorded(4), [1000.0]
    controller, pages = brake(Policy(guard=Guard(probe_s=10, hold_max_s=100)), recorded, lambda: now[0])
    waits = []
    for _ in range(10):
        for number in range(4):
            assert controller.due_s() == math.inf, "as long as one hasn't told"
            controller.on_report(finish(recorded, f"w{number}", *([GPU] if number < 2 else [])), 0.0)
        assert controller.due_s() == -math.inf
        [event] = controller.events_due(0.0)
        if isinstance(event, Quit):
            break
        assert isinstance(event, Hold)
        waits.append(event.until - now[0])
        now[0] = event.until
        controller.on_transitions(msgspec.structs.replace(recorded.status, held=event.reason), ())
        # The hold runs out: everybody checks again, in a new order.
        again = msgspec.structs.replace(recorded.status, seq_num=recorded.status.seq_num + 1)
        recorded.status = again
        controller.on_transitions(again, ())
    assert waits == [10, 20, 40, 30]
    assert isinstance(event, Quit)
    assert "it has lasted for 100 s, and no node is blamed" in event.reason
    assert len(pages) == 1, "one incident"
    assert pages[0].startswith("BRAKE: 2 of 4 nodes are found broken together")


@pytest.mark.parametrize(("nodes", "broken"), [(2, 1), (4, 1), (8, 2)])
def test_a_node_that_its_first_check_condemns_is_isolated(nodes: int, broken: int) -> None:
    recorded, pages = first_checks(nodes, broken)
    assert pages == []
    assert [node.node_name for node in recorded.status.error_nodes] == [f"n{k}" for k in range(broken)]
    assert recorded.status.phase is Phase.PENDING, "their seats are free for others"


@pytest.mark.parametrize(("nodes", "broken"), [(2, 2), (4, 2), (4, 3), (4, 4), (8, 3)])
def test_first_checks_that_condemn_too_many_end_the_job_and_condemn_nobody(nodes: int, broken: int) -> None:
    recorded, pages = first_checks(nodes, broken)
    assert recorded.status.phase is Phase.FAILED and not recorded.status.error_nodes
    reasons = f"the first checks: {broken} of {nodes} nodes are found broken together (gpu.missing)"
    assert recorded.status.fail_reason.startswith(reasons)
    [page] = pages
    assert page == f"BRAKE: {recorded.status.fail_reason}"


def first_checks(nodes: int, broken: int) -> tuple[Recorded, list[str]]:
    """What a job of so many nodes, so many of them broken, has come to after its first checks."""
    recorded, pages = Recorded(nodes), list[str]()
    recorded.status = msgspec.structs.replace(
        recorded.status,
        phase=Phase.BOOT_CHECKING,
        workers=tuple(
            msgspec.structs.replace(worker, finished=False, inner_phase=Phase.BOOT_CHECKING)
            for worker in recorded.status.workers
        ),
    )
    controller = CorrelatedFailureController(
        lambda event: None, Policy(), lambda key, text, urgent: pages.append(text), {}, now=lambda: 1000.0
    )
    controller.on_transitions(recorded.status, ())
    for number in range(nodes):
        found = (GPU,) if number < broken else ()
        controller.on_report(finish(recorded, f"w{number}", *found), 0.0)
        worker = recorded.status.workers[number]
        recorded.add(100, Finish(worker.name, worker.uid, 1, recorded.status.seq_num, found, "127.0.0.1:1"))
    # The desk's turn comes before the machine's.
    recorded.at(100, *controller.events_due(0.0))
    return recorded, pages


def test_the_brake_works_in_a_policy_that_only_observes_since_the_machine_isolates_all_the_same() -> None:
    recorded = Recorded(2)
    controller, pages = brake(Policy(mode="observe"), recorded, lambda: 1000.0)
    for number in range(2):
        controller.on_report(finish(recorded, f"w{number}", GPU), 0.0)
    [event] = controller.events_due(0.0)
    assert isinstance(event, Hold)
    assert len(pages) == 1


def test_a_finish_of_another_round_or_another_life_is_nothing() -> None:
    recorded = Recorded(2)
    controller, _ = brake(Policy(), recorded, lambda: 1000.0)
    late = msgspec.structs.replace(finish(recorded, "w0", GPU), seq_num=recorded.status.seq_num - 1)
    dead = msgspec.structs.replace(finish(recorded, "w1", GPU), uid="another")
    for message in (late, dead, finish(recorded, "w0", GPU)):
        controller.on_report(message, 0.0)
        assert controller.due_s() == math.inf


def test_the_probe_says_what_is_wrong_with_a_path(tmp_path: Any) -> None:
    assert asyncio.run(probe_io({"checkpoint": str(tmp_path)})) == ""
    (tmp_path / "file").touch()
    assert "it is not a directory" in asyncio.run(probe_io({"checkpoint": str(tmp_path / "file")}))


def test_a_step_that_is_refused_is_no_act() -> None:
    recorded = Recorded(1)
    made = step(recorded.status, Act("w0", "frozen", "x"), BEGIN)
    assert made.name == "ignored"
