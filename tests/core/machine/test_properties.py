"""What must hold for the machine whatever happens, tried on random runs (`walks`)."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings

from aegis_elastic.core.events import Finish, Independent, Publish, Reconcile, Renew
from aegis_elastic.core.machine import RULES, step
from aegis_elastic.core.model import RECOVERING, TERMINAL, JobSpec, Phase, Status, Verdict, digest
from aegis_elastic.core.protocol.orders import derive_order
from tests.core.machine.walks import KINDS, NAMES, Choice, Step, Walk, moves, specs


def retries_of(status: Status) -> list[int]:
    return [worker.retries for worker in status.workers]


def exceeded(status: Status) -> bool:
    return any(count > status.spec.max_retry for count in retries_of(status))


@given(specs(), moves)
def test_terminal_phases_absorb(spec: JobSpec, walk: list[Choice]) -> None:
    for before, _, made, _ in Walk(spec, walk).steps:
        if before.phase in TERMINAL:
            assert made.status is before


@given(specs(), moves)
def test_counts_stay_in_bounds_and_agree(spec: JobSpec, walk: list[Choice]) -> None:
    for _, _, made, _ in Walk(spec, walk).steps:
        s = made.status
        assert all(0 <= count <= spec.max_retry + 1 for count in retries_of(s))
        assert 0 <= s.recover_count <= spec.max_retry + (s.phase is Phase.FAILED)
        if s.phase not in TERMINAL:
            assert s.recover_count == min(max(retries_of(s), default=0), spec.max_retry)


@given(specs(), moves)
def test_nobody_is_charged_twice_for_one_end(spec: JobSpec, walk: list[Choice]) -> None:
    charged: Counter[int] = Counter()
    for before, event, made, _ in Walk(spec, walk).steps:
        after = made.status
        grown = after.recover_count - before.recover_count
        back = made.name in ("refund", "saved")
        assert grown in ((0, -1) if back else (0, 1)), "one bump a step"
        kept = {worker.name: worker.retries for worker in before.workers}
        raised = [
            worker for worker in after.workers if worker.retries > kept.get(worker.name, worker.retries)
        ]
        entered_run = after.incarnation > before.incarnation and not isinstance(event, Independent)
        if raised and not entered_run and made.name not in ("shrink", "merged"):
            assert before.phase is Phase.RUN_COMMAND, "counted in RunCommand only"
            assert all(worker.retries == kept[worker.name] + 1 for worker in raised)
        if grown > 0 and after.phase is not Phase.FAILED:
            charged[before.incarnation] += 1
    assert all(times == 1 for times in charged.values())


@given(specs(), moves)
def test_training_never_runs_with_exceeded_retries_or_unequal_counts(
    spec: JobSpec, walk: list[Choice]
) -> None:
    for before, _, made, _ in Walk(spec, walk).steps:
        s = made.status
        if s.phase is Phase.RUN_COMMAND:
            assert not exceeded(s)
            assert set(retries_of(s)) == {s.recover_count}
        if exceeded(before) and made.name != "refund":
            assert s.phase in (*RECOVERING, Phase.FAILED)


@given(specs(), moves)
def test_every_effect_has_the_id_of_its_transition(spec: JobSpec, walk: list[Choice]) -> None:
    for before, _, made, _ in Walk(spec, walk).steps:
        assert all(effect.step == made.status.step for effect in made.effects)
        assert made.status.step == before.step + (made.status is not before)
        for effect in made.effects:
            if isinstance(effect, Publish):
                assert effect.seq_num == made.status.seq_num > before.seq_num
        assert made.reason
        assert made.name


@given(specs(), moves)
def test_the_table_says_where_its_rules_lead(spec: JobSpec, walk: list[Choice]) -> None:
    for before, event, made, _ in Walk(spec, walk).steps:
        after = made.status
        if not isinstance(event, Reconcile):
            if not isinstance(event, Independent):
                assert after.phase is before.phase, "facts note; only the controller moves the phase"
            continue
        if before.phase in TERMINAL or made.name == "wait":
            assert after is before
            continue
        # decide_overdue is one rule with three names for what it did.
        names = {made.name} | ({"overdue"} if made.name in ("shrink", "independent") else set())
        rules = [rule for rule in RULES if rule.name in names and before.phase in rule.phases]
        assert any(after.phase in rule.to for rule in rules), (made.name, before.phase, after.phase)


@given(specs(), moves)
def test_orders_and_starts_are_numbered(spec: JobSpec, walk: list[Choice]) -> None:
    for before, _, made, _ in Walk(spec, walk).steps:
        after = made.status
        assert after.seq_num - before.seq_num in (0, 1)
        if after.phase is not before.phase:
            assert after.seq_num == before.seq_num + 1, "another phase is another order"
        if after.incarnation != before.incarnation:
            assert after.incarnation == before.incarnation + 1
            assert after.phase is Phase.RUN_COMMAND
        if derive_order(after) != derive_order(before) and after.phase not in (
            Phase.PENDING,
            Phase.RESTARTING,
        ):
            seats_only = (
                derive_order(after).action is derive_order(before).action and after.seq_num == before.seq_num
            )
            assert after.seq_num > before.seq_num or seats_only


@given(specs(), moves)
def test_told_twice_is_told_once(spec: JobSpec, walk: list[Choice]) -> None:
    for before, event, made, now in Walk(spec, walk).steps:
        if isinstance(event, Reconcile) or made.status is before:
            continue
        again = step(made.status, event, now)
        assert retries_of(again.status) == retries_of(made.status)
        assert again.status is made.status, (event, again.reason)


@given(specs(), moves)
def test_a_job_fails_with_a_reason_and_only_then(spec: JobSpec, walk: list[Choice]) -> None:
    for _, _, made, _ in Walk(spec, walk).steps:
        s = made.status
        assert (s.phase is Phase.FAILED) <= bool(s.fail_reason)
        assert bool(s.fail_reason) <= (s.phase is Phase.FAILED or s.should_quit)
        if s.phase is Phase.FAILED and not s.should_quit and s.recover_count > spec.max_retry:
            assert exceeded(s)


@given(specs(), moves)
def test_a_quit_is_obeyed_at_the_next_turn(spec: JobSpec, walk: list[Choice]) -> None:
    for before, event, made, _ in Walk(spec, walk).steps:
        if before.should_quit and isinstance(event, Reconcile):
            assert made.status.phase in TERMINAL


@given(specs(), moves)
def test_names_are_unique_and_no_seat_is_on_a_bad_node(spec: JobSpec, walk: list[Choice]) -> None:
    for before, _, made, _ in Walk(spec, walk).steps:
        s = made.status
        names = [worker.name for worker in (*s.workers, *s.spares)]
        assert len(names) == len(set(names))
        assert len(s.workers) <= spec.worker_num
        if s.incarnation > before.incarnation:
            # What an operator taints while it runs goes on until it comes anew.
            bad = {node.node_name for node in s.error_nodes if node.kind != "manual"}
            assert not any(worker.node_name in bad for worker in s.workers), "training runs on a bad node"


@given(specs(), moves)
def test_a_charge_is_given_back_once_and_never_after_the_end(spec: JobSpec, walk: list[Choice]) -> None:
    refunds: Counter[int] = Counter()
    for before, _, made, _ in Walk(spec, walk).steps:
        if made.name == "refund":
            refunds[before.incarnation] += 1
            assert before.phase in RECOVERING
            assert before.charged
            assert not made.status.charged
    assert all(times == 1 for times in refunds.values())


@given(specs(), moves)
def test_a_node_is_evicted_only_marked_allowed_safe_and_replaceable(
    spec: JobSpec, walk: list[Choice]
) -> None:
    for before, event, made, _ in Walk(spec, walk).steps:
        after = made.status
        if after.evictions == before.evictions:
            continue
        (node,) = (found.node_name for found in after.error_nodes[len(before.error_nodes) :])
        assert isinstance(event, Reconcile)
        assert any(
            mark.node_name == node and mark.evict and (mark.safe or mark.verdict is Verdict.DESYNC)
            for mark in before.marks
        )
        stay = [worker for worker in before.workers if worker.node_name != node and not worker.gone]
        fit = [spare for spare in before.spares if spare.fit and spare.node_name != node]
        assert len(stay) >= spec.min_worker_num or len(stay) + len(fit) >= len(before.workers)
        assert retries_of(after) == retries_of(before), "not counted"


@given(specs(), moves)
def test_an_agent_renews_itself_once_a_recovery(spec: JobSpec, walk: list[Choice]) -> None:
    renewed = 0
    for before, _, made, _ in Walk(spec, walk).steps:
        if made.status.incarnation > before.incarnation:
            renewed = 0
        if any(isinstance(effect, Renew) for effect in made.effects):
            renewed += 1
            assert renewed == 1
            assert retries_of(made.status) == retries_of(before)


@given(specs(), moves)
def test_checks_only_condemn_in_their_own_round(spec: JobSpec, walk: list[Choice]) -> None:
    for before, event, made, _ in Walk(spec, walk).steps:
        faulty = {worker.name for worker in made.status.workers if worker.faulty}
        new = faulty - {worker.name for worker in before.workers if worker.faulty}
        if new and made.name != "renew":  # what a clean process found again
            assert isinstance(event, Finish)
            assert before.phase in (Phase.BOOT_CHECKING, Phase.TROUBLESHOOTING)
            assert new == {event.worker}


@given(specs(), moves)
def test_the_controller_comes_to_rest(spec: JobSpec, walk: list[Choice]) -> None:
    run = Walk(spec, walk)
    status = run.status
    for _ in range(40):
        made = step(status, Reconcile(), run.now)
        if made.status is status:
            return
        status = made.status
    raise AssertionError(f"the controller goes on for ever: {made.name} in {status.phase}")


class Twin:
    """The accounts as a clerk would keep them: from what happened, with a list of names and no formula."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.counts: dict[str, int] = {}

    def enter(self, told: Step) -> None:
        before, event, made, _ = told
        after = made.status
        if made.name == "error":
            (failed,) = (worker.name for worker in before.workers if worker.failed)
            self._charge(failed)
        elif made.name == "lost" and before.phase is Phase.RUN_COMMAND:
            for worker in before.workers:
                if worker.restarted:
                    self._charge(worker.name)
        elif made.name == "merged" and isinstance(event, Independent):
            if before.phase is Phase.RUN_COMMAND:
                self._charge(event.worker)
            if after.phase is Phase.RUN_COMMAND:
                self._align(after)
        elif made.name == "refund" or (made.name == "saved" and after.recover_count < before.recover_count):
            worst = max(self.counts.values())
            self.counts = {name: min(count, worst - 1) for name, count in self.counts.items()}
        elif made.name == "shrink":
            worst = max(self._of(worker.name) for worker in before.workers)
            self.counts[after.workers[0].name] = worst
        elif made.name == "advance" and after.phase is Phase.RUN_COMMAND:
            self._align(after)
        self._hand_over(before, after)

    def _of(self, name: str) -> int:
        return self.counts.get(name, 0)

    def _charge(self, name: str) -> None:
        if self._of(name) <= self.limit:
            self.counts[name] = self._of(name) + 1

    def _align(self, after: Status) -> None:
        highest = 0
        for worker in after.workers:
            highest = max(highest, self._of(worker.name))
        self.counts = {worker.name: min(highest, self.limit) for worker in after.workers}

    def _hand_over(self, before: Status, after: Status) -> None:
        """A spare that steps in takes the account with the seat; one who left starts anew when it is back."""
        if len(before.workers) == len(after.workers):
            for old, new in zip(before.workers, after.workers, strict=True):
                if old.name != new.name and before.phase is not Phase.PENDING:
                    self.counts[new.name] = self.counts.pop(old.name, 0)
        seated = {worker.name for worker in after.workers}
        self.counts = {name: count for name, count in self.counts.items() if name in seated}


@given(specs(), moves)
def test_accounts_are_those_of_the_dumb_twin(spec: JobSpec, walk: list[Choice]) -> None:
    twin = Twin(spec.max_retry)
    for told in Walk(spec, walk).steps:
        twin.enter(told)
        for worker in told.made.status.workers:
            assert worker.retries == twin.counts.get(worker.name, 0), (told.made.name, worker.name)


@settings(max_examples=20)
@given(specs(), moves)
def test_the_same_events_give_the_same_run(spec: JobSpec, walk: list[Choice]) -> None:
    one, other = Walk(spec, walk), Walk(spec, walk)
    assert [digest(told.made.status) for told in one.steps] == [
        digest(told.made.status) for told in other.steps
    ]


def test_walks_get_everywhere() -> None:
    """A property that holds on walks that never leave Pending holds vacuously."""
    phases, names = set(), set()
    for seed in range(250):
        dice = random.Random(seed)
        workers = dice.randint(1, 4)
        spec = JobSpec("job", "default", workers, dice.randint(1, workers), dice.randint(0, 3))
        walk = [
            (dice.randrange(len(KINDS)), dice.randrange(len(NAMES)), dice.randrange(12)) for _ in range(50)
        ]
        for told in Walk(spec, walk).steps:
            phases.add(told.made.status.phase)
            names.add(told.made.name)
    assert phases == set(Phase)
    assert {rule.name for rule in RULES} - {"overdue"} <= names
    assert {"overdue", "shrink", "independent", "merged", "refused", "failed", "gone", "offered"} <= names
    assert {"marked", "may_evict", "saved", "held", "released", "fit", "tainted"} <= names
