"""`python -m proof`: the proof in some minutes, one table, exit code 1 on any miss.

`--quick` is a sample for the tests (under a minute), `--full` adds the largest configs and every mutant.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from proof import jobs, worlds
from proof.jobs import Job, Row
from proof.mutation import mutants
from proof.mutation.survivors import ACCEPTED
from proof.tla import models, tlc
from proof.tla.models import Model

_EVERYWHERE = ("RecoveryEnds", "JobEnds", "NoLostFailure", "QuitIsObeyed", "ExceededEnds", "BootEnds")
_ABSENT = ("RecoveryEnds", "JobEnds", "MissingAreNotWaitedFor", "ExceededEnds")
# The default hunts every sixth mutant, in the order of the sources, so that every function has its share.
_SAMPLE = {"quick": 40, "default": 6, "full": 1}
_BATCH = 8
_KILLED_LEAST = 0.95
MODES = ("quick", "default", "full")


def plan(mode: str) -> list[Job]:
    """The jobs of a mode, the heavy ones first so that both cores are busy to the end."""
    steps = [worlds.phases(2, 1), *worlds.SMALL[:20]]
    if mode != "quick":
        steps = [worlds.phases(3, 2), worlds.phases(2, 0), *worlds.ELASTIC, *worlds.SMALL]
    planned = [Job(jobs.safety, (world,), 30) for world in steps]
    planned += _liveness(mode) + _models(mode)
    planned.append(Job(jobs.relation, (worlds.phases(2, 1 if mode != "quick" else 0, 1),), 40))
    sizes = (2, 3) if mode == "quick" else (2, 3, 8, 16, 64)
    planned += [Job(jobs.induct, (workers,), workers) for workers in sizes]
    chosen = tuple(mutants.mutants())[:: _SAMPLE[mode]]
    planned += [Job(jobs.hunting, (chosen[i : i + _BATCH],), 20) for i in range(0, len(chosen), _BATCH)]
    return sorted(planned, key=lambda job: -job.weight)


def _liveness(mode: str) -> list[Job]:
    planned = [Job(jobs.promises, (worlds.phases(2, 1), _EVERYWHERE, False), 5)]
    if mode == "quick":
        return planned
    elastic = {world.name: world for world in worlds.ELASTIC}
    planned.append(Job(jobs.promises, (worlds.phases(3, 1), _EVERYWHERE, False), 40))
    planned += [
        Job(jobs.promises, (elastic[name], _ABSENT, True), 30)
        for name in ("shrinking", "independent", "forming")
    ]
    return planned


def _models(mode: str) -> list[Job]:
    known = (*models.PHASES, *models.MESSAGES, *models.NODES)
    if mode == "quick":
        return [
            Job(jobs.conformance, (2, 1, 2), 10),
            *(Job(jobs.model, (one,), 5) for one in _first_defects(known)),
        ]
    chosen = [one for one in known if mode == "full" or not one.slow]
    size = [Job(jobs.conformance, (3, 2, 2), 90)]
    size += [Job(jobs.conformance, (2, 0, 1, (name,)), 10) for name in worlds.RARE]
    size += [Job(jobs.conformance, (4, 3, 2), 900)] if mode == "full" else []
    checks = [
        Job(jobs.model, (one,), 300 if one.slow else 60 if one.kind != "defect" else 10) for one in chosen
    ]
    return [*size, *checks, *(Job(jobs.translation, (name,), 3) for name in models.WITNESSES)]


def _first_defects(known: Iterable[Model]) -> Iterator[Model]:
    """One config that must be violated of each module: the cheapest proof that TLC looks at all."""
    seen: set[str] = set()
    for one in known:
        if one.kind == "defect" and one.module not in seen:
            seen.add(one.module)
            yield one


def run(planned: list[Job], processes: int) -> Iterator[Row]:
    """Do the jobs side by side, rows as they come."""
    with ProcessPoolExecutor(processes, initializer=tlc.die_with_parent) as pool:
        for done in as_completed([pool.submit(job.run) for job in planned]):
            yield done.result()


def summary(rows: list[Row], mode: str) -> list[Row]:
    """The rows that need all jobs: mutants, and the witnesses of the machine's worlds."""
    batches = [row for row in rows if row.kind == "batch"]
    out = [row for row in rows if row.kind != "batch"]
    hunted = len(tuple(mutants.mutants())[:: _SAMPLE[mode]])
    alive = frozenset[str]().union(*(row.seen for row in batches))
    unexplained = [name for name in sorted(alive) if name not in ACCEPTED]
    killed = hunted - len(alive)
    # A sample is too small for a rate; there, no survivor may be without a reason.
    ok = not unexplained and (mode == "quick" or killed >= _KILLED_LEAST * hunted)
    detail = "\n".join(f"survivor: {name}" for name in sorted(alive))
    result = f"{killed} of {hunted} killed, {len(alive)} survive, {len(unexplained)} without a reason"
    out.append(
        Row(
            "mutants of step",
            "mutation",
            hunted,
            0,
            sum(row.time_s for row in batches),
            result,
            ok,
            detail=detail,
        )
    )
    if mode != "quick":
        seen = frozenset[str]().union(*(row.seen for row in out if row.kind == "safety"))
        missing = sorted(jobs.expected_witnesses() - seen)
        expected = len(jobs.expected_witnesses())
        result = f"{expected - len(missing)} of {expected} reached"
        out.append(
            Row("step, all worlds", "witness", 0, 0, 0.0, result, not missing, detail="\n".join(missing))
        )
    return out


def table(rows: Iterable[Row]) -> str:
    """One line a row."""
    lines = [f"{'model':34} {'kind':11} {'states':>9} {'edges':>10} {'time s':>7}  result"]
    for row in rows:
        mark = "ok  " if row.ok else "MISS"
        states, edges = (f"{n:,}" if n else "-" for n in (row.states, row.edges))
        lines.append(
            f"{row.model:34} {row.kind:11} {states:>9} {edges:>10} {row.time_s:7.1f}  {mark} {row.result}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run a mode and print its table. 0 if everything holds, 1 on any miss."""
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__.splitlines()[0])
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--quick", action="store_const", const="quick", dest="mode", help="a sample, < 60 s")
    chosen.add_argument(
        "--full", action="store_const", const="full", dest="mode", help="the longest configs too"
    )
    parser.add_argument(
        "--processes", type=int, default=min(os.cpu_count() or 1, 2), help="jobs side by side"
    )
    parser.set_defaults(mode="default")
    options = parser.parse_args(argv)
    begun = time.monotonic()
    rows: list[Row] = []
    for row in run(plan(options.mode), options.processes):
        rows.append(row)
        if not row.ok or row.kind != "batch":
            sys.stderr.write(f"  {row.time_s:6.1f} s  {row.model}, {row.kind}: {row.result}\n")
    rows = sorted(summary(rows, options.mode), key=lambda row: (row.kind, row.model))
    sys.stdout.write(table(rows) + "\n")
    misses = [row for row in rows if not row.ok]
    for row in misses:
        sys.stdout.write(f"\n{row.model}, {row.kind}: {row.result}\n{row.detail}\n")
    for row in rows:
        if row.kind == "mutation" and row.ok and row.detail:
            sys.stdout.write(f"\n{row.detail}\n")
    took_s = time.monotonic() - begun
    sys.stdout.write(f"\nproof ({options.mode}): {len(rows)} rows, {len(misses)} missed, {took_s:.0f} s\n")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
