"""Requests for a node's checks: no node is to leave for GPUs that its ranks don't need."""

from __future__ import annotations

import pytest
import torch

from aegis_elastic.agents.checks.requests import CheckSettings, check_request, device_of
from aegis_elastic.agents.plane.link import Identity
from aegis_elastic.core.protocol.orders import Action, Order
from aegis_elastic.core.rank_assignment import RankAssignment

ME = Identity("ns", "job", "w", "uid", "node", "127.0.0.1", 4)
ASSIGNMENT = RankAssignment("w", "uid", 0, 0, 4)
ORDER = Order(1, 0, Action.BOOTCHECK, (ASSIGNMENT,), "127.0.0.1:1", ("gpu", "health"), 0, 0, 3)


@pytest.mark.parametrize(
    ("shown", "wanted", "expected"),
    [(0, None, None), (1, None, 1), (2, None, 2), (3, None, 4), (8, None, 8), (1, 8, 8), (8, 0, 0)],
)
def test_the_expected_gpus_are_those_of_the_node_or_the_users_setting(
    shown: int, wanted: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    request = check_request(ORDER, ASSIGNMENT, ME, CheckSettings(gpus=wanted), shown, {}, {})
    assert request.expected_gpus == expected


@pytest.mark.parametrize(
    ("gpus", "ranks", "visible", "device"),
    [
        (8, 8, None, "cuda"),
        (1, 2, None, "cpu"),
        (0, 2, None, "cpu"),
        (8, 2, "", "cpu"),
        (8, 2, "-1", "cpu"),
        (8, 2, "6,7", "cuda"),
        (8, 4, "6,7", "cpu"),
    ],
)
def test_a_group_uses_gpus_only_where_each_rank_sees_one(
    gpus: int, ranks: int, visible: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_of(gpus, ranks) == device


def test_a_group_of_a_torch_without_cuda_uses_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert device_of(8, 8) == "cpu"
