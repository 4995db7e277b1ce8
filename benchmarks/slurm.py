"""A node loses power in a real Slurm and a spare waits: the time until all ranks run again, and torchrun's.

    python -m benchmarks.slurm [--runs 3] [--silent] [--json FILE]

Five nodes of our own (`tests.slurm.cluster`), three of them train. Ours: four nodes in one step, one waits as
a spare. torchrun's only pattern that survives: `--no-kill` on sbatch and srun, `--nnodes 2:3`, and going on
with two. Both are measured from the end of all processes on the node to the last rank's start. With
`--silent` the cable is pulled first: no kernel closes the processes' connections, as when the power of a real
machine fails. Then only silence shows the loss, after `--aegis-lost-timeout-s`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.slurm.cluster import Cluster, missing
from tests.slurm.jobs import BatchJob

TORCHRUN = (
    "torchrun --nnodes 2:3 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint n1:29500 "
    "--rdzv-id bench"
)
# Without it torchrun 2.13 never recovers with gloo.
BEFORE = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
GIVEN_UP_S = 180.0


def ours(slurm: Cluster) -> tuple[BatchJob, int]:
    """Our job, and how many ranks start again."""
    return BatchJob(
        slurm, nodes=4, training_nodes="3", steps=100000, flags=["--aegis-warm-spares", "auto"]
    ), 3


def torchruns(slurm: Cluster) -> tuple[BatchJob, int]:
    """torchrun's, likewise."""
    return BatchJob(slurm, nodes=3, training_nodes="3", steps=100000, launcher=TORCHRUN, before=BEFORE), 2


def measure(make: Callable[[Cluster], tuple[BatchJob, int]], *, silent: bool) -> float:
    """Seconds from the loss of a node to the last rank's start; infinite if that doesn't come."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Cluster(Path(folder), nodes=5) as slurm:
        job, ranks = make(slurm)
        job.wait_step(20)
        before = len(job.starts())
        # Any node may be the spare. The batch script's own node is not lost here.
        victim = max(host for _, host, *_ in job.starts() if host != "n1")
        lost = time.time()
        if silent:
            slurm.cut(victim)
        slurm.hosts[victim].power_off()
        try:
            job.wait_for(lambda: len(job.starts()) >= before + ranks, "recovery", GIVEN_UP_S)
            took_s = max(at for at, *_ in job.starts()[before:]) - lost
        except AssertionError:
            took_s = math.inf
        slurm.command(["scancel", str(job.number)])
        job.wait(60)
        return took_s


def main(argv: list[str] | None = None) -> int:
    """Print the medians and their ratio; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slurm", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="runs of each, one after the other (3)")
    parser.add_argument("--silent", action="store_true", help="pull the node's cable first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")
    args = parser.parse_args(argv)
    if lacking := missing():
        print(f"cannot measure: {lacking}", file=sys.stderr)
        return 2
    print(f"about {args.runs * (300 if args.silent else 100)} s")
    times: dict[str, list[float]] = {"aegis-run": [], "torchrun": []}
    for run in range(args.runs):
        for name, make in (("aegis-run", ours), ("torchrun", torchruns)):
            times[name].append(measure(make, silent=args.silent))
            print(f"run {run + 1}: {name} {times[name][-1]:.2f} s", flush=True)
    middle = {name: statistics.median(taken) for name, taken in times.items()}
    ratio = middle["torchrun"] / middle["aegis-run"]
    print(f"\na node is lost, a spare waits: {ratio:.1f} times as fast as torchrun")
    for name, median in middle.items():
        spread = f"{min(times[name]):.2f} to {max(times[name]):.2f}"
        print(f"  {name:10s} {median:6.2f} s   ({spread}, {args.runs} runs)")
    if args.json:
        # JSON knows no infinity: a recovery that never came is null.
        runs = {name: [t if math.isfinite(t) else None for t in taken] for name, taken in times.items()}
        args.json.write_text(json.dumps({"silent": args.silent, "runs_s": runs}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
