"""Days of a simulated cluster under the guard: nothing that must never happen does, nothing is forgotten, and
with any of its rules broken the simulation notices.
"""

from __future__ import annotations

import os

import pytest

from aegis_elastic.control.controllers.guarded_actions import GuardedActions
from tests.control.controllers.guard_mutants import MUTANTS, mutant
from tests.control.controllers.storm import Broken, simulate

SEED = int(os.environ.get("AEGIS_SEED", "1"))
SAMPLE, DAYS = 20, 10_000
# With any rule broken it takes at most so many days until that shows.
MUTANT_DAYS = 400
# What only shows when a master falls asleep between two certain lines shows sooner if they sleep more.
SLEEPY = {"no fence": 0.06, "no compare-and-swap": 0.06, "no lock": 0.06}
# What it must break, where it could break something else first.
MUST_SAY = {**dict.fromkeys(SLEEPY, " act"), "no persistence": "is acted on after"}


# Each of these days found a fault of the guard.
FOUND = (136, 100049, 206574, 1000031, 1004072)


def _days(first: int, count: int) -> tuple[int, int, str]:
    actions = pages = 0
    for seed in range(first, first + count):
        try:
            cluster = simulate(seed)
        except Broken as broken:
            raise AssertionError(f"seed {seed}: {broken}") from broken
        actions += cluster.actions
        pages += len(cluster.pages)
    summary = f"seeds {first} to {first + count - 1}: {count} days, {actions} guarded actions, {pages} pages"
    print(summary)
    return actions, pages, summary


@pytest.mark.parametrize("seed", FOUND)
def test_a_day_that_found_a_fault_once_goes_well(seed: int) -> None:
    simulate(seed)


def test_a_sample_of_days_without_a_storm() -> None:
    actions, pages, _ = _days(SEED * 100_000, SAMPLE)
    assert actions > SAMPLE  # a guard that never acts is none
    assert pages >= actions / 2


def test_masters_that_sleep_a_lot_do_no_harm_either() -> None:
    for seed in range(10):
        broken = _broken(seed, GuardedActions, 0.06)
        # Who sleeps through an incident can't follow it up; but nobody is acted on who mustn't be.
        assert not broken or "nobody did or said" in broken, f"seed {seed}: {broken}"


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ten_thousand_days_without_a_storm(capsys: pytest.CaptureFixture[str]) -> None:
    for first in range(SEED * 100_000, SEED * 100_000 + DAYS, 1000):
        actions, _, summary = _days(first, 1000)
        assert actions > 1000
        with capsys.disabled():  # `make full` keeps what it ran with
            print(f"\n{summary}, 0 violations", flush=True)


# It takes a sleep of ten minutes between two certain lines to show.
RARE = {"no fence", "no compare-and-swap"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in RARE else []) for name in MUTANTS]
)
def test_a_broken_rule_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sleepy = SLEEPY.get(name, 0.01)
    for seed in range(MUTANT_DAYS):
        with mutant(name, monkeypatch) as guarded_actions:
            broken = _broken(seed, guarded_actions, sleepy)
        if broken and MUST_SAY.get(name, "") not in broken:
            continue  # masters that sleep through everything break the bounds on what must happen, too
        if broken and not _broken(seed, GuardedActions, sleepy):
            print(f"{name}: seed {seed}: {broken}")
            return
    pytest.fail(f"{MUTANT_DAYS} days with {name} went well")


def _broken(seed: int, guarded_actions: type[GuardedActions], sleepy: float) -> str:
    try:
        simulate(seed, guarded_actions=guarded_actions, sleepy=sleepy)
    except Broken as broken:
        return str(broken)
    return ""
