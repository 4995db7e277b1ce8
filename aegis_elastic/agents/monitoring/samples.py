"""Samples of one incarnation's ranks: /proc, the kernel's TCP connections and the GPUs, combined by rank."""

from __future__ import annotations

import logging
import time

from aegis_elastic.agents.monitoring import gpus, procfs
from aegis_elastic.agents.monitoring.gpus import Gpu, GpuReader
from aegis_elastic.agents.monitoring.sockets import Connections, Traffic
from aegis_elastic.agents.watch.contract import WatchedRanks
from aegis_elastic.core.detection.samples import RankSample, Sample

logger = logging.getLogger(__name__)

RESCAN_SAMPLES = 10
_NONE = Traffic(0, 0, 0.0, 0)


class Sampler:
    """To be made and used by one thread; `close` it."""

    def __init__(self, ranks: WatchedRanks, gpu_reader: GpuReader) -> None:
        self._local = {rank: rank - ranks.assignment.rank_offset for rank in ranks.pids}
        self._trees = procfs.ProcessTrees(ranks.pids)
        self._node_reader = procfs.NodeReader()
        self._node = self._node_reader.read()
        self._gpu_reader = gpu_reader
        self._owners: dict[int, int] = {}  # socket's inode -> rank
        self._traffic: dict[tuple[int, int], Traffic] = {}
        self._at_s = time.monotonic()
        self.number = 0
        try:
            self._connections: Connections | None = Connections()
        except OSError as error:
            logger.info("the ranks' connections are not watched: %s", error)
            self._connections = None

    def take(self) -> Sample:
        """Take a sample."""
        if self.number % RESCAN_SAMPLES == 0:
            self._rescan()
        self.number += 1
        now_s = time.monotonic()
        took_s, self._at_s = now_s - self._at_s, now_s
        traffic_of = self._traffic_by_rank()
        gpus_of = gpus.owned(self._gpu_reader.read(), self._trees.members, self._local)
        found = []
        for rank, local in self._local.items():
            usage = self._trees.usage(rank)
            if usage is None:
                continue
            mean, memory = _of_gpus(gpus_of.get(rank, []))
            sent, received, busy_s, queued = traffic_of.get(rank, _NONE)
            found.append(RankSample(rank, local, *usage, mean, memory, sent, received, busy_s, queued))
        before, self._node = self._node, self._node_reader.read()
        return Sample(
            time=time.time(),
            at_s=now_s,
            took_s=took_s,
            ranks=tuple(found),
            cpu_s=self._node.cpu_s - before.cpu_s,
            available_bytes=self._node.available_bytes,
            total_bytes=self._node.total_bytes,
            network_bytes=max(self._node.network_bytes - before.network_bytes, 0),
        )

    def close(self) -> None:
        """Close the descriptors."""
        if self._connections is not None:
            self._connections.close()

    def _rescan(self) -> None:
        self._trees.rescan()
        if self._connections is not None:
            self._owners = {
                inode: rank for rank, pids in self._trees.members.items() for inode in procfs.sockets_of(pids)
            }

    def _traffic_by_rank(self) -> dict[int, Traffic]:
        """The traffic of each rank's connections since the last sample; new ones count from the next."""
        if self._connections is None or not self._owners:
            return {}
        try:
            newest = self._connections.read()
        except OSError as error:
            logger.info("the ranks' connections are no longer watched: %s", error)
            self._connections.close()
            self._connections = None
            return {}
        traffic: dict[int, Traffic] = {}
        for key, now in newest.items():
            rank = self._owners.get(key[0])
            before = self._traffic.get(key)
            if rank is not None and before is not None:
                sum_so_far = traffic.get(rank, _NONE)
                traffic[rank] = Traffic(
                    sum_so_far.sent_bytes + now.sent_bytes - before.sent_bytes,
                    sum_so_far.received_bytes + now.received_bytes - before.received_bytes,
                    sum_so_far.busy_s + max(now.busy_s - before.busy_s, 0.0),
                    sum_so_far.queued_bytes + now.queued_bytes,
                )
        self._traffic = newest
        return traffic


def _of_gpus(owned: list[Gpu]) -> tuple[float | None, int | None]:
    busy = [gpu.utilisation for gpu in owned if gpu.utilisation is not None]
    used = [gpu.used_bytes for gpu in owned if gpu.used_bytes is not None]
    return (sum(busy) / len(busy) if busy else None), (sum(used) if used else None)
