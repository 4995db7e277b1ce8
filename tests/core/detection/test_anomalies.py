"""Each rule of constant monitoring: what it fires at, and the many things at which it must not."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest

from aegis_elastic.core.detection.anomalies import Drop, Fired, Growth, Idle, Rules, trend

RULES = Rules()
MIB = 1 << 20
GIB = 1 << 30
LONG = 1800


def idle(values: Iterable[float], rule: Idle | None = None) -> list[Fired]:
    rule = rule or Idle(RULES, "cores", 0.01)
    return [fired for value in values if (fired := rule.observe(value)) is not None]


def growth(
    used: Iterable[float], available: float = 20 * GIB, rule: Growth | None = None
) -> list[tuple[int, Fired]]:
    rule = rule or Growth(RULES)
    said = [(second, rule.observe(each, available, float(second))) for second, each in enumerate(used)]
    return [(second, fired) for second, fired in said if fired is not None]


def drop(
    rates: Iterable[float], busy: float = 0.3, queued: float = 0.0, rule: Drop | None = None
) -> list[Fired]:
    """Bytes a second while sending, one value a sample."""
    rule = rule or Drop(RULES)
    said = [rule.observe(rate * busy, busy, queued, 1.0) for rate in rates]
    return [fired for fired in said if fired is not None]


# ------------------------------------------------------------ utilisation fallen to zero


def test_a_rank_that_stops_working_is_named_once_with_its_numbers() -> None:
    found = idle([1.0] * 300 + [0.0] * 300)
    assert len(found) == 1
    assert found[0].numbers["usual_cores"] == 1.0
    assert found[0].numbers["now_cores"] < 0.05
    assert found[0].numbers["samples"] == RULES.idle_min
    assert "usually 1.00 cores" in found[0].detail


def test_a_rank_that_gets_a_fiftieth_of_its_time_counts_as_idle() -> None:
    assert len(idle([1.0] * 300 + [0.02] * 100)) == 1


def test_before_it_has_worked_for_a_while_nobody_is_idle() -> None:
    assert idle([0.0] * 2000) == []
    assert idle([1.0] * (RULES.warm_up - 20) + [0.0] * 500) == []


@pytest.mark.parametrize("busy", [0.03, 0.3, 8.0])
def test_bursts_and_pauses_of_a_healthy_training_are_silent(busy: float) -> None:
    dice = random.Random(1)
    values: list[float] = []
    while len(values) < 2 * LONG:
        values += [busy * dice.uniform(0.5, 1.5) for _ in range(dice.randint(100, 400))]
        values += [0.0] * dice.randint(0, 55)  # a checkpoint
    assert idle(values) == []


def test_how_long_it_may_pause_is_learned_from_its_own_pauses() -> None:
    working, long_pause = [1.0] * 200, [0.0] * 150
    rule = Idle(RULES, "cores", 0.01)
    assert len(idle(working + long_pause, rule)) == 1, "the first time nobody can know"
    assert idle((working + long_pause) * 5 + working, rule) == []
    assert len(idle([0.0] * 600, rule)) == 1, "but three times as long is too long"


def test_a_twitch_now_and_then_is_no_work() -> None:
    stuck = ([0.0] * 19 + [0.3]) * 10
    assert len(idle([1.0] * 300 + stuck)) == 1


def test_a_new_incarnation_starts_with_a_clean_slate_but_knows_what_is_usual() -> None:
    rule = Idle(RULES, "cores", 0.01)
    assert len(idle([1.0] * 200 + [0.0] * 100, rule)) == 1
    rule.begin()
    assert idle([0.0] * 300, rule) == [], "it hasn't begun to work yet"
    assert len(idle([1.0] * 30 + [0.0] * 100, rule)) == 1


# ------------------------------------------------------------ memory that only grows


def test_a_leak_is_named_with_the_time_until_the_node_is_full() -> None:
    found = growth(2 * GIB + 2 * MIB * second for second in range(1200))
    assert len(found) == 1
    second, fired = found[0]
    assert second < RULES.warm_up + RULES.bucket * (RULES.growth_buckets_min + 1)
    assert fired.numbers["slope_bytes_s"] == pytest.approx(2 * MIB, rel=0.02)
    assert fired.numbers["full_s"] == pytest.approx(20 * GIB / (2 * MIB), rel=0.1)
    assert "the node is full in 17" in fired.detail


def test_a_leak_under_a_collectors_saw_and_noise_is_found() -> None:
    dice = random.Random(2)
    used = (GIB + MIB * s + (s % 37) * 8 * MIB + dice.uniform(0, 50) * MIB for s in range(1500))
    found = growth(used)
    assert len(found) == 1
    assert found[0][1].numbers["slope_bytes_s"] == pytest.approx(MIB, rel=0.25)


@pytest.mark.parametrize(
    "used",
    [
        [2.0 * GIB] * LONG,
        [2 * GIB + (s % 60) * 20 * MIB for s in range(LONG)],  # a collector's saw
        [6 * GIB * (1 - math.exp(-s / 300)) for s in range(LONG)],  # a cache that fills
        [6 * GIB * (1 - math.exp(-s / 900)) for s in range(LONG)],  # a slower one
        [min(2 * GIB + 40 * MIB * s, 10 * GIB) for s in range(LONG)],  # all of a dataset, in four minutes
        [2 * GIB + 20 * MIB * (s // 600) for s in range(LONG)],  # a little more with each checkpoint
        [2 * GIB + 0.1 * MIB * s for s in range(LONG)],  # full in two days: not before anybody looks
        [4 * GIB - MIB * s / 2 for s in range(LONG)],
        [2 * GIB + 300 * MIB * math.sin(s / 400) for s in range(LONG)],
    ],
    ids=["flat", "saw", "cache", "slow-cache", "dataset", "steps", "slow", "falling", "tide"],
)
def test_what_healthy_memory_does_is_silent(used: list[float]) -> None:
    dice = random.Random(3)
    assert growth(each + dice.uniform(0, 30) * MIB for each in used) == []


def test_a_leak_is_said_once_and_again_only_after_it_had_ended() -> None:
    rule = Growth(RULES)
    leak = [GIB + 4 * MIB * s for s in range(1800)]
    assert len(growth(leak, rule=rule)) == 1
    flat = [leak[-1]] * 900
    after = growth([*leak, *flat, *(leak[-1] + 4 * MIB * s for s in range(900))])
    assert len(after) == 2


def test_the_trend_is_not_moved_by_outliers() -> None:
    points = [(float(s), 10.0 * s) for s in range(60)]
    points[20] = (20.0, 1e9)
    points[40] = (40.0, 0.0)
    slope, order = trend(points)
    assert slope == pytest.approx(10.0)
    assert order > RULES.growth_order
    assert trend([]) == (0.0, 0.0)
    assert trend([(1.0, 5.0), (1.0, 9.0)]) == (0.0, 0.0)


# ------------------------------------------------------------ bandwidth that drops


def test_a_link_that_gives_a_tenth_is_named_once() -> None:
    dice = random.Random(4)
    found = drop([1e9 * dice.uniform(0.7, 1.3) for _ in range(300)] + [1e8] * 200)
    assert len(found) == 1
    assert found[0].numbers["now_bytes_s"] == pytest.approx(1e8)
    assert found[0].numbers["usual_bytes_s"] == pytest.approx(1e9, rel=0.1)


def test_a_link_that_gives_nothing_is_named() -> None:
    rule = Drop(RULES)
    assert drop([1e9] * 300, rule=rule) == []
    assert len(drop([0.0] * 100, busy=1.0, queued=1e6, rule=rule)) == 1


def test_small_messages_that_wait_for_their_acknowledgements_are_no_slow_link() -> None:
    rule = Drop(RULES)
    assert drop([1e9] * 300, rule=rule) == []
    assert drop([2000.0] * 300, busy=0.4, queued=500.0, rule=rule) == []
    assert drop([2000.0] * 900, busy=0.4, queued=500.0) == [], "nor is anything learned from them"


def test_who_sends_less_has_no_slower_link() -> None:
    """The same rate in a twentieth of the time, then no traffic at all: evaluation, checkpoint."""
    rule = Drop(RULES)
    assert drop([1e9] * 300, busy=0.5, rule=rule) == []
    assert drop([1e9] * 300, busy=0.06, rule=rule) == []
    assert drop([1e5] * 300, busy=0.01, rule=rule) == [], "a keep-alive says nothing of a link"
    assert drop([0.0] * 300, busy=0.0, rule=rule) == []


def test_noise_and_short_congestion_are_silent() -> None:
    dice = random.Random(5)
    for _ in range(8):
        rates = [1e9 * dice.lognormvariate(0, 0.35) for _ in range(1800)]
        for start in range(600, 1800, 300):
            rates[start : start + 15] = [1e8] * 15  # somebody else's burst
        assert drop(rates) == []


def test_after_it_has_recovered_a_second_drop_is_told_too() -> None:
    rule = Drop(RULES)
    assert len(drop([1e9] * 300 + [1e8] * 100, rule=rule)) == 1
    assert drop([5e8] * 20 + [1e9] * 100, rule=rule) == []
    assert len(drop([1e8] * 100, rule=rule)) == 1
