"""Samples of a node's ranks, the anomaly rules of all ranks over a series of samples, and the usage report.

Pure: recorded samples can be replayed through the rules (`tests/core/detection/test_samples.py` does).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from aegis_elastic.core.detection.anomalies import (
    CPU_IDLE,
    GPU_IDLE,
    MEMORY_GROWS,
    NETWORK_DROPS,
    NODE,
    Anomaly,
    Drop,
    Fired,
    Growth,
    Idle,
    Rules,
)

RANKS_MAX = 512  # of one node, in a report
_CPU_FLOOR_CORES = 0.01
_GPU_FLOOR = 0.005


class RankSample(msgspec.Struct, frozen=True, array_like=True):
    """One rank with its descendants since the last sample. `gpu`: 0 to 1, mean of its cards; None without.

    `sent_bytes`, `received_bytes`, `busy_s`: of its TCP connections to other hosts; `busy_s` is how long they
    had something to send that the receiver would take, `queued_bytes` what waits at the moment of the sample.
    """

    rank: int
    local_rank: int
    cpu_s: float
    memory_bytes: int
    state: str
    gpu: float | None = None
    gpu_memory_bytes: int | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    busy_s: float = 0.0
    queued_bytes: int = 0


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a node. `took_s`: since the last one; `time` wall seconds, `at_s` monotonic ones."""

    time: float
    at_s: float
    took_s: float
    ranks: tuple[RankSample, ...]
    cpu_s: float
    available_bytes: int
    total_bytes: int
    network_bytes: int

    def usage(self, cost_s: float, skipped_bytes: int) -> dict[str, Any]:
        """This sample for the node's report, in the wire form of `Usage`."""
        took_s = self.took_s or 1.0
        gpus = [rank.gpu for rank in self.ranks if rank.gpu is not None]
        return {
            "time": self.time,
            "cpuCores": round(self.cpu_s / took_s, 3),
            "availableBytes": self.available_bytes,
            "totalBytes": self.total_bytes,
            "networkBytesS": round(self.network_bytes / took_s),
            "gpuUtilisation": round(sum(gpus) / len(gpus), 3) if gpus else None,
            "costS": round(cost_s, 6),
            "skippedBytes": skipped_bytes,
            "ranks": [
                [
                    rank.rank, round(rank.cpu_s / took_s, 3), rank.memory_bytes, rank.gpu,
                    rank.gpu_memory_bytes, round((rank.sent_bytes + rank.received_bytes) / took_s),
                ]
                for rank in self.ranks[:RANKS_MAX]
            ],
        }  # fmt: skip


class RankUsage(msgspec.Struct, frozen=True, array_like=True):
    """One rank in a report."""

    rank: int
    cpu_cores: float
    memory_bytes: int
    gpu_utilisation: float | None = None
    gpu_memory_bytes: int | None = None
    network_bytes_s: float = 0.0


class Usage(msgspec.Struct, frozen=True, rename="camel"):
    """`ReportData.watched["monitor"]`: what a node and its ranks use. `cost_s`: processor time of a sample.

    `skipped_bytes`: of the ranks' logs in this incarnation, written faster than they are read.
    """

    time: float
    cpu_cores: float
    available_bytes: int
    total_bytes: int
    network_bytes_s: float
    gpu_utilisation: float | None = None
    cost_s: float = 0.0
    skipped_bytes: int = 0
    ranks: tuple[RankUsage, ...] = ()


class RankRules:
    """All anomaly rules for all ranks of a node. What they learn is kept by local rank over incarnations."""

    def __init__(self, rules: Rules) -> None:
        self._cpu = defaultdict[int, Idle](lambda: Idle(rules, "cores", _CPU_FLOOR_CORES))
        self._gpu = defaultdict[int, Idle](lambda: Idle(rules, "gpus", _GPU_FLOOR))
        self._growth = defaultdict[int, Growth](lambda: Growth(rules))
        self._drop = defaultdict[int, Drop](lambda: Drop(rules))

    def begin(self) -> None:
        """The ranks were started anew."""
        kept: tuple[defaultdict[int, Any], ...] = (self._cpu, self._gpu, self._growth, self._drop)
        for rules in kept:
            for rule in rules.values():
                rule.begin()

    def observe(self, sample: Sample) -> list[Anomaly]:
        """The anomalies in the newest sample, given all before it."""
        found: list[Anomaly] = []
        if sample.took_s <= 0:
            return found
        for rank in sample.ranks:
            for code, fired in self._of_rank(rank, sample):
                if fired is not None:
                    stopped = "; the process is stopped" if rank.state in "Tt" else ""
                    detail = f"rank {rank.rank}: {fired.detail}{stopped}"
                    found.append(Anomaly(code, rank.rank, sample.time, detail, fired.numbers))
        used = sample.total_bytes - sample.available_bytes
        fired = self._growth[NODE].observe(used, sample.available_bytes, sample.at_s)
        blamed = any(rule.fired for local, rule in self._growth.items() if local != NODE)
        if fired is not None and not blamed:
            detail = f"the node's memory {fired.detail}"
            found.append(Anomaly(MEMORY_GROWS, NODE, sample.time, detail, fired.numbers))
        return found

    def _of_rank(self, rank: RankSample, sample: Sample) -> list[tuple[str, Fired | None]]:
        local = rank.local_rank
        found = [
            (CPU_IDLE, self._cpu[local].observe(rank.cpu_s / sample.took_s)),
            (
                MEMORY_GROWS,
                self._growth[local].observe(rank.memory_bytes, sample.available_bytes, sample.at_s),
            ),
            (
                NETWORK_DROPS,
                self._drop[local].observe(rank.sent_bytes, rank.busy_s, rank.queued_bytes, sample.took_s),
            ),
        ]
        if rank.gpu is not None:
            found.append((GPU_IDLE, self._gpu[local].observe(rank.gpu)))
        return found
