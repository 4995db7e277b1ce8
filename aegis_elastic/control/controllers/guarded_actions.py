"""Guarded actions on one store: reads records, has `core.policy.storm_guard` decide, and carries out what it
allows.

Several instances may run on one store (two masters while one is being replaced, the masters of several jobs
on one node). Each of them may die between any two lines here; what it leaves behind is enough for the others.

Keys below `guard.<node>`: `state` (`core.policy.storm_guard.NodeGuard`, over all jobs), `lock`, and for each
job `<job>.anchor.<verdict>` and `<job>.page.<what>`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import secrets
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from aegis_elastic.core.model import Verdict
from aegis_elastic.core.policy import storm_guard
from aegis_elastic.core.policy.settings import Policy
from aegis_elastic.core.policy.storm_guard import (
    DESCRIPTIONS,
    Action,
    Anchor,
    Condition,
    CountedAction,
    DecisionKind,
    GuardedAction,
    NodeGuard,
    Outcome,
    PageRecord,
)
from aegis_elastic.store.contract import (
    Entry,
    KeyExists,
    Lease,
    RevisionConflict,
    Store,
    StoreUnavailable,
)

logger = logging.getLogger(__name__)

PREFIX = "guard"
# How long collecting evidence for humans may take: it is worth something, and never the action's delay.
COLLECT_S = 60.0
# After this time a page that was claimed and not sent is another's to send.
PAGE_PATIENCE_S = 120.0
# Two days: no rule looks back further than one.
OLD_S = 2 * 86400.0
# Others change the same node's record a few times a day.
ROUNDS_MAX = 16
TOKEN_CHARS_MAX = 120

T = TypeVar("T")


class GuardedJob(Protocol):
    """What an instance of the guard observes of its job, and does to it."""

    def now(self) -> float:
        """Wall seconds."""

    async def observe(self, condition: Condition) -> tuple[bool, bool]:
        """Whether the condition holds by the shared records *now*, and whether stopping would lose
        nothing.
        """

    async def collect(self, condition: Condition) -> str:
        """Evidence for humans, before it is destroyed by the action."""

    async def act(self, condition: Condition, taken: GuardedAction) -> tuple[Outcome, str]:
        """Carry it out and wait for what becomes of it: DONE, FAILED, or WITHDRAWN if it was not done after
        all.
        """

    async def page(self, key: str, text: str, *, urgent: bool) -> None:
        """Page; returns when the page is on its way."""

    def note(self, condition: Condition, code: str, detail: str) -> None:
        """A line for the journal."""


class Records(NamedTuple):
    """The records that a condition is judged by, with their revisions (0: there is none)."""

    anchor: Anchor | None
    anchor_revision: int
    node: NodeGuard
    node_revision: int


class GuardedActions:
    """One instance of the guard. `name` tells instances apart in records and logs."""

    def __init__(self, store: Store, job: str, name: str, policy: Policy, guarded_job: GuardedJob) -> None:
        """`job`: who of several jobs on a node we are, namespace included."""
        self._store = store
        self._job = job
        self._name = name
        self._policy = policy
        self._guarded_job = guarded_job
        # How often in a row a condition was seen, and when last: two in one moment are one observation.
        self._seen: dict[tuple[str, Verdict], tuple[int, float]] = {}
        self._noted: dict[tuple[str, Verdict], str] = {}

    async def examine(self, condition: Condition) -> DecisionKind:
        """Examine a condition once, and do what is due. StoreUnavailable: nothing may be done now."""
        records = await self.records(condition)
        seen = await self._observe(condition)
        decision = storm_guard.consider(
            condition, seen, records.anchor, records.node, self._now(), self._policy.guard
        )
        if decision.kind is not DecisionKind.ACT:
            self._note(condition, decision.kind.value, decision.reason)
        elif self._policy.mode == "act":
            # What becomes of it is noted by itself.
            self._noted.pop((condition.node_name, condition.verdict), None)
        if decision.kind in (DecisionKind.WAIT, DecisionKind.ALERT, DecisionKind.ACT):
            await self._confirm(condition, records)
        if decision.kind is DecisionKind.ANCHOR:
            await self._anchor(condition, records)
        elif decision.kind is DecisionKind.CLEAR:
            await self._clear(condition, records)
        elif decision.kind is DecisionKind.ALERT:
            incident = records.anchor.incident if records.anchor else "now"
            text = (
                f"{condition.node_name} is {condition.verdict.value}, and nothing is done: {decision.reason}"
            )
            await self.page(condition.node_name, f"open.{incident}", text, urgent=True)
        elif decision.kind is DecisionKind.ACT and condition.action is Action.ASK_HUMAN:
            incident = records.anchor.incident if records.anchor else "now"
            text = f"{condition.node_name} ({condition.worker}) is for a human: {decision.reason}"
            await self.page(condition.node_name, f"human.{incident}", text, urgent=True)
        elif decision.kind is DecisionKind.ACT and self._policy.mode == "observe":
            await self._page_would_act(condition, records, decision.reason)
        elif decision.kind is DecisionKind.ACT:
            await self._carry_out(condition, decision.reason)
        return decision.kind

    async def records(self, condition: Condition) -> Records:
        """Read the records of a condition."""
        anchor = await self._store.get(self._anchor_key(condition))
        node, revision = await self.node(condition.node_name)
        found = _decode(anchor.value, Anchor) if anchor else None
        return Records(found, anchor.revision if anchor else 0, node, revision)

    async def node(self, node_name: str) -> tuple[NodeGuard, int]:
        """The node's record and its revision, an empty one and 0 if there is none."""
        entry = await self._store.get(self._key(node_name, "state"))
        if entry is None:
            return NodeGuard(), 0
        return _decode(entry.value, NodeGuard) or NodeGuard(), entry.revision

    async def nodes(self, names: Collection[str]) -> dict[str, NodeGuard]:
        """The records of those of these nodes that have one, in one listing."""
        found = {e.key: e for e in await self._store.list(PREFIX) if e.key.endswith(".state")}
        records = {name: found[key] for name in names if (key := self._key(name, "state")) in found}
        return {name: _decode(entry.value, NodeGuard) or NodeGuard() for name, entry in records.items()}

    async def count(self, node_name: str, action: Action, ident: str) -> NodeGuard:
        """Count an action that somebody else decided and that has been done."""
        entry = CountedAction(ident, action, self._now())
        return await self._change(
            node_name, lambda node: storm_guard.with_external_action(node, entry, self._policy.guard)
        )

    async def unsettled(self) -> list[GuardedAction]:
        """This job's actions that nobody has followed up yet, whoever began them."""
        entries = [entry for entry in await self._store.list(PREFIX) if entry.key.endswith(".state")]
        nodes = [node for entry in entries if (node := _decode(entry.value, NodeGuard)) is not None]
        actions = [node.last_action for node in nodes if node.last_action is not None]
        return [taken for taken in actions if taken.job == self._job and not taken.followed_up]

    async def forget(self) -> None:
        """Delete what matters to nobody any more: pages and anchors of long ago, nodes that were calm."""
        now = self._now()
        for entry in await self._store.list(PREFIX):
            if _is_old(entry, now):
                try:
                    await self._store.delete(entry.key, entry.revision)
                except RevisionConflict:
                    continue  # it matters to somebody

    async def follow_up(self, condition: Condition) -> None:
        """See whether this job's last action on the condition's node has helped, and call a human if not."""
        node, _ = await self.node(condition.node_name)
        taken = node.last_action
        if taken is None or taken.job != self._job or taken.followed_up:
            return
        bad, _ = await self._guarded_job.observe(condition)
        what, reason = storm_guard.follow_up(taken, bad, self._now(), self._policy.guard)
        if what is storm_guard.FollowUp.WAIT:
            return
        if what is storm_guard.FollowUp.GIVE_UP:
            text = f"{DESCRIPTIONS[taken.action]} on {condition.node_name}: {reason}; was it done?"
            if await self.page(condition.node_name, f"unknown.{taken.id}", text, urgent=True):
                await self._settle(condition.node_name, taken.id, Outcome.UNKNOWN)
            return
        if what is storm_guard.FollowUp.ESCALATE:
            # Before the record says so: a page that is sent twice is better than one that never is.
            text = f"{condition.node_name}: {reason}. {taken.reason}"
            if not await self.page(condition.node_name, f"no_help.{taken.id}", text, urgent=True):
                return
        self._guarded_job.note(condition, f"guard.{what.value}", reason)
        await self._change(condition.node_name, lambda now: storm_guard.followed_up(now, taken.id))

    async def page(self, node_name: str, what: str, text: str, *, urgent: bool) -> bool:
        """Call humans, once for each `what` of a node. False while another has claimed it: it may have died
        before it sent it, so whoever relies on the page asks again.
        """
        key = self._key(node_name, f"{_token(self._job)}.page.{_token(what)}")
        entry = await self._store.get(key)
        record = _decode(entry.value, PageRecord) if entry else None
        if not storm_guard.page_is_due(record, self._now(), PAGE_PATIENCE_S):
            return record is not None and record.sent
        claim = PageRecord(self._now())
        try:
            if entry is None:
                revision = await self._store.create(key, msgspec.json.encode(claim))
            else:
                revision = await self._store.update(key, msgspec.json.encode(claim), entry.revision)
        except (KeyExists, RevisionConflict):
            return False  # another has claimed it
        await self._guarded_job.page(f"{node_name}.{what}", text, urgent=urgent)
        try:
            await self._store.update(
                key, msgspec.json.encode(msgspec.structs.replace(claim, sent=True)), revision
            )
        except RevisionConflict:
            logger.info("page %s was sent twice", key)
        return True

    # ------------------------------------------------------------ the parts of an examination

    async def _observe(self, condition: Condition) -> storm_guard.Observation:
        bad, boundary = await self._guarded_job.observe(condition)
        key = (condition.node_name, condition.verdict)
        if not bad:
            self._seen.pop(key, None)
            return storm_guard.Observation(False, boundary, 0)
        times, last = self._seen.get(key, (0, -math.inf))
        if not 0 <= self._now() - last < self._policy.guard.look_s / 2:
            times, last = times + 1, self._now()
            self._seen[key] = times, last
        return storm_guard.Observation(True, boundary, times)

    async def _anchor(self, condition: Condition, records: Records) -> None:
        anchor = Anchor(self._now(), self._name, secrets.token_hex(8), self._now())
        if records.anchor_revision:
            await self._clear(condition, records)  # it makes no sense, and would be in the way for ever
        try:
            await self._store.create(self._anchor_key(condition), msgspec.json.encode(anchor))
        except KeyExists:
            return  # the first observer wins, and everybody sees its clock

    async def _confirm(self, condition: Condition, records: Records) -> None:
        """Write down now and then that the condition was seen again."""
        anchor, every_s = records.anchor, storm_guard.stale_s(self._policy.guard) / 3
        if anchor is None or self._now() - anchor.seen < every_s:
            return
        seen = msgspec.structs.replace(anchor, seen=self._now())
        try:
            await self._store.update(
                self._anchor_key(condition), msgspec.json.encode(seen), records.anchor_revision
            )
        except RevisionConflict:
            return  # another has just done so, or has cleared it

    async def _clear(self, condition: Condition, records: Records) -> None:
        try:
            await self._store.delete(self._anchor_key(condition), records.anchor_revision or None)
        except RevisionConflict:
            return  # a new incident has begun meanwhile

    async def _page_would_act(self, condition: Condition, records: Records, reason: str) -> None:
        incident = records.anchor.incident if records.anchor else "now"
        self._note(
            condition, "would_act", f"{DESCRIPTIONS[condition.action]} on {condition.node_name}: {reason}"
        )
        due = f"{DESCRIPTIONS[condition.action]} on {condition.node_name} is due"
        text = f"{due}, but the policy is to observe: {reason}"
        await self.page(condition.node_name, f"would.{condition.action.value}.{incident}", text, urgent=False)

    async def _carry_out(self, condition: Condition, reason: str) -> None:
        try:
            lock = await self._store.lease(
                self._key(condition.node_name, "lock"), self._name.encode(), self._policy.guard.lock_s
            )
        except KeyExists:
            self._note(condition, "locked", "another instance is at it")
            return
        try:
            await self._act_under(lock, condition, reason)
        finally:
            try:
                await lock.release()
            except StoreUnavailable as error:
                logger.warning("the lock on %s is left to expire: %s", condition.node_name, error)

    async def _act_under(self, lock: Lease, condition: Condition, reason: str) -> None:
        incident = await self._send_evidence(condition, reason)
        # It may have taken a minute, and what was observed first may be wrong by now: everything anew.
        records = await self.records(condition)
        seen = await self._observe(condition)
        again = storm_guard.consider(
            condition, seen, records.anchor, records.node, self._now(), self._policy.guard
        )
        if again.kind is not DecisionKind.ACT:
            self._guarded_job.note(condition, "guard.cancelled", again.reason)
            what = f"{DESCRIPTIONS[condition.action]} on {condition.node_name} ({condition.worker})"
            text = f"{what} is cancelled: {again.reason}"
            await self.page(condition.node_name, f"cancelled.{incident}", text, urgent=False)
            if again.kind is DecisionKind.CLEAR:
                await self._clear(condition, records)
            return
        taken = GuardedAction(
            id=secrets.token_hex(8),
            action=condition.action,
            verdict=condition.verdict.value,
            reason=again.reason,
            job=self._job,
            node_name=condition.node_name,
            worker=condition.worker,
            by=self._name,
            token=lock.token,
            at=self._now(),
        )
        if not lock.held or not await self._commit(condition, records, taken):
            self._guarded_job.note(condition, "guard.cancelled", "another instance was quicker")
            return
        if not lock.held or self._now() - taken.at > self._policy.guard.lock_s:
            # We were asleep: by now it may be somebody else's turn.
            outcome, detail = Outcome.WITHDRAWN, "the lock was lost before the action"
        else:
            outcome, detail = await self._guarded_job.act(condition, taken)
        await self._finish(condition, taken, outcome, detail)
        await self._clear(condition, records)

    async def _send_evidence(self, condition: Condition, reason: str) -> str:
        """Have what is known on its way, and in the journal, before the action destroys it. Returns the
        incident.
        """
        try:
            evidence = await asyncio.wait_for(self._guarded_job.collect(condition), COLLECT_S)
        except asyncio.TimeoutError:
            evidence = f"no evidence could be collected in {COLLECT_S:.0f} s"
        except OSError as error:  # what humans would have liked to read; nothing depends on it
            evidence = f"no evidence could be collected: {error}"
        anchor = (await self.records(condition)).anchor
        incident = anchor.incident if anchor else "now"
        what = f"{DESCRIPTIONS[condition.action]} on {condition.node_name} ({condition.worker})"
        text = f"{what} is due: {reason}\n{evidence}"
        await self.page(condition.node_name, f"due.{incident}", text.rstrip(), urgent=False)
        return incident

    async def _commit(self, condition: Condition, records: Records, taken: GuardedAction) -> bool:
        """Count the action and begin its cooldown, unless the node's record has changed since we read it."""
        after = msgspec.json.encode(storm_guard.commit(records.node, taken, self._policy.guard))
        key = self._key(condition.node_name, "state")
        try:
            if records.node_revision:
                await self._store.update(key, after, records.node_revision)
            else:
                await self._store.create(key, after)
        except (RevisionConflict, KeyExists):
            return False
        return True

    async def _finish(
        self, condition: Condition, taken: GuardedAction, outcome: Outcome, detail: str
    ) -> None:
        self._guarded_job.note(condition, f"guard.{outcome.value}", f"{DESCRIPTIONS[taken.action]}: {detail}")
        what = f"{DESCRIPTIONS[taken.action]} on {condition.node_name} ({condition.worker}): {taken.reason}"
        if outcome is Outcome.FAILED:
            # At once, before anything else can go wrong.
            await self.page(
                condition.node_name, f"failed.{taken.id}", f"FAILED: {what}. {detail}", urgent=True
            )
        await self._settle(condition.node_name, taken.id, outcome)
        if outcome is Outcome.DONE:
            await self.page(condition.node_name, f"done.{taken.id}", f"{what}. {detail}", urgent=False)

    async def _settle(self, node_name: str, action_id: str, outcome: Outcome) -> None:
        await self._change(
            node_name, lambda node: storm_guard.settle(node, action_id, outcome, self._policy.guard)
        )

    async def _change(self, node_name: str, edit: Callable[[NodeGuard], NodeGuard]) -> NodeGuard:
        key = self._key(node_name, "state")
        for _ in range(ROUNDS_MAX):
            before, revision = await self.node(node_name)
            after = edit(before)
            if after == before:
                return after
            try:
                if revision:
                    await self._store.update(key, msgspec.json.encode(after), revision)
                else:
                    await self._store.create(key, msgspec.json.encode(after))
            except (RevisionConflict, KeyExists):
                continue
            return after
        raise StoreUnavailable(f"cannot change the guard's record of {node_name}: others do all the time")

    def _note(self, condition: Condition, code: str, detail: str) -> None:
        """Note what has changed since the last examination: the numbers in a reason change with every one."""
        key = (condition.node_name, condition.verdict)
        if code == DecisionKind.NOTHING.value:
            self._noted.pop(key, None)
        elif self._noted.get(key) != code:
            self._noted[key] = code
            self._guarded_job.note(condition, f"guard.{code}", detail)

    def _now(self) -> float:
        return self._guarded_job.now()

    def _anchor_key(self, condition: Condition) -> str:
        return self._key(condition.node_name, f"{_token(self._job)}.anchor.{condition.verdict.value}")

    def _key(self, node_name: str, rest: str) -> str:
        return f"{PREFIX}.{_token(node_name)}.{rest}"


def _is_old(entry: Entry, now: float) -> bool:
    if ".page." in entry.key:
        page = _decode(entry.value, PageRecord)
        return page is None or now - page.claimed_at > OLD_S
    if ".anchor." in entry.key:
        anchor = _decode(entry.value, Anchor)
        return anchor is None or now - anchor.seen > OLD_S
    node = _decode(entry.value, NodeGuard) if entry.key.endswith(".state") else None
    return node is not None and all(now - counted.at > OLD_S for counted in node.counted)


def _decode(value: bytes, kind: type[T]) -> T | None:
    """A record; None, and a line in the log, if it makes no sense: then the guard begins anew with it."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        logger.error("ignored a record of the guard that can't be read as %s: %s", kind.__name__, error)
        return None


def _token(name: str) -> str:
    """A name as a part of a key: names may have any characters and be long, keys may not."""
    token = name.encode(errors="replace").hex()
    if len(token) > TOKEN_CHARS_MAX:
        token = hashlib.sha256(name.encode(errors="replace")).hexdigest()
    return token or "_"  # what is of no node
