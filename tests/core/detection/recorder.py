"""How `healthy_half_hour.jsonl.gz` was recorded: two hosts in namespaces, two gloo ranks on each, one sample
a second.

    python -m tests.core.detection.recorder 31 tests/core/detection/healthy_half_hour.jsonl.gz

The training has what healthy ones have: data loading, a cache that fills and levels off, evaluations without
communication, checkpoints during which nothing else happens, a collector's saw in its memory. Run by hand,
as root.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from aegis_elastic.agents.monitoring.gpus import GpuReader
from aegis_elastic.agents.monitoring.samples import Sampler
from aegis_elastic.agents.watch.contract import WatchedRanks
from aegis_elastic.core.rank_assignment import RankAssignment
from aegis_elastic.testing.netns import Net

SELF = (sys.executable, "-m", "tests.core.detection.recorder")
RANKS = 2
CACHE_STEPS = 400
EVALUATE_EVERY, CHECKPOINT_EVERY, COLLECT_EVERY = 500, 700, 60


def train(seconds: float, folder: Path) -> None:
    """One rank, until rank 0 says that the time is over."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    weights, began_s, cache, waste = torch.randn(256, 256), time.monotonic(), list[bytes](), list[bytes]()
    go_on, step = torch.ones(1), 0
    while go_on.item():
        step += 1
        time.sleep(0.2)  # the data
        if step <= CACHE_STEPS:
            cache.append(os.urandom(200_000))
        waste.append(os.urandom(300_000))
        if step % COLLECT_EVERY == 0:
            waste.clear()
        until_s = time.monotonic() + 0.02
        while time.monotonic() < until_s:
            weights = (weights @ weights).clamp(-1, 1)
        dist.all_reduce(torch.ones(500_000))
        go_on.fill_(float(time.monotonic() - began_s < seconds))
        dist.broadcast(go_on, 0)
        if step % EVALUATE_EVERY == 0:
            for _ in range(75):
                time.sleep(0.15)
                weights = (weights @ weights).clamp(-1, 1)
        if step % CHECKPOINT_EVERY == 0:
            torch.save(torch.zeros(5_000_000), folder / f"checkpoint.{dist.get_rank()}")
            time.sleep(8.0)
            dist.barrier()


def host(number: int, seconds: float, out: Path) -> None:
    """The ranks of one host, and a sample of them every second."""
    env = {
        **os.environ, "MASTER_ADDR": "10.88.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": str(2 * RANKS),
        "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    argv = [*SELF, "train", str(seconds), str(out.parent)]
    ranks = {
        rank: subprocess.Popen(argv, env={**env, "RANK": str(rank)})
        for rank in range(number * RANKS, (number + 1) * RANKS)
    }
    assignment = RankAssignment(f"node{number}", "uid", number, number * RANKS, RANKS)
    watched = WatchedRanks(1, assignment, {rank: process.pid for rank, process in ranks.items()})
    cards = GpuReader(1.0)
    sampler = Sampler(watched, cards)
    with gzip.open(out, "wb") as file:
        while any(process.poll() is None for process in ranks.values()):
            time.sleep(1.0)
            sample = sampler.take()
            if sample.ranks:
                file.write(msgspec.json.encode(sample) + b"\n")
    sampler.close()
    cards.close()


def main() -> None:
    """`MINUTES OUT`; the other forms are for itself."""
    if sys.argv[1] == "train":
        train(float(sys.argv[2]), Path(sys.argv[3]))
        return
    if sys.argv[1] == "host":
        host(int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
        return
    seconds, out = 60 * float(sys.argv[1]), Path(sys.argv[2]).absolute()
    parts = [out.with_name(f"{out.name}.{number}") for number in range(2)]
    with Net(2, share=[out.parent]) as net:
        hosts = [
            each.popen([*SELF, "host", str(number), str(seconds), str(parts[number])])
            for number, each in enumerate(net.hosts)
        ]
        codes = [each.wait() for each in hosts]
    assert codes == [0, 0], codes
    with gzip.open(out, "wb") as file:
        for number, part in enumerate(parts):
            for line in gzip.decompress(part.read_bytes()).splitlines():
                file.write(msgspec.json.encode([number, msgspec.Raw(line)]) + b"\n")
            part.unlink()


if __name__ == "__main__":
    main()
