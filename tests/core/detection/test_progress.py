"""What an agent tells of its ranks: small on the wire whatever there is to tell, and the same after it."""

from __future__ import annotations

import msgspec
import pytest

from aegis_elastic.core.detection.progress import Facts, RankFacts, WindowWork, decode, packed
from aegis_elastic.core.protocol.messages import WATCHED_BYTES_MAX

OWN = WindowWork(7, 10, 100000.0, 120000.0, 200000.0, 99000.0)


def node(count: int, stacks: int, chars: int = 1500) -> Facts:
    ranks = [
        RankFacts(
            rank=rank, step=123456, beats=123456, idle_s=61.234, longest_s=1.234, step_s=0.1234, state="S",
            state_s=61.234, stack=f"{rank % stacks}".ljust(chars, "x"), steady=3, own=OWN,
        )
        for rank in range(count)
    ]  # fmt: skip
    return Facts(5, 1, tuple(ranks))


def wire(facts: Facts) -> bytes:
    return msgspec.json.encode(packed(facts))


def test_what_is_told_is_heard() -> None:
    facts = node(8, 2)
    assert decode(msgspec.Raw(wire(facts))) == facts
    assert len(wire(facts)) < 8000, "equal stacks travel once"


@pytest.mark.parametrize(("count", "stacks"), [(8, 8), (64, 64), (64, 3), (128, 128)])
def test_it_fits_however_many_ranks_a_node_has(count: int, stacks: int) -> None:
    raw = wire(node(count, stacks))
    assert len(raw) <= WATCHED_BYTES_MAX
    heard = decode(msgspec.Raw(raw))
    assert [rank.step for rank in heard.ranks] == [123456] * count
    assert any(rank.stack for rank in heard.ranks)


def test_an_index_that_leads_nowhere_is_no_stack() -> None:
    told = msgspec.json.encode({"look": 1, "incarnation": 1, "ranks": [{"rank": 0, "stackAt": 9}]})
    assert decode(msgspec.Raw(told)).ranks[0].stack == ""
