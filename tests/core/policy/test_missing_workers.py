"""Workers never came: whose machines are made anew, and when nothing happens."""

from __future__ import annotations

import pytest

from aegis_elastic.core.events import Cleared, Close, Join, Quit, Reconcile, Relaunched, Remake
from aegis_elastic.core.machine import create, step
from aegis_elastic.core.model import JobSpec, Mode, Phase, Status
from aegis_elastic.core.policy.missing_workers import ROUNDS_MAX, Decision, Machine, Plan, decide
from aegis_elastic.core.protocol.orders import Action, derive_order

PODS = (Machine("p0", "10.0.0.1"), Machine("p1", "10.0.0.2"), Machine("p2", ""))
ALL = frozenset({"10.0.0.1", "10.0.0.2"})


def test_who_runs_and_never_came_is_made_anew_where_somebody_does_that() -> None:
    decided = decide(PODS, frozenset({"10.0.0.1"}), controlled=True, rounds=0)
    assert decided == Decision(Plan.RELAUNCH, ("p1",), "p1 never came")


def test_a_machine_that_does_not_run_yet_is_waited_for() -> None:
    assert decide(PODS, ALL, controlled=True, rounds=0) == Decision(Plan.RELAUNCH, (), "p2 don't run yet")


def test_without_control_all_are_cleared() -> None:
    decided = decide(PODS, frozenset({"10.0.0.1"}), controlled=False, rounds=0)
    assert (decided.plan, decided.machines) == (Plan.CLEAR, ("p0", "p1", "p2"))


@pytest.mark.parametrize("controlled", [True, False])
def test_nothing_happens_when_everybody_came_or_nobody_is_known(controlled: bool) -> None:
    assert decide(PODS[:2], ALL, controlled, 0).plan is Plan.NOTHING
    assert decide((), frozenset(), controlled, 0).plan is Plan.NOTHING


def test_nothing_happens_when_it_was_tried_often_enough() -> None:
    decided = decide(PODS, frozenset(), controlled=True, rounds=ROUNDS_MAX)
    assert decided.plan is Plan.NOTHING and "made anew 3 times" in decided.reason


# ---------------------------------------------------------------- what the machine enters of it


def waiting(max_retry: int = 2) -> Status:
    """One of two workers has come; the deadline is at 160."""
    spec = JobSpec("job", "team", 2, 2, max_retry, bootcheck="off", join_timeout_s=60)
    status = step(create(spec, 100), Join("w0", "w0/1", "n0", "10.0.0.1", 1), 101).status
    return step(status, Reconcile(), 101).status


def test_made_anew_is_waited_for_and_not_counted() -> None:
    made = step(waiting(), Relaunched(("p1",), 220, "p1 never came"), 158)
    assert made.effects == (Remake(made.status.step, ("p1",), "p1 never came"),)
    assert (made.status.deadline, made.status.recover_count) == (220, 0)
    assert step(made.status, Reconcile(), 161).name == "wait", "the first timeout decides nothing any more"
    assert step(made.status, Reconcile(), 221).status.mode is Mode.INDEPENDENT, "but the next one does"


def test_all_cleared_is_one_retry_and_a_plain_job_that_has_an_end() -> None:
    made = step(waiting(), Cleared(("p0", "p1"), "p1 never came"), 158)
    status = made.status
    assert (status.phase, status.mode, status.recover_count, status.workers) == (
        Phase.PENDING, Mode.INDEPENDENT, 1, (),
    )  # fmt: skip
    assert derive_order(status).action is Action.INDEPENDENT
    for name in ("w0", "w1"):
        status = step(status, Join(name, f"{name}/2", name, "10.0.0.3", 1), 170).status
        status = step(status, Reconcile(), 170).status
    assert [(pod.name, pod.retries) for pod in status.workers] == [("w0", 1), ("w1", 1)]
    assert step(status, Reconcile(), 10_000).name == "wait", "nobody is waited for"


def test_the_last_retry_is_not_bought_by_clearing() -> None:
    made = step(waiting(max_retry=0), Cleared(("p0", "p1"), "p1 never came"), 158)
    assert (made.status.phase, made.status.recover_count) == (Phase.FAILED, 1)
    assert not any(isinstance(effect, Remake) for effect in made.effects)
    assert any(isinstance(effect, Close) for effect in made.effects)


@pytest.mark.parametrize(
    "word", [Relaunched(("p1",), 220, "p1 never came"), Cleared(("p0", "p1"), "p1 never came")]
)
def test_too_late_they_change_nothing(word: Relaunched | Cleared) -> None:
    """It has gone independent, or somebody has ended it: whoever asked the platform was slow."""
    independent = step(waiting(), Reconcile(), 161).status
    assert independent.mode is Mode.INDEPENDENT
    quitting = step(waiting(), Quit("enough"), 150).status
    ended = step(quitting, Reconcile(), 150).status
    for status in (independent, quitting, ended):
        made = step(status, word, 162)
        assert made.status is status and made.effects == ()
