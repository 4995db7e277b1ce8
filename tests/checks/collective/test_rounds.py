"""The rounds when a participant is there and then says nothing: nobody waits for ever, and nobody guesses."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from aegis_elastic.core.model import CheckResult
from tests.checks.support import results, start

NODES = 4
CONNECTION = "allreduce_connection"


@pytest.fixture
def store() -> TCPStore:
    """The store that an agent would host."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def come_and_stay_silent(store: TCPStore, rank: int) -> None:
    """What a node leaves in the store that froze right after it came."""
    client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=10))
    keys = PrefixStore(f"aegis/check//{CONNECTION}", client)
    keys.set(f"here/{rank}", "1")
    keys.add("here", 1)


def run_on_all_but(store: TCPStore, silent: int, budget_s: float) -> dict[int, CheckResult]:
    """The results of the nodes that work, by group rank."""
    come_and_stay_silent(store, silent)
    processes = {
        rank: start(
            {
                "checks": [CONNECTION],
                "budgetsS": {CONNECTION: budget_s},
                "world": {
                    "groupRank": rank,
                    "groupWorldSize": NODES,
                    "rankOffset": rank,
                    "worldSize": NODES,
                    "localWorldSize": 1,
                    "masterAddr": "127.0.0.1",
                    "masterPort": store.port,
                },
            },
            {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(NODES)
        if rank != silent
    }
    found = {}
    for rank, process in processes.items():
        (found[rank],) = results(process)
    return found


@pytest.mark.full
def test_a_node_that_goes_silent_is_the_one_that_is_named_and_the_others_are_sound(store: TCPStore) -> None:
    for rank, result in run_on_all_but(store, silent=3, budget_s=25).items():
        assert result.passed, result.result
        assert f"rank {rank}, is sound; broken is node rank 3" in result.result


def test_without_the_coordinators_word_nobody_is_named_and_all_end_in_time(store: TCPStore) -> None:
    for result in run_on_all_but(store, silent=0, budget_s=8).values():
        assert (result.finding, result.scope) == (f"{CONNECTION}.failed", "network")
        assert "no word on round 1 from node rank 0" in result.result


def test_rounds_that_the_budget_has_no_room_for_are_said_and_nobody_is_named(store: TCPStore) -> None:
    for result in run_on_all_but(store, silent=3, budget_s=8).values():
        assert (result.finding, result.scope) == (f"{CONNECTION}.unclear", "unknown")
        assert "no time left for round" in result.result
