"""The cost for a rank of watching progress: calls of the hooks, reads of the flight recorder, steps, memory.

    python -m benchmarks.progress [--calls 1000000] [--pairs 6] [--steps 400] [--blocks 1600] [--step-ms 10]
                                  [--json FILE]

About five minutes. Calls: torch's hooks are called a million times around nothing, in a process that started
as ranks do. Whole runs: a training of two gloo ranks with steps of 10 ms runs with and without
`AEGIS_PROGRESS`, in pairs that alternate in order, so that a machine that warms up or is disturbed
favours neither. What is printed is the median of the pairs' differences (wall time, and CPU of the training
thread: less noisy on busy cores), with the interval that holds the true median at 95 % whatever the
distribution (order statistics), beside the cost of calls and reads by themselves.

Two processes differ by more than the hooks cost, whatever runs in them. So one more run goes on and off by
itself: blocks of 8 steps with the hooks in place and with them taken out take turns (A B B A ...), and each
is compared with its neighbour. There, means count: the flight recorder is read at a few steps only, at the
same ones on both ranks. Their interval is that of a mean, from the differences themselves. And in one run the
hooks are timed where they are called, with the caches as a step leaves them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aegis_elastic.worker.environment import prepare_env
from aegis_elastic.worker.slot import SIZE, VARIABLE

BLOCK_STEPS = 8
# Where the launcher makes the slots (agents/watch/shared_folder.py): a page of a file on a disk faults at
# times.
SHARED = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
ROOT = Path(__file__).resolve().parent.parent
_CALLS = """
import json, sys, time
import torch
from torch.optim import optimizer as module
(before,) = module._global_optimizer_pre_hooks.values()
(after,) = module._global_optimizer_post_hooks.values()
sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
clock, taken = time.perf_counter_ns, []
for _ in range(int(sys.argv[1])):
    begun = clock()
    before(sgd, (), {}); after(sgd, (), {})
    taken.append(clock() - begun)
empty = []
for _ in range(100000):
    begun = clock()
    empty.append(clock() - begun)
taken.sort(); empty.sort()
at = lambda values, share: values[int(len(values) * share)]
print(json.dumps({"median_ns": at(taken, 0.5), "p99_ns": at(taken, 0.99), "clock_ns": at(empty, 0.5)}))
"""
_TRAIN = """
import json, os, sys, time
import torch
import torch.distributed as dist
steps, step_s = int(sys.argv[1]), float(sys.argv[2]) / 1e3
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.randn(8, 32)
def step():
    sgd.zero_grad()
    model(data).sum().backward()
    sgd.step()
def rest():  # of a step: work that our hooks have no part in, equally long on both ranks
    until = time.perf_counter() + 0.9 * step_s
    while time.perf_counter() < until: pass
for _ in range(50): step(); rest()
def train(steps):
    taken, cpu_s = [], 0.0
    for _ in range(steps):
        begun, cpu = time.perf_counter(), time.thread_time()
        step()
        taken.append(time.perf_counter() - begun)
        cpu_s += time.thread_time() - cpu
        rest()
    return taken, cpu_s
from torch.optim import optimizer as module
places = module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks
spent = []
def timed(hook):
    def call(*args):
        begun = time.perf_counter_ns()
        hook(*args)
        spent.append(time.perf_counter_ns() - begun)
    return call
if sys.argv[4] == "timed":
    for place in places: place.update({key: timed(hook) for key, hook in place.items()})
hooks = [dict(place) for place in places]
blocks = []
for number in range(int(sys.argv[3])):
    watched = number % 4 in (0, 3)
    for place, kept in zip(places, hooks):
        place.clear()
        place.update(kept if watched else {})
    taken, cpu_s = train(steps)
    blocks.append([watched, sum(taken) / steps * 1e3, cpu_s / steps * 1e3])
taken, cpu_s = train(steps) if not blocks else ([0.0], 0.0)
looks = 0.0
if os.environ.get("AEGIS_PROGRESS"):
    from pathlib import Path
    from aegis_elastic.agents.watch.slots import SlotReader
    work = SlotReader(Path(os.environ["AEGIS_PROGRESS"]) / os.environ["RANK"]).own_work()
    looks = work.read_ns / 1e6 if work else 0.0
if dist.get_rank() == 0:
    means = {"step_ms": sum(taken) / steps * 1e3, "cpu_ms": cpu_s / steps * 1e3, "look_ms": looks}
    pairs = [sum(pair) / 1e3 for pair in zip(spent[::2], spent[1::2])]
    print(json.dumps({**means, "blocks": blocks, "hooks_us": pairs}))
dist.destroy_process_group()
"""


def _run(script: str, *args: str, rank: str = "0", **more: str) -> subprocess.Popen[str]:
    env = prepare_env({**os.environ, "PYTHONPATH": str(ROOT), "RANK": rank, "OMP_NUM_THREADS": "1", **more})
    argv = [sys.executable, "-c", script, *args]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"cannot measure: a rank ended with {process.returncode}")
    found: dict[str, Any] = json.loads(output) if output else {}
    return found


def measure_calls(calls: int) -> dict[str, float]:
    """One pair of hooks: median, 99th percentile, and what reading the clock takes (included in both)."""
    with tempfile.TemporaryDirectory(dir=SHARED) as folder:
        return _answer(_run(_CALLS, str(calls), **{VARIABLE: folder}))


def run_training(
    steps: int, step_ms: float, watched: bool, port: int, blocks: int = 0, timed: bool = False
) -> dict[str, Any]:
    """One whole run of two ranks; rank 0's mean step without the filling: wall and CPU, in ms. With `blocks`,
    so many times that many steps, each as (watched, wall, CPU). `timed`: what the hooks took at each step.
    """
    with tempfile.TemporaryDirectory(dir=SHARED) as folder:
        more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        if watched:
            more[VARIABLE] = folder
        args = (str(steps), str(step_ms), str(blocks), "timed" if timed else "")
        ranks = [_run(_TRAIN, *args, rank=rank, **more) for rank in "01"]
        answers = [_answer(process) for process in ranks]
        return answers[0]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and the bounds of its 95 % interval, by order statistics (sign test)."""
    ordered, n = sorted(values), len(values)
    low = 0
    while low < n // 2 and sum(math.comb(n, k) for k in range(low + 1)) / 2**n <= 0.025:
        low += 1
    low = max(low - 1, 0)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def of_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and the bounds of its 95 % interval (normal: there are dozens of values)."""
    mean = statistics.fmean(values)
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def _print_blocks(blocks: Sequence[tuple[bool, float, float]], step_ms: float) -> dict[str, Any]:
    """The cost of watching, from neighbouring blocks; prints it."""
    shares_by_kind = {}
    for place, about in ((1, "wall time"), (2, "CPU of the main thread")):
        shares = []
        for first, second in zip(blocks[::2], blocks[1::2], strict=True):
            watched, bare = (first, second) if first[0] else (second, first)
            shares.append(100.0 * (watched[place] - bare[place]) / step_ms)
        mean, low, high = of_mean(shares)
        shares_by_kind[about] = [mean, low, high]
        print(
            f"one run, on and off in blocks, {about}: {mean:+.3f} % of a {step_ms:g} ms step, "
            f"95 % interval {low:+.3f} to {high:+.3f} % ({len(shares)} pairs of {BLOCK_STEPS} steps; "
            f"median {statistics.median(shares):+.3f} %)"
        )
    return shares_by_kind


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description="The cost for a rank of watching progress.")
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=1600)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    results: dict[str, Any] = {"slot_bytes": SIZE, "calls": measure_calls(args.calls)}
    calls = results["calls"]
    print(
        f"hooks: median {calls['median_ns']:.0f} ns, p99 {calls['p99_ns']:.0f} ns a step over {args.calls} "
        f"steps (of which {calls['clock_ns']:.0f} ns are the clock's)"
    )
    print(f"slot: {SIZE} bytes of shared memory a rank")
    alternating = run_training(BLOCK_STEPS, args.step_ms, True, 29849, args.blocks // 2 * 2)
    results["blocks"] = alternating["blocks"]
    results["blocks_share_percent"] = _print_blocks(alternating["blocks"], args.step_ms)
    runs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number in range(args.pairs):
        ran = {}
        for watched in (False, True) if number % 2 else (True, False):
            ran[watched] = run_training(args.steps, args.step_ms, watched, 29850 + number % 50)
        runs.append((ran[False], ran[True]))
    results["runs"] = runs
    for kind, about in (("step_ms", "wall time"), ("cpu_ms", "CPU of the main thread")):
        shares = [100.0 * (after[kind] - before[kind]) / args.step_ms for before, after in runs]
        median, low, high = interval(shares)
        results[f"{kind}_share_percent"] = [median, low, high]
        print(
            f"whole runs, {about}: {median:+.2f} % of a {args.step_ms:g} ms step, "
            f"95 % interval {low:+.2f} to {high:+.2f} % ({args.pairs} pairs)"
        )
    timed = run_training(args.steps, args.step_ms, True, 29848, timed=True)["hooks_us"]
    mean, low, high = (value / args.step_ms / 10 for value in of_mean(timed))
    results["hooks_in_place_percent"] = [mean, low, high]
    print(
        f"hooks and reads where they are called: {mean:.3f} % of a {args.step_ms:g} ms step, 95 % interval "
        f"{low:.3f} to {high:.3f} % (median {statistics.median(timed):.1f} us, {len(timed)} steps)"
    )
    read_ms = statistics.median(after["look_ms"] for _, after in runs)
    print(
        f"by themselves: {calls['median_ns'] / args.step_ms / 1e4:.3f} % for the hooks, at most 0.33 % for "
        f"reads (one takes {read_ms:.1f} ms)"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
