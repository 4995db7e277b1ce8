"""Clocks that differ: what two messages say of them, and which of two deaths came first."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.core.diagnosis.clocks import DRIFT, Bounds, Clock, Span, before, lead, span


def exchanged(offset: float, there_s: float, back_s: float, at: float = 100.0) -> Clock:
    """A clock after an order and its answer; `offset` is master - node, the others are times on the way."""
    clock = Clock().echoed(sent=at, there=at + there_s - offset, now_s=at + there_s)
    return clock.heard(sent=at + there_s - offset, here=at + there_s + back_s, now_s=at + there_s + back_s)


def test_one_exchange_bounds_the_offset_by_its_two_ways() -> None:
    bounds = exchanged(offset=-50.0, there_s=0.010, back_s=0.030).bounds(100.04)
    assert bounds is not None
    assert -50.0101 < bounds.low < -50.0099
    assert -49.9701 < bounds.high < -49.9699


def test_one_way_alone_says_nothing() -> None:
    assert Clock().bounds(1.0) is None
    assert Clock().heard(1.0, 2.0, 2.0).bounds(2.0) is None
    assert Clock().echoed(1.0, 2.0, 2.0).bounds(2.0) is None
    assert span(5.0, None) is None


def test_a_slow_message_loosens_nothing_and_age_widens() -> None:
    clock = exchanged(0.0, 0.001, 0.001)
    slow = clock.heard(sent=110.0, here=115.0, now_s=115.0)
    assert slow == clock
    young, old = clock.bounds(100.0), clock.bounds(1100.0)
    assert young is not None and old is not None
    assert old.high - young.high > 0.99 * DRIFT * 1000


def test_a_clock_that_was_set_is_known_anew_after_an_exchange() -> None:
    clock = exchanged(offset=0.0, there_s=0.001, back_s=0.001)
    for offset in (-3600.0, 3600.0):  # set forward, set back
        set_anew = clock.heard(200.0 - offset, 200.001, 200.001).echoed(201.0, 201.001 - offset, 201.001)
        set_anew = set_anew.heard(202.0 - offset, 202.001, 202.001)
        bounds = set_anew.bounds(202.0)
        assert bounds is not None and bounds.low <= offset <= bounds.high
        assert bounds.high - bounds.low < 0.1


def test_deaths_whose_spans_overlap_are_undecided() -> None:
    exact, loose = Bounds(-0.001, 0.001), Bounds(-0.5, 0.5)
    first, second = span(10.0, exact), span(10.4, exact)
    assert before(first, second) and not before(second, first)
    assert not before(span(10.0, loose), span(10.4, loose))
    assert not before(span(10.4, loose), span(10.0, loose))
    assert not before(first, None) and not before(None, first)
    assert first is not None and second is not None
    assert lead(first, second) == "0.398 to 0.402 s before"


def test_a_skewed_node_s_death_is_set_right() -> None:
    """Its own clock says that it died an hour after the other, and it died before it."""
    skewed = exchanged(offset=-3600.0, there_s=0.002, back_s=0.002).bounds(100.0)
    exact = exchanged(offset=0.0, there_s=0.002, back_s=0.002).bounds(100.0)
    assert before(span(3700.0, skewed), span(100.2, exact))


@given(
    offset=st.floats(-1e5, 1e5),
    drift=st.floats(-DRIFT, DRIFT),
    seed=st.integers(0, 1 << 30),
)
def test_the_true_offset_is_never_outside_whatever_the_messages_took(
    offset: float, drift: float, seed: int
) -> None:
    draw, clock, now = random.Random(seed), Clock(), 0.0

    def node(at: float) -> float:
        return at * (1 + drift) - offset

    for _ in range(60):
        now += draw.expovariate(0.05)
        way = draw.expovariate(100)
        if draw.random() < 0.5:
            clock = clock.heard(sent=node(now), here=now + way, now_s=now + way)
        else:
            clock = clock.echoed(sent=now, there=node(now + way), now_s=now + way + 0.5)
        now += way + 0.5
        bounds = clock.bounds(now)
        if bounds is not None:
            true = now - node(now)
            assert bounds.low - 1e-3 <= true <= bounds.high + 1e-3
    assert isinstance(span(1.0, Bounds(0, 0)), Span)
