"""The guard with one rule broken each: the storm must notice every one of them (as
`proof/mutation/mutants.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from aegis_elastic.control.controllers import guarded_actions
from aegis_elastic.control.controllers.guarded_actions import GuardedActions
from aegis_elastic.core.policy import storm_guard
from aegis_elastic.core.policy.storm_guard import (
    Condition,
    CountedAction,
    GuardedAction,
    NodeGuard,
    Observation,
    Outcome,
)
from aegis_elastic.store.contract import KeyExists, RevisionConflict
from aegis_elastic.store.leases import Lease


class NoReverification(GuardedActions):
    """What was seen before the evidence was collected is believed."""

    _first: Observation | None = None

    async def _observe(self, condition: Condition) -> Observation:
        if self._first is None:
            return await super()._observe(condition)
        return self._first

    async def _carry_out(self, condition: Condition, reason: str) -> None:
        self._first = Observation(True, True, 9)
        try:
            await super()._carry_out(condition, reason)
        finally:
            self._first = None


class CountsIntents(GuardedActions):
    """The breaker counts when the decision is made, not when the action is."""

    async def _carry_out(self, condition: Condition, reason: str) -> None:
        intent = CountedAction(f"intent {self._now()}", condition.action, self._now())
        await self._change(condition.node_name, lambda node: storm_guard.count(node, intent))
        await super()._carry_out(condition, reason)


class NoFence(GuardedActions):
    """Whoever held the lock once goes on, however long it slept."""

    async def _act_under(self, lock: Lease, condition: Condition, reason: str) -> None:
        held = type("Held", (), {"held": True, "token": lock.token})()
        patch = msgspec.structs.replace(self._policy.guard, lock_s=3600.0)
        before, self._policy = self._policy, msgspec.structs.replace(self._policy, guard=patch)
        try:
            await super()._act_under(held, condition, reason)
        finally:
            self._policy = before


class NoCompareAndSwap(GuardedActions):
    """The record is written over whatever is there, and the lock isn't looked at again."""

    async def _commit(
        self, condition: Condition, records: guarded_actions.Records, taken: GuardedAction
    ) -> bool:
        after = storm_guard.commit(records.node, taken, self._policy.guard)
        await self._change(condition.node_name, lambda _: after)
        return True

    async def _act_under(self, lock: Lease, condition: Condition, reason: str) -> None:
        await super()._act_under(type("Held", (), {"held": True, "token": lock.token})(), condition, reason)


class NoLock(GuardedActions):
    """Everybody acts at once, and the record is no obstacle either."""

    async def _carry_out(self, condition: Condition, reason: str) -> None:
        await self._act_under(type("Held", (), {"held": True, "token": 1})(), condition, reason)

    async def _commit(
        self, condition: Condition, records: guarded_actions.Records, taken: GuardedAction
    ) -> bool:
        after = storm_guard.commit(records.node, taken, self._policy.guard)
        await self._change(condition.node_name, lambda _: after)
        return True


class OwnClock(GuardedActions):
    """Each look starts the clock again: the first draft of the document, which never acted."""

    async def records(self, condition: Condition) -> guarded_actions.Records:
        records = await super().records(condition)
        if records.anchor is None:
            return records
        return records._replace(anchor=msgspec.structs.replace(records.anchor, since=self._now()))


class SilentFailure(GuardedActions):
    """A failed action is a line in a log."""

    async def _finish(
        self, condition: Condition, taken: GuardedAction, outcome: Outcome, detail: str
    ) -> None:
        await self._settle(condition.node_name, taken.id, outcome)


class NoEscalation(GuardedActions):
    """ "Restarted" is the last that anybody hears."""

    async def follow_up(self, condition: Condition) -> None:
        node, _ = await self.node(condition.node_name)
        if (
            node.last_action is not None
            and self._now() - node.last_action.at > self._policy.guard.escalation_s
        ):
            taken = node.last_action.id
            await self._change(condition.node_name, lambda now: storm_guard.followed_up(now, taken))


class ClaimIsEnough(GuardedActions):
    """A page that somebody has claimed counts as sent, though the sender may have died."""

    async def page(self, node_name: str, what: str, text: str, *, urgent: bool) -> bool:
        key = self._key(node_name, f"{guarded_actions._token(self._job)}.page.{guarded_actions._token(what)}")
        try:
            await self._store.create(key, b'{"claimed_at":0,"sent":true}')
        except (KeyExists, RevisionConflict):
            return True
        await self._guarded_job.page(f"{node_name}.{what}", text, urgent=urgent)
        return True


# Functions of `core.policy.storm_guard`, replaced.
def _uncounted(node: NodeGuard, entry: object) -> NodeGuard:
    return node


RULES: dict[str, tuple[str, Any]] = {
    "no cooldown": ("cooling_s", lambda node, now, policy: 0.0),
    "nothing is counted": ("count", _uncounted),
    "the breaker never opens": ("breaker_actions", lambda node, now: []),
    "no persistence": ("_persistence", lambda seen, anchor, now, policy: None),
}
SUBCLASSES: dict[str, type[GuardedActions]] = {
    "no re-verification": NoReverification,
    "intents are counted": CountsIntents,
    "no fence": NoFence,
    "no compare-and-swap": NoCompareAndSwap,
    "no lock": NoLock,
    "everybody's own clock": OwnClock,
    "failed actions are silent": SilentFailure,
    "no escalation": NoEscalation,
    "a claimed page counts as sent": ClaimIsEnough,
}
MUTANTS = [*RULES, *SUBCLASSES]


@contextmanager
def mutant(name: str, patch: pytest.MonkeyPatch) -> Iterator[type[GuardedActions]]:
    """The class with this rule broken."""
    with patch.context() as inside:
        if name in RULES:
            inside.setattr(storm_guard, *RULES[name])
        yield SUBCLASSES.get(name, GuardedActions)
