"""Bootcheck and the collective checks: real process groups of several fake nodes over a real TCPStore."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore

from aegis_elastic.checks.contract.environments import summarise
from aegis_elastic.core.model import CheckResult
from tests.checks.support import results, start

ENV = {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def store() -> TCPStore:
    """The store that an agent would host."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def world(store: TCPStore, nodes: int, ranks_each: int, node: int, **more: Any) -> dict[str, Any]:
    return {
        "groupRank": node,
        "groupWorldSize": nodes,
        "rankOffset": node * ranks_each,
        "worldSize": nodes * ranks_each,
        "localWorldSize": ranks_each,
        "masterAddr": "127.0.0.1",
        "masterPort": store.port,
        **more,
    }


def run_on_all(
    requests: list[dict[str, Any]], env: dict[str, str] | None = None
) -> list[dict[str, CheckResult]]:
    """One checks' process per node, all at once."""
    processes = [start(request, ENV | (env or {})) for request in requests]
    with ThreadPoolExecutor(len(processes)) as pool:
        answers = list(pool.map(lambda process: list(results(process)), processes))
    return [{result.check_type: result for result in found} for found in answers]


def test_bootcheck_and_collectives_pass_over_two_nodes_with_two_ranks_each(store: TCPStore) -> None:
    checks = ["env", "health", "allreduce_connection", "allreduce_performance"]
    found = run_on_all([{"checks": checks, "world": world(store, 2, 2, node)} for node in range(2)])
    for node in found:
        assert list(node) == checks
        assert all(result.passed for result in node.values()), [result.result for result in node.values()]
        assert node["health"].result == "health: 4 ranks form a group, every value in it is right"
        assert isinstance(node["allreduce_performance"].details["bus_bytes_per_s"], int)
        assert "none can be called slow" in node["allreduce_performance"].result
    assert set(found[1]["health"].details) == {"rank2_s", "rank3_s"}
    line, differing = summarise({f"node-{i}": node["env"].details for i, node in enumerate(found)})
    assert line.startswith("2 workers alike: torch ")
    assert differing == {}


def test_the_same_store_serves_a_second_round_under_another_tag(store: TCPStore) -> None:
    for tag in ("1", "2"):
        (found,) = run_on_all([{"checks": ["health"], "world": world(store, 1, 2, 0, tag=tag)}])
        assert found["health"].passed, found["health"].result


def test_three_nodes_measure_each_other_in_pairs(store: TCPStore) -> None:
    # The factor is wide: whether a shared two-core machine is even is not the question here.
    requests = [
        {"checks": ["allreduce_performance"], "world": world(store, 3, 1, node), "slowFactor": 1000}
        for node in range(3)
    ]
    for node, found in enumerate(run_on_all(requests)):
        result = found["allreduce_performance"]
        assert result.passed, result.result
        pairs = {key for key in result.details if key.startswith("pair_")}
        assert pairs == {f"pair_{peer}_bytes_per_s" for peer in range(3) if peer != node}


def test_a_node_that_never_comes_is_named_by_the_others(store: TCPStore) -> None:
    requests = [
        {
            "checks": ["health", "allreduce_connection"],
            "world": world(store, 3, 1, node),
            "budgetsS": {"health": 4, "allreduce_connection": 4},
        }
        for node in range(2)
    ]
    for found in run_on_all(requests):
        connection, health = found["allreduce_connection"], found["health"]
        assert (connection.finding, connection.scope) == ("allreduce_connection.missing_peer", "network")
        assert "node rank 2 of 3 did not come within 1.4 s" in connection.result
        assert health.finding == "health.missing_peer"
        assert "rank 2 of 3 did not come" in health.result


def test_a_store_that_is_not_there_is_the_network(store: TCPStore) -> None:
    nowhere = world(store, 1, 1, 0) | {"masterPort": 1}
    (found,) = run_on_all([{"checks": ["health"], "world": nowhere, "budgetsS": {"health": 4}}])
    assert (found["health"].finding, found["health"].scope) == ("health.store", "network")
    assert "cannot reach the store at 127.0.0.1:1" in found["health"].result


def test_a_network_interface_that_is_not_there_breaks_the_group(store: TCPStore) -> None:
    requests = [{"checks": ["allreduce_connection"], "world": world(store, 2, 1, node)} for node in range(2)]
    for found in run_on_all(requests, {"GLOO_SOCKET_IFNAME": "nosuch0"}):
        result = found["allreduce_connection"]
        # Two nodes that can't talk: nobody can tell whose fault it is, but what each saw is said.
        assert (result.finding, result.scope) == ("allreduce_connection.ambiguous", "unknown")
        assert "nosuch0" in result.result


def test_one_node_alone_has_no_network_to_try(store: TCPStore) -> None:
    (found,) = run_on_all([{"checks": ["allreduce_connection"], "world": world(store, 1, 4, 0)}])
    assert found["allreduce_connection"].passed
    assert "this is the only node" in found["allreduce_connection"].result


def test_the_environment_record_has_what_a_comparison_needs() -> None:
    (found,) = run_on_all([{"checks": ["env"]}])
    details = found["env"].details
    assert {"torch", "python", "cuda", "nccl", "cudnn", "driver", "cuda_devices", "lib_numpy"} <= set(details)
    json.dumps(details)
