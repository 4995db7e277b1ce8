"""The arithmetic of retries, against twins that count on their fingers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.core.diagnosis.recovery import COMMUNICATION_CLUES, judge, plan_checks
from aegis_elastic.core.events import Finding
from aegis_elastic.core.retry_accounts import charge, exceeded, recover_count

counts = st.lists(st.integers(0, 12), max_size=8)
limits = st.integers(0, 10)


@given(st.integers(0, 12), limits)
def test_charge(retries: int, limit: int) -> None:
    allowed = list(range(limit + 2))  # 0 .. limit + 1
    at = min(retries, limit + 1)
    assert charge(at, limit) == (allowed[at + 1] if at + 1 < len(allowed) else allowed[-1])


@given(counts, limits)
def test_recover_count(retries: list[int], limit: int) -> None:
    highest = 0
    for count in retries:
        if count > highest:
            highest = count
    while highest > limit:
        highest -= 1
    assert recover_count(retries, limit) == highest


@given(counts, limits)
def test_exceeded(retries: list[int], limit: int) -> None:
    assert exceeded(retries, limit) == bool([count for count in retries if count - limit >= 1])


@given(limits)
def test_the_limit_survives_that_many_failures_and_not_one_more(limit: int) -> None:
    retries = 0
    for _ in range(limit):
        retries = charge(retries, limit)
        assert not exceeded([retries], limit)
    assert exceeded([charge(retries, limit)], limit)


@pytest.mark.parametrize(
    ("findings", "fault_class", "level"),
    [
        ((), "process", 1),
        ((Finding("gpu", "gpu.missing", "hardware"),), "hardware", 3),
        ((Finding("rdma", "rdma.port_down", "hardware"),), "hardware", 3),
        ((Finding("gpu", "gpu.busy", "unknown"),), "unknown", 1),
        ((Finding("runtime", "runtime.cuda", "software"),), "container", 2),
        ((Finding("io", "io.timeout", "node"),), "container", 2),
        ((Finding("io", "io.full", "unknown"), Finding("gpu", "gpu.lost", "hardware")), "hardware", 3),
        ((Finding("allreduce_performance", "slow", "slow"),), "unknown", 1),
        ((Finding("allreduce_connection", "allreduce_connection.node", "hardware"),), "hardware", 3),
        ((Finding("allreduce_connection", "allreduce_connection.link", "network"),), "unknown", 1),
        ((Finding("allreduce_connection", "allreduce_connection.ambiguous", "unknown"),), "unknown", 1),
    ],
)
def test_levels(findings: tuple[Finding, ...], fault_class: str, level: int) -> None:
    verdict = judge(findings)
    assert (verdict.fault_class, verdict.level) == (fault_class, level)


def test_only_hardware_that_its_own_check_has_named_makes_a_node_leave() -> None:
    for check in ("io", "runtime", "health", "hang", "allreduce_connection", "allreduce_performance", "env"):
        assert judge((Finding(check, "x", "hardware"),)).level < 3


def test_the_collective_checks_run_when_something_points_at_them() -> None:
    assert "allreduce_connection" not in plan_checks("adaptive", ())[0]
    assert "allreduce_connection" not in plan_checks("adaptive", ("oom",))[0]
    for clue in COMMUNICATION_CLUES:
        checks, why = plan_checks("adaptive", ("oom", clue))
        assert "allreduce_connection" in checks
        assert clue in why
    assert len(plan_checks("full", ())[0]) == 7
    assert plan_checks("off", ("hang",))[0] == ()
