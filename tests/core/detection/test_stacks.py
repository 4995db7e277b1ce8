"""Stacks of many ranks compared: one who is elsewhere is named, and nobody where nothing can be said."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.core.detection.stacks import Frame, Stack, compare, own_frame, pack, unpack, waits_in

C10D = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
MAIN = Frame("<module>", "train.py", 90)


def step(call: str, line: int, inner: int = 2810) -> Stack:
    """A rank in a collective that `train` calls at `line`."""
    return (Frame(call, C10D, inner), Frame("train", "train.py", line), MAIN)


LOADING = (Frame("__next__", "data.py", 12), Frame("train", "train.py", 38), MAIN)


def test_the_rank_that_the_others_wait_for_is_named_with_function_and_line() -> None:
    compared = compare({rank: step("all_reduce", 44) for rank in range(7)} | {7: LOADING})
    assert (compared.odd, compared.desync) == ((7,), True)
    assert compared.describe() == (
        "rank 7 is at data.py:12 (__next__), while 7 others wait at train.py:44 (train) in all_reduce"
    )


def test_the_same_collective_called_from_another_line_is_another_place() -> None:
    compared = compare({0: step("barrier", 40), 1: step("barrier", 40), 2: step("barrier", 52)})
    assert (compared.odd, compared.desync) == ((2,), True)


def test_the_line_of_the_innermost_call_says_nothing() -> None:
    compared = compare({rank: step("all_reduce", 44, inner=2800 + rank) for rank in range(4)})
    assert (compared.odd, compared.desync, len(compared.clusters)) == ((), False, 1)
    assert compared.describe() == ""


def test_all_at_the_same_place_that_is_no_collective_has_nobody_odd() -> None:
    compared = compare(dict.fromkeys(range(8), LOADING))
    assert compared.odd == ()
    assert not compared.clusters[0].collective


def test_one_apart_from_a_majority_at_work_is_odd_but_no_deadlock() -> None:
    saving = (Frame("save", "save.py", 3), Frame("train", "train.py", 60), MAIN)
    compared = compare({0: saving, 1: LOADING, 2: LOADING, 3: LOADING})
    assert (compared.odd, compared.desync) == ((0,), False)
    assert compared.describe().endswith("while 3 others are at data.py:12 (__next__)")


def test_without_a_majority_nobody_is_odd() -> None:
    assert compare({0: step("barrier", 40), 1: LOADING}).odd == ()
    halves = {rank: LOADING if rank % 2 else step("barrier", 40) for rank in range(8)}
    assert compare(halves).odd == ()
    assert compare({}).clusters == ()


def test_a_rank_without_a_stack_is_unknown_and_not_odd() -> None:
    assert compare({0: LOADING, 1: LOADING, 2: ()}).odd == ()


def test_a_users_own_wait_is_no_collective() -> None:
    assert waits_in((Frame("wait", "queue.py", 5), MAIN)) == ""
    assert waits_in((Frame("barrier", "game.py", 5), MAIN)) == ""
    assert waits_in(step("reduce_scatter_tensor", 9)) == "reduce_scatter_tensor"


def test_the_users_own_frame_is_shown() -> None:
    assert own_frame(step("barrier", 40)) == Frame("train", "train.py", 40)
    assert own_frame(step("barrier", 40)[:1]).function == "barrier"


def test_a_packed_stack_comes_back_and_compares_like_the_original() -> None:
    ranks = {0: step("barrier", 40), 1: step("barrier", 40), 2: LOADING}
    again = {rank: unpack(pack(stack)) for rank, stack in ranks.items()}
    assert "/opt/venv" not in pack(ranks[0])
    assert again[2] == LOADING
    assert compare(again).odd == compare(ranks).odd == (2,)
    assert compare(again).desync


@given(st.text())
def test_any_text_is_unpacked_to_something(text: str) -> None:
    for frame in unpack(text):
        assert frame.line >= 0


@given(st.integers(3, 200), st.integers(0, 2**32))
def test_a_minority_is_found_whatever_the_order(count: int, seed: int) -> None:
    odd = set(random.Random(seed).sample(range(count), (count - 1) // 2))
    stacks = {rank: LOADING if rank in odd else step("all_reduce", 44) for rank in range(count)}
    assert set(compare(stacks).odd) == odd
