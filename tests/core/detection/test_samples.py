"""Recorded samples through all rules: half an hour of a healthy training, and the same with something
wrong.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from aegis_elastic.core.detection.anomalies import (
    CPU_IDLE,
    GPU_IDLE,
    MEMORY_GROWS,
    NETWORK_DROPS,
    NODE,
    Anomaly,
    Rules,
)
from aegis_elastic.core.detection.samples import RankRules, RankSample, Sample, Usage

RECORDED = Path(__file__).with_name("healthy_half_hour.jsonl.gz")
MIB = 1 << 20
AFTER_S = 900  # when something goes wrong in the altered ones

Change = Callable[[RankSample, float], RankSample]


@pytest.fixture(scope="module")
def recorded() -> dict[int, list[Sample]]:
    """Samples by host; see recorder.py."""
    by_host: dict[int, list[Sample]] = {0: [], 1: []}
    for line in gzip.decompress(RECORDED.read_bytes()).splitlines():
        host, sample = msgspec.json.decode(line, type=tuple[int, Sample])
        by_host[host].append(sample)
    return by_host


def looked_at(samples: list[Sample], change: Change | None = None, rank: int = 0) -> list[Anomaly]:
    """What all rules say of these samples; `change` alters those of a rank from AFTER_S on."""
    rules = RankRules(Rules())
    rules.begin()
    found: list[Anomaly] = []
    for sample in samples:
        late_s = sample.at_s - samples[0].at_s - AFTER_S
        if change is not None and late_s > 0:
            ranks = tuple(change(each, late_s) if each.rank == rank else each for each in sample.ranks)
            sample = msgspec.structs.replace(sample, ranks=ranks)
        found += rules.observe(sample)
    return found


def test_half_an_hour_of_a_healthy_training_is_silent(recorded: dict[int, list[Sample]]) -> None:
    for samples in recorded.values():
        assert samples[-1].at_s - samples[0].at_s >= 1800
        assert {rank.rank for rank in samples[-5].ranks} == {rank.rank for rank in samples[5].ranks}
        assert sum(rank.sent_bytes for sample in samples for rank in sample.ranks) > 1e9
        assert looked_at(samples) == []


def test_a_rank_that_stops_in_it_is_found(recorded: dict[int, list[Sample]]) -> None:
    def stop(rank: RankSample, late_s: float) -> RankSample:
        return msgspec.structs.replace(rank, cpu_s=0.0, sent_bytes=0, busy_s=0.0, state="T")

    found = looked_at(recorded[0], stop)
    assert [(each.code, each.rank) for each in found] == [(CPU_IDLE, 0)]
    assert found[0].detail.startswith("rank 0: usually ")
    assert found[0].detail.endswith("the process is stopped")
    assert found[0].time - recorded[0][0].time - AFTER_S < 240, "a few times its longest pause"


def test_a_rank_that_leaks_in_it_is_found(recorded: dict[int, list[Sample]]) -> None:
    def leak(rank: RankSample, late_s: float) -> RankSample:
        return msgspec.structs.replace(rank, memory_bytes=rank.memory_bytes + int(2 * MIB * late_s))

    found = looked_at(recorded[0], leak, rank=1)
    assert [(each.code, each.rank) for each in found] == [(MEMORY_GROWS, 1)]
    assert found[0].numbers["slope_bytes_s"] == pytest.approx(2 * MIB, rel=0.6)


def test_a_link_that_gives_a_tenth_in_it_is_found(recorded: dict[int, list[Sample]]) -> None:
    def throttle(rank: RankSample, late_s: float) -> RankSample:
        return msgspec.structs.replace(rank, busy_s=min(rank.busy_s * 10, 1.0))

    # of a ring's ranks only those send over the wire whose next neighbour is on another host
    sending = {rank.rank for rank in recorded[1][600].ranks if rank.sent_bytes > MIB} or {
        recorded[1][600].ranks[0].rank
    }
    for rank in sending:
        found = looked_at(recorded[1], throttle, rank)
        assert [(each.code, each.rank) for each in found] == [(NETWORK_DROPS, rank)]


# ------------------------------------------------------------ what a sample is made of


def sample(at: int, gpu: float | None = None, available: int = 20 << 30, rank_bytes: int = 1 << 30) -> Sample:
    ranks = tuple(RankSample(rank + 4, rank, 1.0, rank_bytes, "R", gpu) for rank in range(2))
    return Sample(1000.0 + at, float(at), 1.0, ranks, 2.0, available, 32 << 30, 0)


def test_a_gpu_that_falls_idle_is_told_with_the_global_rank() -> None:
    rules = RankRules(Rules())
    found = [a for at in range(500) for a in rules.observe(sample(at, gpu=0.9 if at < 300 else 0.0))]
    assert [(each.code, each.rank) for each in found] == [(GPU_IDLE, 4), (GPU_IDLE, 5)]


def test_a_node_whose_memory_goes_without_a_rank_to_blame_is_told_as_a_node() -> None:
    rules = RankRules(Rules())
    found = [a for at in range(900) for a in rules.observe(sample(at, available=(20 << 30) - at * 4 * MIB))]
    assert [(each.code, each.rank) for each in found] == [(MEMORY_GROWS, NODE)]


def test_who_leaks_is_blamed_instead_of_the_node() -> None:
    rules = RankRules(Rules())
    found = []
    for at in range(900):
        grown = at * 4 * MIB
        found += rules.observe(sample(at, available=(20 << 30) - 2 * grown, rank_bytes=(1 << 30) + grown))
    assert [(each.code, each.rank) for each in found] == [(MEMORY_GROWS, 4), (MEMORY_GROWS, 5)]


def test_the_first_look_says_nothing() -> None:
    rules = RankRules(Rules())
    assert rules.observe(msgspec.structs.replace(sample(0), took_s=0.0)) == []


def test_a_report_of_it_can_be_read_back() -> None:
    raw = json.dumps(sample(3, gpu=0.5).usage(0.001, 7))
    usage = msgspec.json.decode(raw, type=Usage)
    assert usage.cpu_cores == 2.0
    assert usage.gpu_utilisation == 0.5
    assert usage.skipped_bytes == 7
    assert [(each.rank, each.cpu_cores) for each in usage.ranks] == [(4, 1.0), (5, 1.0)]
