"""Policy replay: when the storm guard would have acted, or a recovery been held, in a recorded run under
another policy.

The journal has the marks and findings with their times; the decisions follow from them. How the run would
have gone on is unknown, so each stretch of a mark, and each round of checks, is judged by itself: what was
done about it, and what would have been.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from aegis_elastic.core.accounts.journal import Walked
from aegis_elastic.core.events import Act, Evict, Finish, Hold
from aegis_elastic.core.machine.change import feasible
from aegis_elastic.core.machine.node_facts import BOUNDARY_S
from aegis_elastic.core.model import TERMINAL, NodeMark, Phase, Status, Verdict
from aegis_elastic.core.policy import correlation, storm_guard
from aegis_elastic.core.policy.correlation import WorkerFindings
from aegis_elastic.core.policy.settings import Policy
from aegis_elastic.core.policy.storm_guard import (
    Action,
    Anchor,
    Condition,
    DecisionKind,
    GuardedAction,
    NodeGuard,
    Observation,
    Outcome,
)

# A mark is evaluated at most so often in one stretch: a day, every five seconds.
EVALUATIONS_MAX = 20_000


class ReplayedAction(NamedTuple):
    """One stretch or round: its subject, when it began (wall seconds), when the run acted (seconds after
    that, None: never), when the policy would have, and why (or why not).
    """

    what: str
    at: float
    done_s: float | None
    would_s: float | None
    why: str

    @property
    def differs(self) -> bool:
        """Whether the policy makes a difference: of more than a second and a tenth of the time."""
        if self.done_s is None or self.would_s is None:
            return self.done_s != self.would_s
        return abs(self.done_s - self.would_s) > max(1.0, 0.1 * self.done_s)


class _Stretch:
    """A mark in force, and the storm guard's state for it."""

    def __init__(self, mark: NodeMark, at: float) -> None:
        self.mark = mark
        self.at = at
        self.done_at: float | None = None
        self.would_at: float | None = None
        self.why = "it did not last"
        self.evaluations = 0
        self.anchor: Anchor | None = None
        self.next_at = at

    def result(self) -> ReplayedAction:
        done = None if self.done_at is None else self.done_at - self.at
        would = None if self.would_at is None else self.would_at - self.at
        return ReplayedAction(
            f"{self.mark.node_name} marked {self.mark.verdict.value}", self.at, done, would, self.why
        )


class _PolicyReplay:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._guard = policy.guard
        self._nodes: dict[str, NodeGuard] = {}
        self._stretches: dict[tuple[str, Verdict], _Stretch] = {}
        self._rounds: dict[str, WorkerFindings] = {}
        self._seq_num = -1
        self._held = False

    def follow(self, walked: Walked) -> Iterator[ReplayedAction]:
        """Take in one line of the journal; yields the stretches and rounds that end with it."""
        line, before = walked.line, walked.before
        if before is not None:
            self._evaluate_until(line.t, before)
        yield from self._check_round(walked)
        event, status = line.event, walked.made.status
        if isinstance(event, Evict) or (isinstance(event, Act) and event.verdict != "manual"):
            self._mark_acted(event, before, line.t)
        if walked.made.name in ("error", "lost") and before is not None:
            self._count_exit(before, line.t, line.seq)
        in_force = {(m.node_name, m.verdict): m for m in status.marks} if status.phase not in TERMINAL else {}
        for key in [*self._stretches]:
            if key not in in_force:
                yield self._stretches.pop(key).result()
        for key, mark in in_force.items():
            stretch = self._stretches.setdefault(key, _Stretch(mark, line.t))
            stretch.mark = mark

    def end(self) -> Iterator[ReplayedAction]:
        """The stretches that are open at the end of the journal."""
        for stretch in self._stretches.values():
            yield stretch.result()

    def _evaluate_until(self, until: float, status: Status) -> None:
        for stretch in self._stretches.values():
            while (
                stretch.next_at <= until
                and stretch.would_at is None
                and stretch.evaluations < EVALUATIONS_MAX
            ):
                self._evaluate(stretch, stretch.next_at, status)
                stretch.next_at += self._guard.look_s

    def _evaluate(self, stretch: _Stretch, now: float, status: Status) -> None:
        mark, node = stretch.mark, self._nodes.get(stretch.mark.node_name, NodeGuard())
        stretch.evaluations += 1
        action = storm_guard.remedy(mark.verdict, node, feasible(status, mark.node_name), now)
        condition = Condition(mark.node_name, mark.worker, mark.verdict, action, mark.reason)
        boundary = mark.safe and 0 <= now - status.saved_at <= BOUNDARY_S
        if stretch.anchor is not None:
            stretch.anchor = Anchor(stretch.anchor.since, "", "", now)
        decision = storm_guard.consider(
            condition,
            Observation(True, boundary, stretch.evaluations),
            stretch.anchor,
            node,
            now,
            self._guard,
        )
        stretch.why = decision.reason
        if decision.kind is DecisionKind.ANCHOR:
            stretch.anchor = Anchor(now, "", "", now)
        elif decision.kind is DecisionKind.CLEAR:
            stretch.anchor = None
        elif decision.kind is DecisionKind.ACT and action is Action.ASK_HUMAN:
            stretch.why = f"for a human: {decision.reason}"
        elif decision.kind is DecisionKind.ACT and self._policy.mode == "observe":
            stretch.why = f"only observed: {decision.reason}"
        elif decision.kind is DecisionKind.ACT:
            stretch.would_at = now
            self._nodes[mark.node_name] = _committed(node, condition, now, self._policy)

    def _mark_acted(self, event: Act | Evict, before: Status | None, t: float) -> None:
        node_name = event.node_name if isinstance(event, Evict) else ""
        if isinstance(event, Act) and before is not None:
            worker = before.worker(event.worker)
            node_name = worker.node_name if worker is not None else ""
        for (marked, _), stretch in self._stretches.items():
            if marked == node_name and stretch.done_at is None:
                stretch.done_at = t

    def _count_exit(self, before: Status, t: float, seq: int) -> None:
        for worker in before.workers:
            if worker.failed or worker.restarted:
                node = self._nodes.get(worker.node_name, NodeGuard())
                entry = storm_guard.CountedAction(f"exit {seq}", Action.LEVEL_1, t)
                self._nodes[worker.node_name] = storm_guard.with_external_action(node, entry, self._guard)

    def _check_round(self, walked: Walked) -> Iterator[ReplayedAction]:
        event, before, t = walked.line.event, walked.before, walked.line.t
        if before is None or before.phase is not Phase.TROUBLESHOOTING:
            return
        if isinstance(event, Finish) and event.seq_num == before.seq_num:
            if self._seq_num != event.seq_num:
                self._seq_num, self._rounds = event.seq_num, {}
            worker = before.worker(event.worker)
            if worker is not None:
                self._rounds[event.worker] = WorkerFindings(worker.node_name, t, event.findings)
            return
        workers = [worker.name for worker in before.workers]
        if self._rounds and all(name in self._rounds for name in workers):
            found = correlation.judge(self._rounds, workers, t, self._guard)
            self._rounds = {}
            held = isinstance(event, Hold)
            if found is not None or held:
                would = 0.0 if found is not None and self._policy.mode == "act" else None
                why = found.reason if found is not None else "this policy calls it the nodes' own"
                yield ReplayedAction("the recovery holds", t, 0.0 if held else None, would, why)


def replay_policy(walked: Iterable[Walked], policy: Policy) -> list[ReplayedAction]:
    """Replay the run under this policy."""
    replay = _PolicyReplay(policy)
    ended = [action for each in walked for action in replay.follow(each)]
    return [*ended, *replay.end()]


def _committed(node: NodeGuard, condition: Condition, now: float, policy: Policy) -> NodeGuard:
    taken = GuardedAction(
        id=f"{condition.node_name} {now}",
        action=condition.action,
        verdict=condition.verdict.value,
        reason="",
        job="",
        node_name=condition.node_name,
        worker=condition.worker,
        by="",
        token=0,
        at=now,
        outcome=Outcome.DONE,
        followed_up=True,
    )
    return storm_guard.commit(node, taken, policy.guard)
