"""Our overhead while nothing happens: processor and memory of each part, and steps while spares are made.

    python -m benchmarks.overhead --seconds 60       (about two minutes)

One node. The ranks all-reduce every 50 ms in the first half, which is what a training that waits for its
accelerators looks like to the node; then another job computes without a pause, and its steps are compared
before, while and after warm spares are made beside it (the worst case: a node without a free core).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.launchers import Job, Shape, adopt_orphans, wait
from benchmarks.stamps import read

READY_TIMEOUT_S = 120.0
AFTER_S = 8.0
SPARES_READY = "warm spares ready: "
MEASURED = Path(__file__).with_name("measured.py")
# a part of the command line, and its name in the table
PARTS = {
    "aegis_elastic.control.host.supervisor": "plane: supervisor",
    "nats-server": "plane: nats-server",
    "aegis_elastic.control.main": "plane: master",
    "guard.py": "guard",
    "aegis_elastic.checks": "checks, ready for a failure",
    "aegis_elastic.launch.run": "agent (the launcher)",
}


class Cost(NamedTuple):
    """Of all processes of a part together: share of one core, unshared and proportional memory in MiB."""

    processes: int
    core: float
    unique_mib: float
    shared_mib: float


def steady(ranks: int, seconds: float) -> dict[str, Cost]:
    """The cost of each part while the job trains and its spares are ready."""
    with tempfile.TemporaryDirectory(prefix="aegis-bench-", ignore_cleanup_errors=True) as name:
        shape, folder = Shape(1, ranks), Path(name)
        with Job("aegis-run", shape, folder, (str(MEASURED), name, "outside"), libraries=False) as job:
            node = job.add_node()
            wait(lambda: SPARES_READY in job.logs(), "warm spares", READY_TIMEOUT_S)
            time.sleep(AFTER_S)
            trains = {stamp.pid for stamp in read(folder)}
            root = psutil.Process(node.pid)
            everything = [root, *root.children(recursive=True)]
            parts = {process: _part(process, trains) for process in everything}
            before = {process: sum(process.cpu_times()[:2]) for process in everything}
            time.sleep(seconds)
            found: dict[str, list[Cost]] = {}
            for process, part in parts.items():
                with contextlib.suppress(psutil.NoSuchProcess):
                    core = (sum(process.cpu_times()[:2]) - before[process]) / seconds
                    memory = process.memory_full_info()
                    cost = Cost(1, core, memory.uss / (1 << 20), memory.pss / (1 << 20))
                    found.setdefault(part, []).append(cost)
    return {part: Cost(*map(sum, zip(*costs, strict=True))) for part, costs in sorted(found.items())}


def _part(process: psutil.Process, trains: set[int]) -> str:
    if process.pid in trains:
        return "ranks (the user's)"
    line = " ".join(process.cmdline())
    if MEASURED.name in line and "aegis_elastic.launch.run" not in line:
        return "warm spares"
    return next((part for text, part in PARTS.items() if text in line), f"other: {line[:40]}")


def refill(ranks: int) -> tuple[float, float]:
    """Median seconds of a step that computes: while spares are made, and when they are there."""
    with tempfile.TemporaryDirectory(prefix="aegis-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        script = (str(MEASURED), name, "outside", "busy")
        with Job("aegis-run", Shape(1, ranks), folder, script, libraries=False) as job:
            job.add_node()
            wait(lambda: "step" in {stamp.what for stamp in read(folder)}, "training", READY_TIMEOUT_S)
            time.sleep(3.0)  # the time that the agent leaves to the ranks
            began = time.monotonic()
            wait(lambda: SPARES_READY in job.logs(), "warm spares", READY_TIMEOUT_S)
            made = time.monotonic()
            time.sleep(AFTER_S)
        steps = [tuple(map(float, line.split())) for line in (folder / "steps").read_text().splitlines()]
    during = [took for at, took in steps if began < at < made]
    after = [took for at, took in steps if at > made]
    if not during or not after:
        raise ValueError(
            f"{len(during)} steps while spares were made, {len(after)} after: nothing to compare"
        )
    return statistics.median(during), statistics.median(after)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the tables; 1 if the agent takes 1 % of a core or more."""
    parser = argparse.ArgumentParser(description="processor and memory of each part while training runs")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="writes all figures here")
    arguments = parser.parse_args(argv)
    adopt_orphans()
    load, minutes = os.getloadavg()[0], (arguments.seconds + 60) / 60
    print(f"about {minutes:.0f} minutes; load {load:.1f}", file=sys.stderr, flush=True)
    costs = steady(arguments.ranks, arguments.seconds)
    print(f"{arguments.ranks} ranks, {arguments.seconds:g} s, load {load:.1f}:")
    print(f"{'':30}{'processes':>10}{'% of a core':>13}{'own MiB':>10}{'with its share MiB':>20}")
    for part, cost in costs.items():
        memory = f"{cost.unique_mib:10.0f}{cost.shared_mib:20.0f}"
        print(f"{part:30}{cost.processes:10}{cost.core * 100:13.2f}{memory}")
    during, after = refill(arguments.ranks)
    print(
        f"a step that computes: {during * 1e3:.1f} ms while spares are made, {after * 1e3:.1f} ms afterwards"
    )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {part: cost._asdict() for part, cost in costs.items()}
        steps = {"during_s": during, "after_s": after}
        arguments.json.write_text(
            json.dumps({"load": load, "parts": figures, "steps": steps}, indent=2) + "\n"
        )
    return int(costs[PARTS["aegis_elastic.launch.run"]].core >= 0.01)


if __name__ == "__main__":
    sys.exit(main())
