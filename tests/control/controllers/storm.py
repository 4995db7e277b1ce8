"""A simulated cluster for the guard: nodes that freeze, restarts that fail or don't help, and two masters
that see late, sleep, and die between any two steps. The guard's code is the real one, over the real memory
store, on an event loop whose clock jumps to the next thing that happens.

Everything follows from the seed. What must never happen is checked where it would happen; what must happen is
checked when the time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, NamedTuple

import msgspec

from aegis_elastic.control.controllers.guarded_actions import GuardedActions
from aegis_elastic.core.model import Verdict
from aegis_elastic.core.policy.settings import Guard, Policy
from aegis_elastic.core.policy.storm_guard import Action, Condition, GuardedAction, NodeGuard, Outcome
from aegis_elastic.store.contract import StoreUnavailable
from aegis_elastic.store.memory import MemoryBackend, MemoryStore

DAY_S = 86400.0
LOOK_S = 60.0
# Whatever is wrong for so long has led to an action or a page, though both masters may have been away a
# while.
FOLLOW_UP_S = 2 * 3600.0
# These masters die every few minutes, so an anchor must outlive more looks that were missed than by default.
LONG = Guard(look_s=120.0)
SHORT = Guard(escalation_s=240.0, act_timeout_s=200.0, look_s=120.0)


class Broken(AssertionError):
    """The guard did what it must never do."""


class Died(Exception):
    """This master was killed here."""


class _Jump(selectors.DefaultSelector):
    """Nothing is ever waited for: the clock jumps."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        self.loop.now_s += timeout or 0.0
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on which a day takes as long as what happens on it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


class Node:
    """A worker of the cluster: its heartbeat stops when it freezes, and while it starts."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self.rng = rng
        # Some nodes freeze again and again: that is what a breaker is for.
        self.calm_s = rng.choice([3600.0, 6 * 3600.0, 6 * 3600.0])
        self.frozen_at: float | None = None
        self.bad_since: float | None = None
        self.in_flight: str | None = None
        self.lives = 0

    def bad(self, now: float, policy: Guard) -> bool:
        """By the shared record, which says when its heart last beat."""
        bad = self.frozen_at is not None and now - self.frozen_at > policy.heartbeat_stale_s
        if not bad:
            self.bad_since = None
        elif self.bad_since is None:
            assert self.frozen_at is not None
            self.bad_since = self.frozen_at + policy.heartbeat_stale_s
        return bad

    async def live(self) -> None:
        """Freeze now and then; sometimes it comes to again by itself, as after a pause of its own."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / self.calm_s))
            if self.frozen_at is not None:
                continue
            self.frozen_at = asyncio.get_running_loop().time()
            life = self.lives
            if self.rng.random() < 0.5:
                await asyncio.sleep(self.rng.choice([100.0, 250.0, 330.0, 1000.0]))
                if life == self.lives:
                    self.frozen_at = None

    async def restart(self) -> None:
        """Start again: the old record stays until the new process writes one, which may never happen."""
        self.lives += 1
        life = self.lives
        if self.rng.random() < 0.25:
            return  # it did not help
        await asyncio.sleep(self.rng.uniform(30, 500))
        if life == self.lives:
            self.frozen_at = None


class Done(NamedTuple):
    """An action that was carried out."""

    at: float
    taken: GuardedAction
    outcome: Outcome


class Cluster:
    """The truth, and the judge."""

    def __init__(
        self, seed: int, policy: Guard, days: float, guarded_actions: type[GuardedActions] = GuardedActions
    ) -> None:
        self.rng = random.Random(seed)
        self.policy = Policy(guard=policy)
        self.guarded_actions = guarded_actions
        self.sleepy = 0.01
        self.end_s = days * DAY_S
        self.nodes = [Node(f"n{k}", random.Random(seed * 1000 + k)) for k in range(2)]
        self.backend = MemoryBackend()
        self.done: dict[str, list[Done]] = defaultdict(list)
        self.pages: list[tuple[float, str]] = []
        self.stretches: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.lasting: dict[str, tuple[float, float]] = {}
        self.actions = 0
        # Who has recorded which actions, and which the breaker counts.
        self.meant: dict[str, Master] = {}
        self.counted: dict[str, set[str]] = defaultdict(set)
        self.unsettled: set[str] = set()
        self.last_observed: dict[str, float] = {}
        self.watched_since: dict[str, float] = {}
        self.judged: set[str] = set()

    async def run(self) -> None:
        tasks = [asyncio.create_task(node.live()) for node in self.nodes]
        tasks += [asyncio.create_task(self._instance(f"m{k}")) for k in range(2)]
        tasks.append(asyncio.create_task(self._watch()))
        try:
            done, _ = await asyncio.wait(tasks, timeout=self.end_s, return_when="FIRST_EXCEPTION")
            for task in done:
                task.result()
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)
        self._follow_ups()

    async def _watch(self) -> None:
        """Note how long each node was bad without a break, by the record that everybody sees."""
        loop = asyncio.get_running_loop()
        since: dict[str, float] = {}
        while True:
            for node in self.nodes:
                if node.bad(loop.time(), self.policy.guard):
                    begun = since.setdefault(node.name, loop.time())
                    self.lasting[node.name] = (begun, loop.time())
                elif node.name in since:
                    self.stretches[node.name].append((since.pop(node.name), loop.time()))
                    self.lasting.pop(node.name)
            await asyncio.sleep(30)

    async def _instance(self, name: str) -> None:
        """A master that is started again whenever it has died."""
        life = 0
        while True:
            life += 1
            master = Master(self, f"{name}.{life}")
            try:
                await master.run()
            except Died:
                await master.store.close()
            await asyncio.sleep(self.rng.uniform(5, 900))

    def check_act(self, master: Master, node: Node, taken: GuardedAction) -> None:
        """What must never happen, at the moment at which it would."""
        now = asyncio.get_running_loop().time()
        policy, before = self.policy.guard, self.done[node.name]
        recent = [done for done in before if now - done.at < DAY_S]
        if len(recent) >= policy.actions_per_day:
            raise Broken(f"{now}: action {len(recent) + 1} of a day on {node.name}")
        if node.in_flight:
            raise Broken(f"{now}: {master.name} acts on {node.name} while {node.in_flight} does")
        last = max((done.taken.at for done in before if done.outcome is not Outcome.FAILED), default=-DAY_S)
        if now - last < policy.cooldown_s:
            raise Broken(f"{now}: {node.name} is acted on {now - last:.0f} s after the last time")
        looked = master.verified.get(node.name)
        if looked is None or not looked.bad or looked.at < master.collected.get(node.name, now):
            raise Broken(f"{now}: {node.name} is acted on without having been looked at again")
        # Only what somebody has looked at all the time can't have come and gone unseen.
        watched = self.watched_since.get(node.name, now) <= now - policy.persistence_s - LOOK_S
        bad_s = now - node.bad_since if node.bad_since is not None else 0.0
        quick = bad_s < policy.persistence_s and node.bad(now, policy)
        if watched and quick:
            raise Broken(f"{now}: {node.name} is acted on after {bad_s:.0f} s")

    @property
    def masters(self) -> list[Master]:
        return [master for master in Master.alive if master.cluster is self]

    def note_state(self, master: Master, node: NodeGuard) -> None:
        """A master has written down what it knows of a node."""
        if node.last_action is not None:
            self.meant.setdefault(node.last_action.id, master)
            self._check_followed_up(master, node.last_action)
            self.counted[node.last_action.worker] = {entry.id for entry in node.counted}
            (self.unsettled.discard if node.last_action.followed_up else self.unsettled.add)(
                node.last_action.worker
            )

    def _check_followed_up(self, master: Master, taken: GuardedAction) -> None:
        """Whoever is done with an action that did not help has called somebody."""
        if not taken.followed_up or taken.id in self.judged:
            return
        self.judged.add(taken.id)
        seen = master.verified.get(taken.worker)
        unhelped = taken.outcome in (Outcome.DONE, Outcome.UNKNOWN) and seen is not None and seen.bad
        if unhelped and not any(f"no_help.{taken.id}" in page for _, page in self.pages):
            raise Broken(f"{taken.worker}: {taken.id} did not help, and the page about that was never sent")

    def note_observed(self, node: Node) -> None:
        """Somebody looks at it. It takes a frozen node two minutes to be bad again: a shorter hole hides
        none.
        """
        now = asyncio.get_running_loop().time()
        if now - self.last_observed.get(node.name, -DAY_S) > self.policy.guard.heartbeat_stale_s:
            self.watched_since[node.name] = now
        self.last_observed[node.name] = now

    def has_anchor(self, node: Node) -> bool:
        """Whether somebody has seen it bad and nobody has cleared that away."""
        return any("anchor" in key and node.name.encode().hex() in key for key in self.backend.entries)

    def check_page(self, node: Node, key: str) -> None:
        """An open breaker is one whose actions were done, not merely meant."""
        if ".open." not in key:
            return
        done = {done.taken.id for done in self.done[node.name]}
        for entry in self.counted[node.name]:
            by = self.meant.get(entry)
            if entry not in done and (by is None or (by in self.masters and not by.has_slept)):
                raise Broken(f"the breaker of {node.name} counts {entry}, which was not carried out")

    def _follow_ups(self) -> None:
        """What must have happened."""
        for name, stretch in self.lasting.items():
            self.stretches[name].append(stretch)
        for node in self.nodes:
            handled_at = [at for at, page in self.pages if page.startswith(f"{node.name}.")]
            handled_at += [done.at for done in self.done[node.name]]
            for since, until in self.stretches[node.name]:
                if until - since > FOLLOW_UP_S and not any(since <= at <= until for at in handled_at):
                    raise Broken(
                        f"{node.name} was bad from {since} to {until}, and nobody did or said anything"
                    )
            for done in self.done[node.name]:
                self._followed(node, done)

    def _followed(self, node: Node, done: Done) -> None:
        if done.at > self.end_s - FOLLOW_UP_S:
            return
        about = [page for _, page in self.pages if done.taken.id in page]
        if done.outcome is Outcome.FAILED and not about:
            raise Broken(f"{node.name}: an action failed at {done.at} and nobody was called")
        held = any(s <= done.at and u >= done.at + FOLLOW_UP_S for s, u in self.stretches[node.name])
        helped = [page for page in about if "no_help" in page or "unknown" in page or "failed" in page]
        if held and not helped:
            raise Broken(f"{node.name}: an action at {done.at} did not help, and nobody was told")


class Looked(NamedTuple):
    """What a master saw of a node, when."""

    at: float
    bad: bool


class Master:
    """One life of one instance, and its world: everything takes time, and any of it may be the last."""

    alive: ClassVar[list[Master]] = []

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.rng = random.Random(f"{name} {cluster.rng.random()}")
        self.dead = self.has_slept = False
        self.store = MemoryStore(cluster.backend)
        self.verified: dict[str, Looked] = {}
        self.collected: dict[str, float] = {}
        self.guarded_actions = cluster.guarded_actions(_Shaky(self), "job", name, cluster.policy, self)  # type: ignore[arg-type]

    async def run(self) -> None:
        Master.alive.append(self)
        try:
            while True:
                for node in self.cluster.nodes:
                    await self._consider(node)
                await asyncio.sleep(self.rng.uniform(0.5, 1) * LOOK_S)
        finally:
            Master.alive.remove(self)

    async def _consider(self, node: Node) -> None:
        condition = Condition(
            node.name, node.name, Verdict.FROZEN, Action.RESTART_HUNG, "its heartbeat has stopped"
        )
        bad = node.bad(self.now(), self.cluster.policy.guard)
        if not (bad or node.name in self.cluster.unsettled or self.cluster.has_anchor(node)):
            return  # as a master looks at marked nodes only
        try:
            await self.guarded_actions.follow_up(condition)
            await self.guarded_actions.examine(condition)
        except StoreUnavailable:
            return  # at the next look

    async def step(self) -> None:
        """Between any two steps: mostly nothing, sometimes a delay, a long sleep, or the end."""
        if self.dead:
            raise Died
        chance = self.rng.random()
        if chance < 0.01:
            self.dead = True
            raise Died
        if chance < 0.01 + self.cluster.sleepy:
            # Stopped as by SIGSTOP: its leases aren't refreshed either.
            self.has_slept = True
            for lease in self.store._leases:
                lease._refresh_task.cancel()
            await asyncio.sleep(self.rng.choice([20.0, 90.0, 700.0, 1500.0]))
        elif chance < 0.14 + self.cluster.sleepy:
            await asyncio.sleep(self.rng.uniform(0.01, 5))

    # ------------------------------------------------------------ as `guarded_actions.GuardedJob`

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def observe(self, condition: Condition) -> tuple[bool, bool]:
        await self.step()
        node = self._node(condition)
        bad = node.bad(self.now(), self.cluster.policy.guard)
        self.verified[node.name] = Looked(self.now(), bad)
        self.cluster.note_observed(node)
        return bad, True

    async def collect(self, condition: Condition) -> str:
        try:
            await self.step()
            await asyncio.sleep(self.rng.uniform(0, 70))  # the last ones run into the limit
        finally:
            self.collected[condition.node_name] = self.now()
        if self.rng.random() < 0.1:
            raise OSError("the log server is away")
        return "stacks"

    async def act(self, condition: Condition, taken: GuardedAction) -> tuple[Outcome, str]:
        node = self._node(condition)
        self.cluster.check_act(self, node, taken)
        node.in_flight = self.name
        try:
            self.cluster.actions += 1
            failed = self.rng.random() < 0.2
            done = Done(self.now(), taken, Outcome.FAILED if failed else Outcome.DONE)
            self.cluster.done[node.name].append(done)
            await asyncio.sleep(self.rng.uniform(0, 40))
            if not failed:
                task = asyncio.create_task(node.restart())
                task.add_done_callback(lambda _: None)
        finally:
            node.in_flight = None
        await self.step()
        return done.outcome, "as the platform said"

    async def page(self, key: str, text: str, *, urgent: bool) -> None:
        await self.step()
        node = next(node for node in self.cluster.nodes if key.startswith(f"{node.name}."))
        self.cluster.pages.append((self.now(), key))
        self.cluster.check_page(node, key)

    def note(self, condition: Condition, code: str, detail: str) -> None:
        return

    def _node(self, condition: Condition) -> Node:
        return next(node for node in self.cluster.nodes if node.name == condition.node_name)


class _Shaky:
    """The master's store: a step before and after everything, and now and then no answer."""

    def __init__(self, master: Master) -> None:
        self._master = master

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            await self._master.step()
            if self._master.rng.random() < 0.002:
                raise StoreUnavailable("cannot reach the store: no answer")
            made = await getattr(self._master.store, name)(*args)
            if name in ("create", "update") and args[0].endswith(".state"):
                self._master.cluster.note_state(self._master, msgspec.json.decode(args[1], type=NodeGuard))
            await self._master.step()
            return made

        return call


def simulate(
    seed: int,
    days: float = 1.0,
    policy: Guard | None = None,
    guarded_actions: type[GuardedActions] = GuardedActions,
    sleepy: float = 0.01,
) -> Cluster:
    """Run one cluster; `Broken` if the guard did something wrong. Returns it for its figures. `sleepy`: how
    likely a master is stopped for a while at any step.
    """
    loop = VirtualLoop()
    # A cooldown that outlasts the judgement over an action is another situation than one that doesn't.
    cluster = Cluster(seed, policy or (SHORT if seed % 2 else LONG), days, guarded_actions)
    cluster.sleepy = sleepy
    try:
        loop.run_until_complete(cluster.run())
    finally:
        with contextlib.suppress(RuntimeError):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    return cluster
