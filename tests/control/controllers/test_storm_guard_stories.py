"""The document on restarts without a storm, paragraph by paragraph: each is a test with its story."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from aegis_elastic.control.controllers.guarded_actions import GuardedActions, GuardedJob
from aegis_elastic.core.model import Verdict
from aegis_elastic.core.policy.settings import Guard, Policy
from aegis_elastic.core.policy.storm_guard import (
    Action,
    Condition,
    DecisionKind,
    GuardedAction,
    NodeGuard,
    Outcome,
    remedy,
)
from aegis_elastic.store.contract import Store
from aegis_elastic.store.memory import MemoryBackend, MemoryStore

LOOK_S = 30.0
MINUTES = 60.0


class Died(Exception):
    """This instance is killed here."""


class Scene(GuardedJob):
    """One cluster as all instances see it: a wall clock that the story moves, and what happens to a node."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.clock = 1_000_000.0
        self.policy = policy or Policy()
        self.backend = MemoryBackend()
        self.bad = False
        self.boundary = True
        self.outcome = Outcome.DONE
        self.acts: list[GuardedAction] = []
        self.pages: list[tuple[str, str, bool]] = []
        self.notes: list[tuple[str, str]] = []
        self.on_collect: Callable[[], Awaitable[None]] | None = None

    def instance(self, name: str, job: str = "job") -> GuardedActions:
        store: Store = MemoryStore(self.backend)
        return GuardedActions(store, job, name, self.policy, self)

    def now(self) -> float:
        return self.clock

    async def observe(self, condition: Condition) -> tuple[bool, bool]:
        return self.bad, self.boundary

    async def collect(self, condition: Condition) -> str:
        if self.on_collect is not None:
            await self.on_collect()
        return "stacks of all ranks"

    async def act(self, condition: Condition, taken: GuardedAction) -> tuple[Outcome, str]:
        self.acts.append(taken)
        return self.outcome, "as told"

    async def page(self, key: str, text: str, *, urgent: bool) -> None:
        self.pages.append((key.split(".")[1], text, urgent))

    def note(self, condition: Condition, code: str, detail: str) -> None:
        self.notes.append((code, detail))

    def paged(self, what: str) -> int:
        return sum(key == what for key, _, _ in self.pages)

    async def watch(self, for_s: float, *keepers: GuardedActions, condition: Condition | None = None) -> None:
        """All instances look, every half minute of the story."""
        end = self.clock + for_s
        while self.clock < end:
            self.clock += LOOK_S
            for guarded_actions in keepers:
                await guarded_actions.follow_up(condition or FROZEN)
                await guarded_actions.examine(condition or FROZEN)


FROZEN = Condition("gpu-7", "w7", Verdict.FROZEN, Action.RESTART_HUNG, "no heartbeat for 2 minutes")
SLOW = Condition("gpu-7", "w7", Verdict.SLOW, Action.EVICT_SLOW, "28 % behind its peers")


def play(story: Callable[[Scene], Awaitable[None]], policy: Policy | None = None) -> Scene:
    scene = Scene(policy)
    asyncio.run(asyncio.wait_for(story(scene), 20))
    return scene


def test_a_hang_is_acted_on_after_it_has_held_for_three_minutes() -> None:
    async def story(scene: Scene) -> None:
        one = scene.instance("one")
        scene.bad = True
        await scene.watch(3 * MINUTES, one)
        assert not scene.acts, "two observations, then three minutes"
        await scene.watch(1 * MINUTES, one)
        [taken] = scene.acts
        assert taken.reason == "frozen, for 180 s: no heartbeat for 2 minutes"
        assert [(key, urgent) for key, _, urgent in scene.pages] == [("due", False), ("done", False)]
        assert "stacks of all ranks" in scene.pages[0][1], "what is known is sent before it is destroyed"

    play(story)


def test_a_pause_that_ends_by_itself_is_nothing() -> None:
    """Garbage collection, a load peak, a hiccup of the monitoring."""

    async def story(scene: Scene) -> None:
        one = scene.instance("one")
        for _ in range(10):
            scene.bad = True
            await scene.watch(2 * MINUTES, one)
            scene.bad = False
            await scene.watch(1 * MINUTES, one)
        assert (scene.acts, scene.pages) == ([], [])

    play(story)


def test_the_clock_is_in_the_store_and_not_in_the_observer() -> None:
    """The first draft refreshed its start at every look, so the measured time was always about zero."""

    async def story(scene: Scene) -> None:
        scene.bad = True
        # Every look is another process's: each remembers nothing, and two looks of one are enough.
        for _ in range(4):
            await scene.watch(1 * MINUTES, scene.instance("short-lived"))
        assert len(scene.acts) == 1

    play(story)


def test_two_instances_that_disagree_by_one_observation_dont_reset_each_others_clock() -> None:
    async def story(scene: Scene) -> None:
        one, other = scene.instance("one"), scene.instance("other")
        scene.bad = True
        await scene.watch(1 * MINUTES, one)
        since = scene.clock
        # The other comes late: to its mind the node has been seen bad too few times, again and again.
        for _ in range(5):
            scene.clock += LOOK_S
            other = scene.instance("other")
            assert await other.examine(FROZEN) is DecisionKind.WAIT
            await one.examine(FROZEN)
        scene.clock += LOOK_S
        await one.examine(FROZEN)
        assert len(scene.acts) == 1
        assert scene.clock - since == 3 * MINUTES

    play(story)


def test_what_one_master_has_seen_its_successors_need_not_see_again() -> None:
    """Simulated day 206574: the clock had run for five minutes, and each new master counted its looks from
    one again, and died before the second.
    """

    async def story(scene: Scene) -> None:
        scene.bad = True
        await scene.watch(1 * MINUTES, scene.instance("first"))

        async def dies() -> None:
            raise Died

        for name in ("second", "third", "fourth"):
            scene.clock += 50
            assert await scene.instance(name).examine(FROZEN) is DecisionKind.WAIT
        scene.on_collect = dies
        scene.clock += 50
        with pytest.raises(Died):
            await scene.instance("fifth").examine(FROZEN)
        scene.on_collect = None
        scene.clock += 50
        assert await scene.instance("sixth").examine(FROZEN) is DecisionKind.ACT
        [taken] = scene.acts
        assert taken.reason == "frozen, for 250 s: no heartbeat for 2 minutes"

    play(story)


def test_of_two_instances_one_acts_and_the_other_skips() -> None:
    async def story(scene: Scene) -> None:
        one, other = scene.instance("one"), scene.instance("other")
        scene.bad = True
        await scene.watch(3.5 * MINUTES, one, other)
        scene.clock += LOOK_S
        meanwhile: list[DecisionKind] = []

        async def other_looks() -> None:
            meanwhile.append(await other.examine(FROZEN))

        scene.on_collect = other_looks
        await one.examine(FROZEN)
        assert meanwhile == [DecisionKind.ACT], "it came to the same conclusion"
        assert len(scene.acts) == 1
        assert ("guard.locked", "another instance is at it") in scene.notes

    play(story)


def test_recovery_between_decision_and_action_cancels() -> None:
    async def story(scene: Scene) -> None:
        one = scene.instance("one")
        scene.bad = True
        await scene.watch(3 * MINUTES, one)

        async def comes_to() -> None:
            scene.bad = False

        scene.on_collect = comes_to
        await scene.watch(1 * MINUTES, one)
        assert not scene.acts
        assert ("guard.cancelled", "it has recovered") in scene.notes
        assert [key for key, _, _ in scene.pages] == ["due", "cancelled"]
        node, _ = await one.node("gpu-7")
        assert node == NodeGuard(), "an intent costs nothing"
        assert (await one.records(FROZEN)).anchor is None, "and is cleaned up"

    play(story)


def test_a_log_collection_that_fails_consumes_no_budget() -> None:
    async def story(scene: Scene) -> None:
        one = scene.instance("one")
        scene.bad = True

        async def fails() -> None:
            raise RuntimeError("the collector is broken")

        scene.on_collect = fails
        for _ in range(20):
            with pytest.raises(RuntimeError):
                await scene.watch(5 * MINUTES, one)
        node, _ = await one.node("gpu-7")
        assert (scene.acts, node.counted) == ([], ())
        scene.on_collect = None
        await scene.watch(1 * MINUTES, one)
        assert len(scene.acts) == 1

    play(story)


def test_a_worker_that_starts_is_not_restarted_again() -> None:
    """The old record stays until the new process writes one: it looks exactly as another hang does."""

    async def story(scene: Scene) -> None:
        one = scene.instance("one")
        scene.bad = True
        await scene.watch(4 * MINUTES, one)
        assert len(scene.acts) == 1
        await scene.watch(9 * MINUTES, one)
        assert len(scene.acts) == 1
        assert (await one.records(FROZEN)).anchor is None, "during the cooldown no clock runs"
        scene.bad = False
        await scene.watch(20 * MINUTES, one)
        assert (len(scene.acts), scene.paged("no_help")) == (1, 0)

    play(story)


def test_the_fourth_guarded_restart_of_a_day_only_alerts() -> None:
    async def story(scene: Scene) -> None:
        one = scene.instance("one")
        scene.bad = True
        await scene.watch(3 * 3600, one)
        assert len(scene.acts) == 3
        assert scene.paged("open") == 1, "once an incident, not once a look"
        assert "3 actions on gpu-7 in 24 h, 3 are allowed" in next(
            t for k, t, _ in scene.pages if k == "open"
        )
        scene.bad = False
        await scene.watch(3600, one)
        scene.bad = True
        await scene.watch(3600, one)
        assert (len(scene.acts), scene.paged("open")) == (3, 2), "another incident"
        scene.clock += 21 * 3600
        await scene.watch(600, one)
        assert len(scene.acts) == 4, "and the next day is another day"

    play(story)


def test_one_breaker_over_all_paths_and_all_jobs() -> None:
    """The machine doesn't care which piece of code restarts it."""

    async def story(scene: Scene) -> None:
        one, other = scene.instance("one", "job A"), scene.instance("two", "job B")
        await one.count("gpu-7", Action.LEVEL_2, "renewed")
        await other.count("gpu-7", Action.ISOLATE, "isolated")
        for crash in range(50):  # a crash isn't guarded, and doesn't stop the guard either
            await other.count("gpu-7", Action.LEVEL_1, f"crash {crash}")
        scene.bad = True
        await scene.watch(2 * 3600, one, other)
        assert len(scene.acts) == 1

    play(story)


def test_a_failed_command_calls_a_human_at_once_and_can_be_retried() -> None:
    async def story(scene: Scene) -> None:
        one = scene.instance("one")
        scene.bad, scene.outcome = True, Outcome.FAILED
        await scene.watch(4 * MINUTES, one)
        assert (len(scene.acts), scene.paged("failed")) == (1, 1)
        assert scene.pages[1][2], "urgent"
        node, _ = await one.node("gpu-7")
        assert (node.cool_until, len(node.counted)) == (0.0, 1), "it counts, and nothing cools"
        scene.outcome = Outcome.DONE
        await scene.watch(5 * MINUTES, one)
        assert (len(scene.acts), scene.paged("failed")) == (2, 1)

    play(story)


def test_a_restart_that_did_not_help_is_said_once_with_urgency() -> None:
    """ "Restarted", then silence: that is how the six hours came about."""

    async def story(scene: Scene) -> None:
        one, other = scene.instance("one"), scene.instance("other")
        scene.bad = True
        await scene.watch(4 * MINUTES, one, other)
        await scene.watch(9 * MINUTES, one, other)
        assert scene.paged("no_help") == 0
        await scene.watch(3 * MINUTES, one, other)
        [(_, text, urgent)] = [page for page in scene.pages if page[0] == "no_help"]
        assert urgent
        assert text.startswith("gpu-7: the restart in place did not help: frozen after 6")

    play(story)


def test_an_action_whose_actor_died_is_no_secret() -> None:
    async def story(scene: Scene) -> None:
        class Dies(Exception):
            pass

        async def dies(condition: Condition, taken: GuardedAction) -> tuple[Outcome, str]:
            scene.acts.append(taken)
            raise Dies

        scene.bad = True
        one = scene.instance("one")
        await scene.watch(3 * MINUTES, one)
        working, scene.act = scene.act, dies  # type: ignore[method-assign]
        with pytest.raises(Dies):
            await scene.watch(1 * MINUTES, one)
        scene.act = working  # type: ignore[method-assign]
        successor = scene.instance("successor")
        await scene.watch(9 * MINUTES, successor)
        assert (len(scene.acts), scene.paged("unknown")) == (1, 1), "its cooldown holds, in case it was done"
        await scene.watch(5 * MINUTES, successor)
        assert scene.paged("no_help") == 1

    play(story)


def test_a_slow_node_waits_for_its_boundary_and_a_hung_one_leaves_the_second_time() -> None:
    async def story(scene: Scene) -> None:
        one = scene.instance("one")
        scene.bad, scene.boundary = True, False
        await scene.watch(3600, one, condition=SLOW)
        assert not scene.acts
        scene.boundary = True
        await scene.watch(1 * MINUTES, one, condition=SLOW)
        assert [taken.action for taken in scene.acts] == [Action.EVICT_SLOW]
        node, _ = await one.node("gpu-7")
        assert remedy(Verdict.FROZEN, node, True, scene.clock) is Action.RESTART_HUNG
        await one.count("gpu-7", Action.RESTART_HUNG, "yesterday's")
        node, _ = await one.node("gpu-7")
        assert remedy(Verdict.DESYNC, node, True, scene.clock) is Action.EVICT_HUNG
        assert remedy(Verdict.DESYNC, node, False, scene.clock) is Action.RESTART_HUNG, "nobody to go on"

    play(story)


@pytest.mark.parametrize("verdict", [Verdict.STALLED, Verdict.UNREACHABLE])
def test_some_verdicts_are_a_humans(verdict: Verdict) -> None:
    """No record of a node may mean that it is switched off, and a long task looks as a stalled one does."""

    async def story(scene: Scene) -> None:
        action = remedy(verdict, NodeGuard(), True, 0.0)
        condition = Condition("gpu-7", "w7", verdict, action, "nothing heard for 30 s")
        one, other = scene.instance("one"), scene.instance("other")
        scene.bad = True
        await scene.watch(3 * 3600, one, other, condition=condition)
        assert not scene.acts
        [(key, text, urgent)] = scene.pages
        assert (key, urgent) == ("human", True)
        assert text.startswith(f"gpu-7 (w7) is for a human: {verdict.value}, for 1")

    play(story)


def test_shadow_mode_decides_and_says_so_and_does_nothing() -> None:
    async def story(scene: Scene) -> None:
        one, other = scene.instance("one"), scene.instance("other")
        scene.bad = True
        await scene.watch(3600, one, other)
        assert not scene.acts
        assert scene.paged("would") == 1
        assert [code for code, _ in scene.notes].count("guard.would_act") == 2, "each says it once"
        assert (await one.node("gpu-7"))[0] == NodeGuard()

    play(story, Policy(mode="observe"))


def test_every_figure_is_a_setting() -> None:
    async def story(scene: Scene) -> None:
        one = scene.instance("one")
        scene.bad = True
        await scene.watch(2 * MINUTES, one)
        assert len(scene.acts) == 1
        await scene.watch(1 * 3600, one)
        assert (len(scene.acts), scene.paged("open")) == (1, 1)

    play(story, Policy(guard=Guard(observations=1, persistence_s=60, cooldown_s=120, actions_per_day=1)))


def test_what_came_and_went_and_came_while_nobody_looked_are_two_incidents() -> None:
    async def story(scene: Scene) -> None:
        scene.bad = True
        await scene.watch(2 * MINUTES, scene.instance("one"))
        scene.clock += 20 * MINUTES  # all instances were down, and nobody knows how it was meanwhile
        later = scene.instance("later")
        await scene.watch(3 * MINUTES, later)
        assert not scene.acts, "an old clock is no proof"
        await scene.watch(2 * MINUTES, later)
        assert len(scene.acts) == 1

    play(story)


def test_a_record_that_makes_no_sense_is_replaced() -> None:
    async def story(scene: Scene) -> None:
        one = scene.instance("one")
        store = MemoryStore(scene.backend)
        token = b"gpu-7".hex()
        await store.create(f"guard.{token}.state", b"\xff{")
        await store.create(f"guard.{token}.{b'job'.hex()}.anchor.frozen", b"")
        scene.bad = True
        await scene.watch(10 * MINUTES, one)
        assert len(scene.acts) == 1

    play(story)
