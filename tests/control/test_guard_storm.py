"""Days of a simulated cluster under the guard: nothing that must never happen does, nothing is forgotten, and
with any of its rules broken the simulation notices.
"""

from __future__ import annotations

import os

import pytest

from tests.control.guard_mutants import MUTANTS, mutant
from tests.control.storm import Broken, simulate

SEED = int(os.environ.get("AEGIS_SEED", "1"))
SAMPLE, DAYS = 30, 10_000
# With any rule broken it takes at most so many days until that shows.
MUTANT_DAYS = 400
# Where it is known to show, so that `make test` needn't look for it; `make full` does.
SHOWS = {
    "no cooldown": 7,
    "no fence": 192,
    "no compare-and-swap": 68,
    "no lock": 33,
    "a claimed page counts as sent": 59,
}


def _days(first: int, count: int) -> tuple[int, int]:
    actions = pages = 0
    for seed in range(first, first + count):
        try:
            cluster = simulate(seed)
        except Broken as broken:
            raise AssertionError(f"seed {seed}: {broken}") from broken
        actions += cluster.actions
        pages += len(cluster.pages)
    print(f"seeds {first} to {first + count - 1}: {count} days, {actions} guarded actions, {pages} pages")
    return actions, pages


def test_a_sample_of_days_without_a_storm() -> None:
    actions, pages = _days(SEED * 100_000, SAMPLE)
    assert actions > SAMPLE  # a guard that never acts is none
    assert pages >= actions / 2


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ten_thousand_days_without_a_storm() -> None:
    actions, _ = _days(SEED * 100_000, DAYS)
    assert actions > DAYS


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with mutant(name, monkeypatch) as keeper:
        first = 0 if "AEGIS_SEED" in os.environ else SHOWS.get(name, 0)
        for seed in range(first, first + MUTANT_DAYS):
            try:
                simulate(seed, keeper=keeper)
            except Broken as broken:
                print(f"{name}: seed {seed}: {broken}")
                return
    pytest.fail(f"{MUTANT_DAYS} days without {name} went well")
