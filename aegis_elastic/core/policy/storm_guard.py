"""The storm guard: when an automatic action is allowed, and why not (section 11 of the specification).

The danger of automatic restarts is not one node that stays down but a storm in which automation ends machines
faster than they start. So every action passes the same rules, over records in the *shared* store, never in a
process's memory:

0. *Observation*: the condition was observed several times in a row.
1. *Persistence*: it has held for a while, counted from an anchor that the first observer sets for everybody.
   The condition is derived from shared records, and only its end clears an anchor: an instance that has
   fewer observations doesn't.
2. *Cooldown*: shortly after an action the node's trouble is the action's consequence, and no new incident.
3. *Breaker*: so many guarded actions a node in 24 hours, over all paths; then operators only.
4. *Lock*: one acts, the others skip. It outlives the action.
5. *Re-verification*: everything is read again right before acting, since a node that has recovered meanwhile
   must not be touched.
6. The action is counted, and its cooldown set, in one compare-and-swap just before it is carried out: never
   for an intent, and never afterwards, when a crash could forget it. What was not carried out is given back;
   a failed one counts, clears its cooldown and calls an operator.
7. *Escalation*: if the condition lasts after the action, an operator is called, once.

Everything here is pure: records and `now` (wall seconds) in, a decision with its reason out.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from aegis_elastic.core.model import Verdict
from aegis_elastic.core.policy.settings import Guard

DAY_S = 86400.0
# Records from a clock that ran ahead by more than this are not believed.
SKEW_S = 3600.0
ENTRIES_MAX = 256
STALE_LOOKS = 3
# A busy machine observes later than it should.
STALE_S_MIN = 30.0


class Action(str, enum.Enum):
    """What automation does to a node."""

    LEVEL_1 = "level_1"
    RESTART_HUNG = "restart_hung"
    LEVEL_2 = "level_2"
    ISOLATE = "isolate"
    EVICT_SLOW = "evict_slow"
    EVICT_HUNG = "evict_hung"
    LOSS = "loss"
    ASK_HUMAN = "ask_human"


# For texts to people.
DESCRIPTIONS = {
    Action.LEVEL_1: "the restart in place",
    Action.RESTART_HUNG: "the restart in place",
    Action.LEVEL_2: "the restart of the agent",
    Action.ISOLATE: "the isolation",
    Action.EVICT_SLOW: "the eviction",
    Action.EVICT_HUNG: "the eviction",
    Action.LOSS: "the replacement",
    Action.ASK_HUMAN: "the call for a human",
}


class Rules(NamedTuple):
    """Which rules bind an action. `counts`: adds to the breaker; `guarded`: an open breaker stops it.

    `retry`: what it costs the worker, at the action and not at the mark.
    """

    persistence: bool
    cooldown: bool
    counts: bool
    guarded: bool
    boundary: bool
    retry: int


# The table of section 11. A crash must not wait three minutes, and a fourth crash in a day must not strand a
# job that allows a hundred retries: level 1 after an exit is bounded by maxRetry alone. Where the breaker is
# open (`breaker_open`) it prefers a fit spare, if one waits.
RULES = {
    Action.LEVEL_1: Rules(False, False, counts=True, guarded=False, boundary=False, retry=1),
    Action.RESTART_HUNG: Rules(True, True, counts=True, guarded=True, boundary=False, retry=1),
    Action.LEVEL_2: Rules(False, True, counts=True, guarded=True, boundary=False, retry=0),
    Action.ISOLATE: Rules(False, False, counts=True, guarded=True, boundary=False, retry=0),
    Action.EVICT_SLOW: Rules(True, True, counts=True, guarded=True, boundary=True, retry=0),
    Action.EVICT_HUNG: Rules(True, True, counts=True, guarded=True, boundary=False, retry=0),
    Action.LOSS: Rules(False, False, counts=False, guarded=False, boundary=False, retry=0),
    # A pause that ends by itself is no reason to call an operator either.
    Action.ASK_HUMAN: Rules(True, False, counts=False, guarded=False, boundary=False, retry=0),
}


class Anchor(msgspec.Struct, frozen=True):
    """Since when a condition holds, by its first observer; `incident` names this stretch.

    `seen`: when any instance last observed it. Without that, a condition that ended and began again while
    unobserved would be one incident.
    """

    since: float
    by: str
    incident: str
    seen: float


class CountedAction(msgspec.Struct, frozen=True):
    """One action that the breaker counts. `at` in wall seconds."""

    id: str
    action: Action
    at: float


class Outcome(str, enum.Enum):
    """The outcome of an action. UNKNOWN: the instance that began it has not been heard from since."""

    BEGUN = "begun"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"
    WITHDRAWN = "withdrawn"


class GuardedAction(msgspec.Struct, frozen=True):
    """The newest guarded action on a node. `token` is the lock's: it grows from holder to holder."""

    id: str
    action: Action
    verdict: str
    reason: str
    job: str
    node_name: str
    worker: str
    by: str
    token: int
    at: float
    outcome: Outcome = Outcome.BEGUN
    followed_up: bool = False


class NodeGuard(msgspec.Struct, frozen=True):
    """The guard's record of a node over all jobs: one value, one compare-and-swap."""

    counted: tuple[CountedAction, ...] = ()
    cool_until: float = 0.0
    last_action: GuardedAction | None = msgspec.field(name="deed", default=None)


class Condition(NamedTuple):
    """A condition of one node, as one job sees it, and the action that would answer it."""

    node_name: str
    worker: str
    verdict: Verdict
    action: Action
    reason: str


class Observation(NamedTuple):
    """The condition by the shared records now. `bad`: it holds; `boundary`: stopping would lose nothing;
    `counts`: how many observations in a row found it.
    """

    bad: bool
    boundary: bool
    counts: int


class DecisionKind(str, enum.Enum):
    """What `consider` leads to."""

    NOTHING = "nothing"
    CLEAR = "clear"
    ANCHOR = "anchor"
    WAIT = "wait"
    ALERT = "alert"
    ACT = "act"


class Decision(NamedTuple):
    """What is due, and why."""

    kind: DecisionKind
    reason: str


def remedy(verdict: Verdict, node: NodeGuard, can_leave: bool, now: float) -> Action:
    """The action that answers a mark.

    A node that hangs again after a restart leaves, if training can go on without it.
    """
    if verdict is Verdict.SLOW:
        return Action.EVICT_SLOW
    if verdict in (Verdict.FROZEN, Verdict.DESYNC):
        again = any(entry.action is Action.RESTART_HUNG for entry in recent_actions(node, now))
        return Action.EVICT_HUNG if again and can_leave else Action.RESTART_HUNG
    # Silent, while its training goes on: it may be switched off or cut off. Or alive, and busy for long:
    # ending that would be a certain loss for a guess.
    return Action.ASK_HUMAN


def consider(
    condition: Condition,
    observation: Observation,
    anchor: Anchor | None,
    node: NodeGuard,
    now: float,
    policy: Guard,
) -> Decision:
    """Whether this condition's action is due. Called twice: at an observation, and again under the lock."""
    rules = RULES[condition.action]
    if not observation.bad:
        return Decision(DecisionKind.CLEAR if anchor else DecisionKind.NOTHING, "it has recovered")
    if rules.cooldown and (left_s := cooling_s(node, now, policy)) > 0:
        # A restarted node looks bad for a while.
        reason = f"our own doing: {left_s:.0f} s of the cooldown are left"
        return Decision(DecisionKind.CLEAR if anchor else DecisionKind.WAIT, reason)
    if rules.persistence:
        waiting = _persistence(observation, anchor, now, policy)
        if waiting is not None:
            return waiting
    used = len(breaker_actions(node, now))
    if rules.guarded and used >= policy.actions_per_day:
        reason = f"the breaker is open: {used} actions on {condition.node_name} in 24 h"
        return Decision(DecisionKind.ALERT, f"{reason}, {policy.actions_per_day} are allowed")
    if rules.guarded and node.last_action is not None and _unsettled(node.last_action, now, policy):
        return Decision(
            DecisionKind.WAIT,
            f"what became of {DESCRIPTIONS[node.last_action.action]} before isn't settled yet",
        )
    if rules.boundary and not observation.boundary:
        return Decision(DecisionKind.WAIT, "it leaves when a checkpoint has completed")
    held = f", for {now - anchor.since:.0f} s" if anchor else ""
    return Decision(DecisionKind.ACT, f"{condition.verdict.value}{held}: {condition.reason}")


def _unsettled(taken: GuardedAction, now: float, policy: Guard) -> bool:
    # Its job may have ended, and with it all instances that would have followed it up.
    forgotten_s = policy.act_timeout_s + 2 * policy.escalation_s
    return not taken.followed_up and now - taken.at < forgotten_s


def _persistence(
    observation: Observation, anchor: Anchor | None, now: float, policy: Guard
) -> Decision | None:
    if anchor is not None and now - anchor.seen > stale_s(policy):
        return Decision(
            DecisionKind.CLEAR,
            f"nobody looked for {now - anchor.seen:.0f} s: it may have been another",
        )
    if anchor is None:
        if observation.counts < policy.observations:
            return Decision(
                DecisionKind.WAIT,
                f"seen {observation.counts} times in a row, {policy.observations} are wanted",
            )
        return Decision(DecisionKind.ANCHOR, f"seen {observation.counts} times in a row: the clock starts")
    # The instance that set the anchor has observed it often enough: a successor doesn't count anew.
    if anchor.since > now + SKEW_S:
        return Decision(DecisionKind.CLEAR, "the clock's start lies ahead: whoever set it had another time")
    if now - anchor.since < policy.persistence_s:
        held_s = max(now - anchor.since, 0.0)
        return Decision(
            DecisionKind.WAIT, f"it has held for {held_s:.0f} s, {policy.persistence_s:.0f} s are wanted"
        )
    return None


def stale_s(policy: Guard) -> float:
    """Seconds without observation after which an anchor is stale: a few observations, or a part of the time
    that a condition must hold, since one that ended and began again in a gap hasn't held.
    """
    return max(STALE_S_MIN, policy.persistence_s / 3, STALE_LOOKS * policy.look_s)


def cooling_s(node: NodeGuard, now: float, policy: Guard) -> float:
    """Seconds of the node's cooldown that are left, 0 for none."""
    left_s = node.cool_until - now
    return left_s if 0 < left_s <= policy.cooldown_s + SKEW_S else 0.0


def recent_actions(node: NodeGuard, now: float) -> list[CountedAction]:
    """The counted actions on the node in the last 24 hours."""
    return [entry for entry in node.counted if now - DAY_S < entry.at <= now + SKEW_S]


def breaker_actions(node: NodeGuard, now: float) -> list[CountedAction]:
    """Those of them that open the breaker."""
    return [entry for entry in recent_actions(node, now) if RULES[entry.action].guarded]


def breaker_open(node: NodeGuard, now: float, policy: Guard) -> str:
    """Why the breaker of this node is open, "" if it is closed."""
    used = len(breaker_actions(node, now))
    if used < policy.actions_per_day:
        return ""
    return f"the breaker is open: {used} actions in 24 h, {policy.actions_per_day} are allowed"


def count(node: NodeGuard, entry: CountedAction) -> NodeGuard:
    """The record with one more counted action; the same one twice changes nothing."""
    if not RULES[entry.action].counts or any(entry.id == known.id for known in node.counted):
        return node
    kept = [known for known in node.counted if known.at > entry.at - DAY_S]
    free = [known for known in kept if not RULES[known.action].guarded]
    for known in free[: max(len(kept) + 1 - ENTRIES_MAX, 0)]:
        kept.remove(known)  # never one that opens the breaker
    return msgspec.structs.replace(node, counted=(*kept, entry))


def with_external_action(node: NodeGuard, entry: CountedAction, policy: Guard) -> NodeGuard:
    """The record with an action that the phase machine decided: counted, and with its cooldown."""
    after = count(node, entry)
    if after == node:
        return node
    return msgspec.structs.replace(after, cool_until=max(node.cool_until, entry.at + policy.cooldown_s))


def objection(node: NodeGuard, now: float, policy: Guard) -> str:
    """Why a node's isolation, which has been counted, should not reach its scheduler by itself; "" if it
    may.
    """
    used = len(breaker_actions(node, now))
    if used <= policy.actions_per_day:
        return ""
    return f"the breaker is open: {used} actions in 24 h, {policy.actions_per_day} are allowed"


def commit(node: NodeGuard, taken: GuardedAction, policy: Guard) -> NodeGuard:
    """The record as it must be before the action is carried out: counted, cooling down, begun."""
    made = count(node, CountedAction(taken.id, taken.action, taken.at))
    return msgspec.structs.replace(made, cool_until=taken.at + policy.cooldown_s, last_action=taken)


def settle(node: NodeGuard, action_id: str, outcome: Outcome, policy: Guard) -> NodeGuard:
    """The record after the action. Another action's record is left unchanged."""
    taken = node.last_action
    if taken is None or taken.id != action_id or taken.followed_up:
        return node
    if outcome is Outcome.WITHDRAWN:
        # Nothing was done: nothing counts, and nothing is to be waited for.
        kept = tuple(entry for entry in node.counted if entry.id != action_id)
        return NodeGuard(counted=kept)
    after = msgspec.structs.replace(taken, outcome=outcome)
    if outcome is Outcome.FAILED:
        # It may be tried again, and the operator who is called now is its follow-up.
        after = msgspec.structs.replace(after, followed_up=True)
        return msgspec.structs.replace(node, last_action=after, cool_until=0.0)
    # UNKNOWN keeps its cooldown: perhaps it was done.
    return msgspec.structs.replace(node, last_action=after)


class FollowUp(str, enum.Enum):
    """What an action that has been begun still needs."""

    WAIT = "wait"
    GIVE_UP = "give_up"
    HELPED = "helped"
    ESCALATE = "escalate"


def follow_up(taken: GuardedAction, bad: bool, now: float, policy: Guard) -> tuple[FollowUp, str]:
    """Whether the action helped. `bad`: the condition holds now."""
    age_s = now - taken.at
    if taken.followed_up:
        return FollowUp.WAIT, "it has been followed up"
    if taken.outcome is Outcome.BEGUN and age_s >= policy.act_timeout_s:
        return FollowUp.GIVE_UP, f"nothing was heard of it for {age_s:.0f} s"
    if age_s < policy.escalation_s:
        return FollowUp.WAIT, f"{policy.escalation_s - age_s:.0f} s until it is judged"
    if bad:
        return (
            FollowUp.ESCALATE,
            f"{DESCRIPTIONS[taken.action]} did not help: {taken.verdict} after {age_s:.0f} s",
        )
    return (
        FollowUp.HELPED,
        f"{DESCRIPTIONS[taken.action]} helped: no longer {taken.verdict}",
    )


def followed_up(node: NodeGuard, action_id: str) -> NodeGuard:
    """The record with this action followed up."""
    if node.last_action is None or node.last_action.id != action_id:
        return node
    return msgspec.structs.replace(
        node, last_action=msgspec.structs.replace(node.last_action, followed_up=True)
    )


class PageRecord(msgspec.Struct, frozen=True):
    """One page, so that an incident causes one and not one an observation. Claimed before it is sent, in case
    the sender dies: then another sends it again, since two pages are better than none.
    """

    claimed_at: float
    sent: bool = False


def page_is_due(record: PageRecord | None, now: float, patience_s: float) -> bool:
    """Whether to claim this page."""
    if record is None:
        return True
    return not record.sent and not 0 <= now - record.claimed_at < patience_s
