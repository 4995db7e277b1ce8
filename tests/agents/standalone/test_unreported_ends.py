"""What the end of an incarnation means when no master can be told of it."""

from __future__ import annotations

import msgspec
import pytest

from aegis_elastic.agents.standalone import unreported_ends
from aegis_elastic.core.model import Failure
from aegis_elastic.core.protocol.messages import IndependentEnd
from aegis_elastic.core.protocol.orders import Action, Order
from aegis_elastic.core.rank_assignment import RankAssignment

FAILURE = Failure(1, 1, 12.5, 1, None, "ValueError: boom", ("ValueError: boom",))


def _order(incarnation: int = 1, recover_count: int = 0, max_retry: int = 1) -> Order:
    return Order(
        seq_num=7, incarnation=incarnation, action=Action.RUN,
        assignments=(RankAssignment("a", "u", 0, 0, 2),),
        store="127.0.0.1:1", checks=(), restart_count=incarnation - 1, recover_count=recover_count,
        max_retry=max_retry,
    )  # fmt: skip


def test_retries_go_on_from_the_jobs_count_until_they_are_used_up() -> None:
    unreported = unreported_ends.UnreportedEnds()
    first = unreported.propose(_order(1, recover_count=0, max_retry=1), "a", "boom", (FAILURE,))
    assert not first.ended
    assert unreported.add(first)
    second = unreported.propose(_order(2, recover_count=0, max_retry=1), "a", "boom", (FAILURE,))
    assert second.ended
    assert (
        unreported_ends.UnreportedEnds().propose(_order(recover_count=1, max_retry=1), "a", "boom", ()).ended
    )
    assert unreported_ends.UnreportedEnds().propose(_order(max_retry=0), "a", "boom", ()).ended


def test_an_incarnation_ends_once_and_is_reported_until_the_plane_is_past_it() -> None:
    unreported = unreported_ends.UnreportedEnds()
    ends = [IndependentEnd("a", number, "boom") for number in (1, 2)]
    assert [unreported.add(end) for end in (*ends, ends[0])] == [True, True, False]
    assert list(unreported.ends) == ends
    unreported.settle(2)
    assert list(unreported.ends) == ends[1:]
    unreported.settle(3)
    assert list(unreported.ends) == []


def test_the_end_travels_through_a_store_as_text() -> None:
    end = IndependentEnd("wörker", 3, "boom\n", (FAILURE,), ended=True)
    assert unreported_ends.decode(unreported_ends.encode(end)) == end
    for garbage in ("", "plane", "{}", "[1]", '{"worker":1}'):
        with pytest.raises(ValueError, match="cannot read how the incarnation ended"):
            unreported_ends.decode(garbage)


def test_the_next_start_keeps_every_assignment() -> None:
    order = _order(incarnation=2)
    following = unreported_ends.next_order(order, "127.0.0.1:2")
    assert (following.incarnation, following.restart_count, following.store) == (3, 2, "127.0.0.1:2")
    assert following.assignments == order.assignments


def test_a_master_that_keeps_to_its_recovery_is_followed_at_last() -> None:
    unreported, ours = unreported_ends.UnreportedEnds(), _order(incarnation=2)
    older = msgspec.structs.replace(_order(incarnation=1), action=Action.TROUBLESHOOT, seq_num=9)
    assert not unreported.overruled(older, ours, 100.0), "it may not have our reports yet"
    assert not unreported.overruled(older, ours, 100.0 + unreported_ends.OVERRULED_S / 2)
    assert unreported.overruled(older, ours, 100.0 + unreported_ends.OVERRULED_S)


def test_what_a_master_ordered_before_we_left_or_of_training_overrules_nothing() -> None:
    unreported, ours = unreported_ends.UnreportedEnds(), _order(incarnation=2)
    stale = msgspec.structs.replace(_order(incarnation=1), action=Action.TROUBLESHOOT)
    running = msgspec.structs.replace(_order(incarnation=1), seq_num=9)
    for now_s in (0.0, 1000.0):
        assert not unreported.overruled(stale, ours, now_s)
        assert not unreported.overruled(running, ours, now_s)
