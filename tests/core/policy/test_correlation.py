"""When it is not the nodes: too many broken together, or the same outage for everybody."""

from __future__ import annotations

import pytest

from aegis_elastic.core.events import Finding
from aegis_elastic.core.policy.correlation import CORRELATED, NETWORK, STORAGE, WorkerFindings, judge, wait_s
from aegis_elastic.core.policy.settings import Guard

POLICY = Guard()
NOW = 1000.0
GPU = Finding("gpu", "gpu.missing", "hardware")
FULL = Finding("io", "io.no_space", "node")
DENIED = Finding("io", "io.denied", "node")
SLOW = Finding("io", "io.slow", "slow")
CRASHED = Finding("io", "io.crashed", "software")
LINK = Finding("rdma", "rdma.port_down", "network")


def round_of(found: dict[int, Finding], nodes: int, at: float = NOW) -> dict[str, WorkerFindings]:
    return {f"w{n}": WorkerFindings(f"n{n}", at, (found[n],) if n in found else ()) for n in range(nodes)}


def kind_of(found: dict[int, Finding], nodes: int, policy: Guard = POLICY) -> str | None:
    reported = round_of(found, nodes)
    together = judge(reported, list(reported), NOW, policy)
    return together.kind if together else None


def test_half_of_the_nodes_broken_together_is_not_the_nodes() -> None:
    reported = round_of({0: GPU, 1: GPU, 2: GPU, 3: GPU}, 8)
    together = judge(reported, list(reported), NOW, POLICY)
    assert together is not None
    assert together.kind == CORRELATED
    assert together.reason == (
        "4 of 8 nodes are found broken together (gpu.missing): at most 30% can be the nodes' own fault"
    )


@pytest.mark.parametrize(
    ("broken", "nodes"), [(0, 4), (1, 1), (1, 2), (1, 3), (1, 8), (2, 8), (3, 10), (30, 100)]
)
def test_few_broken_nodes_are_broken(broken: int, nodes: int) -> None:
    assert kind_of(dict.fromkeys(range(broken), GPU), nodes) is None


@pytest.mark.parametrize(("broken", "nodes"), [(2, 2), (2, 4), (3, 8), (4, 10), (31, 100)])
def test_from_a_share_on_it_is_correlated(broken: int, nodes: int) -> None:
    assert kind_of(dict.fromkeys(range(broken), GPU), nodes) == CORRELATED


def test_the_share_is_a_setting() -> None:
    half = dict.fromkeys(range(4), GPU)
    assert kind_of(half, 8, Guard(brake_share=0.5)) is None
    assert kind_of(half, 8, Guard(brake_nodes=5)) is None
    assert kind_of({0: GPU}, 8, Guard(brake_share=0.1, brake_nodes=1)) == CORRELATED


def test_what_was_found_long_ago_is_not_together() -> None:
    reported = round_of({0: GPU}, 4) | {"w1": WorkerFindings("n1", NOW - POLICY.brake_window_s - 1, (GPU,))}
    assert judge(reported, list(reported), NOW, POLICY) is None


def test_several_workers_of_one_node_are_one_node() -> None:
    reported = {
        f"w{n}": WorkerFindings("n0" if n < 4 else f"n{n}", NOW, (GPU,) if n < 4 else ()) for n in range(8)
    }
    assert judge(reported, list(reported), NOW, POLICY) is None


def test_storage_that_is_down_for_everybody() -> None:
    reported = round_of({0: FULL, 1: DENIED, 2: FULL}, 3)
    together = judge(reported, list(reported), NOW, POLICY)
    assert together is not None
    assert together.kind == STORAGE
    assert together.reason == "storage is down for all 3 nodes (io.denied, io.no_space)"


def test_one_healthy_or_silent_node_shows_that_it_is_not_everybody() -> None:
    assert kind_of({0: FULL, 1: FULL}, 3) is None
    reported = round_of({0: FULL, 1: FULL}, 2)
    assert judge(reported, ["w0", "w1", "w2"], NOW, POLICY) is None
    assert judge({}, [], NOW, POLICY) is None


def test_a_single_node_may_be_the_culprit_itself() -> None:
    assert kind_of({0: FULL}, 1) is None


@pytest.mark.parametrize("harmless", [SLOW, CRASHED])
def test_slow_storage_and_a_check_that_crashes_are_no_outage(harmless: Finding) -> None:
    assert kind_of(dict.fromkeys(range(3), harmless), 3) is None


def test_a_network_that_is_down_for_everybody() -> None:
    assert kind_of(dict.fromkeys(range(3), LINK), 3) == NETWORK
    assert kind_of({0: LINK}, 3) is None


def test_waits_double_without_a_probe_and_are_bounded() -> None:
    policy = Guard(probe_s=5, hold_max_s=60)
    assert [wait_s(times, policy, probed=False) for times in range(5)] == [5, 10, 20, 40, 60]
    assert wait_s(900, policy, probed=False) == 60
    assert wait_s(0, policy, probed=True) == 60
