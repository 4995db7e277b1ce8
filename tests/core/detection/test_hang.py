"""Stories of trainings that stand still, told by what agents see: who is named, and who must not be."""

from __future__ import annotations

import pytest

from aegis_elastic.core.detection import stacks
from aegis_elastic.core.detection.hang import Judgement, ObservedRank, judge
from aegis_elastic.core.detection.progress import RankFacts, patience_s
from aegis_elastic.core.detection.stacks import Frame
from aegis_elastic.core.model import Verdict

C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"
STEP = Frame("step", "train.py", 40)
WAITS = (Frame("all_reduce", C10D, 2000), STEP)
LOOPS = (Frame("spin", "train.py", 12), STEP)
EVALUATES = (Frame("forward", "model.py", 7), Frame("evaluate", "train.py", 55))
SAVES = (Frame("_save", "/x/site-packages/torch/serialization.py", 900), Frame("save", "train.py", 70))
COMPILES = (Frame("compile_fx", "/x/site-packages/torch/_inductor/compile_fx.py", 5), STEP)
UPLOADS = (Frame("send", "/usr/lib/python3.11/ssl.py", 1180), Frame("publish", "train.py", 90))
GATHERS = (Frame("all_gather", C10D, 3000), Frame("log", "train.py", 44))
BARRIER = (Frame("barrier", C10D, 4000), Frame("evaluate", "train.py", 56))
SCORES = (Frame("score", "metrics.py", 3), Frame("evaluate", "train.py", 55))
HOOK = (
    Frame("slow_hook", "train.py", 90),
    Frame("_engine_run_backward", "/x/torch/autograd/graph.py", 1),
    STEP,
)
BACKWARD = (Frame("_engine_run_backward", "/x/torch/autograd/graph.py", 1), STEP)


def seen(rank: int, stack: stacks.Stack = (), **facts: object) -> ObservedRank:
    told: dict[str, object] = {
        "step": 100, "beats": 100, "idle_s": 90.0, "longest_s": 2.0, "step_s": 0.2, "state": "S",
        "steady": 3 if stack else 0,
    }  # fmt: skip
    made = RankFacts(rank=rank, stack=stacks.pack(stack), **{**told, **facts})  # type: ignore[arg-type]
    return ObservedRank(made, f"w{rank}", f"n{rank}")


def world(*several: stacks.Stack, **facts: object) -> list[ObservedRank]:
    return [seen(rank, stack, **facts) for rank, stack in enumerate(several)]


def verdict(ranks: list[ObservedRank]) -> tuple[Verdict, int]:
    hang = judge(ranks).hang
    assert hang is not None
    return hang.verdict, hang.observed.facts.rank


def test_a_rank_in_a_loop_while_the_others_wait_for_it_is_a_deadlock_with_rank_and_line() -> None:
    hang = judge(world(WAITS, WAITS, LOOPS, WAITS)).hang
    assert hang is not None
    assert (hang.verdict, hang.observed.node_name) == (Verdict.DESYNC, "n2")
    assert (
        "rank 2 of n2 stands at train.py:12 (spin), while 3 wait in all_reduce at train.py:40" in hang.reason
    )
    assert "no step for 90 s after step 100 (usually 0.2 s, longest pause so far 2 s)" in hang.reason


def test_a_rank_in_another_collective_is_one_too() -> None:
    hang = judge(world(WAITS, GATHERS, WAITS, WAITS)).hang
    assert hang is not None
    assert (hang.verdict, hang.observed.facts.rank) == (Verdict.DESYNC, 1)
    assert "rank 1 of n1 stands at train.py:44 (log) in all_gather" in hang.reason


def test_a_rank_in_another_collective_than_the_barrier_is_one_as_well() -> None:
    assert verdict(world(BARRIER, BARRIER, GATHERS, BARRIER)) == (Verdict.DESYNC, 2)


def test_of_two_ranks_the_one_that_doesnt_wait_is_named() -> None:
    assert verdict(world(WAITS, LOOPS)) == (Verdict.DESYNC, 1)


def test_who_runs_the_users_code_inside_backward_doesnt_wait_there() -> None:
    assert verdict(world(BACKWARD, HOOK, BACKWARD)) == (Verdict.DESYNC, 1)


def test_a_stopped_process_is_frozen_whatever_the_others_do() -> None:
    ranks = [*world(WAITS, WAITS, WAITS), seen(3, state="T", state_s=70.0)]
    assert verdict(ranks) == (Verdict.FROZEN, 3)


@pytest.mark.parametrize(("state_s", "frozen"), [(20.0, False), (60.0, True)])
def test_the_kernel_may_hold_a_process_for_a_while(state_s: float, frozen: bool) -> None:
    hang = judge([*world(WAITS, WAITS, WAITS), seen(3, state="D", state_s=state_s)]).hang
    assert (hang is not None and hang.verdict is Verdict.FROZEN) is frozen


def test_everybody_stopped_is_a_suspended_job_and_nobodys_fault() -> None:
    ranks = [seen(rank, state="T", state_s=70.0) for rank in range(4)]
    assert verdict(ranks)[0] is Verdict.STALLED


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("all in a long evaluation", world(EVALUATES, EVALUATES, EVALUATES, EVALUATES)),
        ("all in one collective: the network", world(WAITS, WAITS, WAITS, WAITS)),
        ("rank 0 saves ten times longer than ever", world(SAVES, WAITS, WAITS, WAITS)),
        (
            "rank 0 writes with code of its own",
            [seen(0, LOOPS, io_bytes_s=3e6), *world(WAITS, WAITS, WAITS)[1:]],
        ),
        ("rank 0 uploads", world(UPLOADS, WAITS, WAITS, WAITS)),
        ("rank 1 compiles and holds the interpreter", world(WAITS, COMPILES, WAITS, WAITS)),
        ("rank 0 evaluates in one long call, awaited at a barrier", world(SCORES, BARRIER, BARRIER, BARRIER)),
        ("half here, half there", world(EVALUATES, EVALUATES, LOOPS, LOOPS)),
    ],
)
def test_what_may_be_work_is_for_people(name: str, ranks: list[ObservedRank]) -> None:
    assert verdict(ranks)[0] is Verdict.STALLED, name


def test_a_rank_that_moves_is_no_deadlock() -> None:
    """Rank 0 evaluates alone: every look finds it elsewhere."""
    waiting = world(WAITS, WAITS, WAITS, idle_s=70.0)
    hang = judge([*waiting, seen(3, LOOPS, steady=0, idle_s=70.0)]).hang
    assert hang is not None
    assert (hang.verdict, hang.sure) == (Verdict.STALLED, True)
    assert "rank 3 is moving" in hang.reason


def test_until_there_were_enough_looks_nothing_is_said() -> None:
    waiting = world(WAITS, WAITS, WAITS, idle_s=66.0)
    assert judge([*waiting, seen(3, LOOPS, steady=2, idle_s=66.0)]) == Judgement(False)
    assert judge([*waiting, seen(3, steady=0, idle_s=66.0)]) == Judgement(False)
    later = judge([*world(WAITS, WAITS, WAITS, idle_s=120.0), seen(3, idle_s=120.0)]).hang
    assert later is not None
    assert (later.verdict, later.sure) == (Verdict.STALLED, False)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("no longer than pauses were before", {"longest_s": 50.0}),
        ("hardly any step yet: it may compile", {"beats": 3}),
        ("steps are slow here", {"step_s": 10.0, "longest_s": 12.0}),
        ("not long", {"idle_s": 59.0}),
    ],
)
def test_a_pause_that_means_nothing(name: str, facts: dict[str, object]) -> None:
    assert judge(world(WAITS, WAITS, LOOPS, WAITS, **facts)) == Judgement(True), name


def test_one_rank_that_makes_steps_shows_that_nothing_hangs() -> None:
    """An evaluator rank steps no more, or ranks don't train together at all."""
    assert judge([*world(WAITS, LOOPS), seen(2, idle_s=0.1)]) == Judgement(True)


def test_a_job_that_tells_of_no_steps_is_never_called_hanging() -> None:
    assert judge(world(WAITS, LOOPS, beats=0, step=-1, idle_s=9000.0)) == Judgement(True)


def test_but_a_process_of_it_that_is_stopped_for_long_is_frozen() -> None:
    ranks = [seen(rank, beats=0, step=-1) for rank in range(3)]
    assert judge([*ranks, seen(3, beats=0, step=-1, state="T", state_s=119.0)]).hang is None
    hang = judge([*ranks, seen(3, beats=0, step=-1, state="T", state_s=121.0)]).hang
    assert hang is not None
    assert hang.verdict is Verdict.FROZEN


def test_a_rank_that_has_ended_is_said_where_others_stand() -> None:
    hang = judge([*world(WAITS, WAITS, WAITS), seen(3, ended=True)]).hang
    assert hang is not None
    assert hang.verdict is Verdict.STALLED
    assert "rank 3 has ended already" in hang.reason


def test_nothing_at_all_is_no_hang() -> None:
    assert judge([]) == Judgement(True)
    assert judge([seen(0, ended=True)]) == Judgement(True)


def test_patience_is_learned_and_never_below_the_floor() -> None:
    def facts(*, beats: int = 100, step_s: float = 0.0, longest_s: float = 0.0) -> RankFacts:
        return RankFacts(rank=0, beats=beats, step_s=step_s, longest_s=longest_s)

    assert patience_s([facts(step_s=0.1, longest_s=0.4)], 60.0) == 60.0
    assert patience_s([facts(step_s=0.1, longest_s=300.0)], 60.0) == 600.0, "it evaluates for five minutes"
    assert patience_s([facts(step_s=30.0, longest_s=40.0)], 60.0) == 600.0
    assert patience_s([facts(beats=2)], 60.0) == 600.0, "nothing is learned so far"
    assert patience_s([facts(step_s=0.1), facts(longest_s=50.0)], 60.0) == 100.0, "any rank's pause"
