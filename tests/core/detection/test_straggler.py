"""Who computes longer than its peers; and the many ways in which nobody does."""

from __future__ import annotations

import math
import random
import statistics

import msgspec
import pytest

from aegis_elastic.core.detection.progress import WindowWork, error_of_usual, usual
from aegis_elastic.core.detection.straggler import (
    BAD_WINDOWS,
    GOOD_WINDOWS,
    WindowHistory,
    equals,
    pays,
    slow_ranks,
    update,
)


def own(
    first_ms: float,
    last_ms: float,
    step_ms: float = 200.0,
    cpu_ms: float = 100.0,
    count: int = 10,
    groups: tuple[int, ...] = (),
) -> WindowWork:
    return WindowWork(1, count, first_ms * 1e3, last_ms * 1e3, step_ms * 1e3, cpu_ms * 1e3, groups)


def window(*first_ms: float) -> dict[int, WindowWork]:
    return {rank: own(time, time * 1.2) for rank, time in enumerate(first_ms)}


def test_thirty_percent_more_work_is_seen_with_numbers() -> None:
    found = slow_ranks(window(100, 101, 130, 99))
    assert set(found) == {2}
    assert "rank 2 takes" in found[2].describe()
    assert "1.30 times" in found[2].describe()


def test_who_waited_longest_for_others_is_not_slow() -> None:
    """A slow link: everybody computes the same, and leaves the first collective at another time."""
    ranks = {rank: own(100, 394) for rank in range(4)} | {3: own(100, 457)}
    assert slow_ranks(ranks) == {}
    timed = {rank: msgspec.structs.replace(each, timed=True) for rank, each in ranks.items()}
    assert set(slow_ranks(timed)) == {3}, "where the device tells what was waiting, this was not"


def test_slowness_in_backward_shows_before_the_last_collective() -> None:
    ranks = {rank: own(100, 140) for rank in range(4)} | {1: own(101, 180, cpu_ms=140)}
    assert set(slow_ranks(ranks)) == {1}
    assert "before its last collective" in slow_ranks(ranks)[1].describe()


def test_the_reason_says_whether_it_computes_more_or_is_kept_from_it() -> None:
    peers = {rank: own(100, 120) for rank in range(3)}
    assert "it computes more" in slow_ranks(peers | {3: own(140, 160, cpu_ms=142)})[3].describe()
    assert "starved, throttled, or waiting" in slow_ranks(peers | {3: own(140, 160)})[3].describe()


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("all alike", window(100, 101, 99, 100)),
        ("the victims of a slow rank wait, which is no own work", window(100, 100, 100, 100)),
        ("most are slow: a common cause", window(100, 140, 141, 142)),
        ("two of four", window(100, 100, 140, 140)),
        ("stages of a pipeline have different work", window(60, 100, 140, 180)),
        ("much more of next to nothing", {r: own(1.0 + (r == 2), 1.2 + (r == 2)) for r in range(4)}),
        ("a few iterations only", {r: own(100 + 50 * (r == 2), 120, count=2) for r in range(4)}),
        ("two can't tell who is slow", window(100, 150)),
        ("nobody", {}),
        ("a fast one", window(100, 100, 60, 100)),
    ],
)
def test_nobody_is_slow(name: str, ranks: dict[int, WindowWork]) -> None:
    assert slow_ranks(ranks) == {}, name


def noisy(chance: random.Random, count: int, slow: float = 1.0) -> list[float]:
    """Iterations of a loaded node, in ms: they differ by a tenth, and one in ten is held up for long."""
    work = [100 * slow * chance.lognormvariate(0, 0.1) for _ in range(count)]
    return [time + (chance.expovariate(1 / 150) if chance.random() < 0.1 else 0) for time in work]


def measured(times_ms: list[float]) -> WindowWork:
    first, error = usual(times_ms) * 1e3, error_of_usual(times_ms) * 1e3
    return WindowWork(1, len(times_ms), first, first * 1.1, first * 1.2, 50e3, (), error, error)


def windows_until_marked(chance: random.Random, windows: int, slow: float, count: int = 6) -> int:
    """How many windows of four ranks it took until the first was marked; 0: it never was."""
    watch, nodes = WindowHistory(), frozenset("0123")
    for number in range(1, windows + 1):
        found = slow_ranks({rank: measured(noisy(chance, count, 1.0 if rank else slow)) for rank in range(4)})
        watch = update(watch, {str(rank): each.certainty for rank, each in found.items()}, nodes)
        if watch.marked:
            return number if watch.marked == {"0"} else 0
    return 0


def test_noise_marks_nobody_and_a_slow_rank_is_found_in_it() -> None:
    chance = random.Random(7)
    assert [windows_until_marked(chance, 50, 1.0) for _ in range(40)] == [0] * 40
    took = [windows_until_marked(chance, 50, 1.3) for _ in range(20)]
    assert all(took)
    assert statistics.median(took) * 6 <= 50, "iterations"


def test_a_mark_takes_windows_in_a_row_and_so_does_its_end() -> None:
    nodes, watch = frozenset("abc"), WindowHistory()
    for number in range(BAD_WINDOWS):
        assert not watch.marked
        watch = update(watch, {"b": math.inf}, nodes)
        assert (number + 1 >= BAD_WINDOWS) == ("b" in watch.marked)
    for _ in range(GOOD_WINDOWS - 1):
        watch = update(watch, {}, nodes)
        assert watch.marked == {"b"}
    assert not update(watch, {}, nodes).marked


def test_what_could_be_chance_takes_more_windows() -> None:
    nodes, watch, took = frozenset("abc"), WindowHistory(), 0
    while not watch.marked:
        watch, took = update(watch, {"b": 2.0}, nodes), took + 1
    assert took == 7, "2 standard errors seven times are more than 5"


def test_one_good_window_begins_the_count_anew() -> None:
    nodes, watch = frozenset("abc"), WindowHistory()
    for slow in ("b", "b", "", "b", "b", "", "c", "b"):
        watch = update(watch, dict.fromkeys(slow, math.inf), nodes)
    assert not watch.marked


def test_a_marked_node_that_has_left_keeps_its_mark() -> None:
    assert update(WindowHistory(marked=frozenset("b")), {}, frozenset("ac")).marked == {"b"}


def test_one_stumble_is_left_out_and_bursts_are_not() -> None:
    assert usual([100.0] * 9 + [4000.0]) == 100.0
    assert usual([100.0, 160.0] * 5) == 130.0
    assert usual([100.0]) == 100.0
    assert error_of_usual([100.0] * 5) == error_of_usual([100.0]) == 0.0
    assert 10 < error_of_usual([100.0, 160.0] * 5) < 15


def test_moving_out_must_pay() -> None:
    assert pays(0.2, trained_s=60.0)
    assert not pays(0.01, trained_s=60.0)
    assert pays(0.01, trained_s=86400.0), "a job that has run for a day will run on"


def pipeline(*first_ms: float, cpu_ms: dict[int, float] | None = None) -> dict[int, WindowWork]:
    """Two stages of three ranks each, the second with 60 % more to do; all six share a few bytes at most."""
    more = cpu_ms or {}
    return {
        rank: own(time, time * 1.1, 260, more.get(rank, (100, 160)[rank // 3]), groups=(31 + rank // 3,))
        for rank, time in enumerate(first_ms)
    }


def test_stages_of_a_pipeline_are_compared_each_among_themselves() -> None:
    assert slow_ranks(pipeline(100, 101, 99, 160, 161, 159)) == {}
    assert set(slow_ranks(pipeline(100, 101, 99, 160, 210, 159))) == {4}
    assert set(slow_ranks(pipeline(130, 101, 99, 160, 161, 159))) == {0}, "it is quicker than the other stage"
    found = slow_ranks(pipeline(130, 101, 99, 160, 161, 159))[0]
    assert (round(found.peers_us), found.peers_cpu_us) == (100000, 100e3)


def test_lateness_that_a_stage_hands_on_is_not_its_own() -> None:
    """Where nothing says how long a rank waited for the stage before it, both ranks come late."""
    late = (100, 140, 99, 160, 200, 159)
    assert slow_ranks(pipeline(*late)) == {}, "one waits for the other, and it can't be told who"
    assert set(slow_ranks(pipeline(*late, cpu_ms={1: 141}))) == {1}
    assert set(slow_ranks(pipeline(*late, cpu_ms={4: 205}))) == {4}
    node_of = {rank: f"n{rank % 3}" for rank in range(6)}
    assert set(slow_ranks(pipeline(*late), node_of)) == {1, 4}, "they share a node: that one is slow"


@pytest.mark.parametrize(
    ("name", "groups", "expected"),
    [
        ("nobody knows", [(), (), ()], [{0, 1, 2}]),
        ("all reduce together", [(9,), (9,), (9,)], [{0, 1, 2}]),
        ("two stages", [(1,), (1,), (2,), (2,)], [{0, 1}, {2, 3}]),
        ("tensor and data parallel", [(1, 5), (1, 6), (2, 5), (2, 6)], [{0, 1, 2, 3}]),
        ("sharded and replicated", [(1, 5), (1, 6), (2, 6), (2, 5), (3,)], [{0, 1, 2, 3}, {4}]),
        ("a chain", [(1,), (1, 2), (2, 3), (3,)], [{0, 1, 2, 3}]),
    ],
)
def test_equals_are_who_is_linked_by_groups(
    name: str, groups: list[tuple[int, ...]], expected: list[set[int]]
) -> None:
    found = equals({rank: own(100, 120, groups=keys) for rank, keys in enumerate(groups)})
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected)), name


@pytest.mark.timeout(30)
def test_ten_thousand_ranks_are_compared_while_everybody_waits() -> None:
    """Each with all others took minutes, in the master's loop."""
    chance = random.Random(7)
    ranks = {rank: own(100 * chance.gauss(1, 0.01), 130) for rank in range(10_000)}
    assert slow_ranks(ranks) == {}
    slow = {77: own(131, 130), 9001: own(160, 130)}
    assert set(slow_ranks(ranks | slow)) == set(slow)
    worse = {rank: own(150 + rank, 130) for rank in range(3_000)}
    assert set(slow_ranks(ranks | worse)) == set(range(2_984, 3_000)), "the worst of very many"


def test_pairs_of_equals_cant_tell_who_is_slow() -> None:
    pairs = {rank: own(100 + 50 * (rank == 1), 170, groups=(rank // 2 + 1,)) for rank in range(4)}
    assert slow_ranks(pairs) == {}
