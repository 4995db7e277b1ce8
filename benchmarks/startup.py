"""From the command to the first step of all ranks: aegis-run beside torchrun, in turns.

    python -m benchmarks.startup --runs 7            (about five minutes)

With `--aegis-bootcheck env` the aim is 1.1 times torchrun's time, with `full` (the default) 1.5 times; `off`
shows the cost of the control plane only. Of every run of ours the journal is read: it must have the
bootcheck's results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from aegis_elastic.core.accounts import journal
from benchmarks.launchers import Job, Shape, adopt_orphans, wait
from benchmarks.stamps import read

READY_TIMEOUT_S = 120.0
END_TIMEOUT_S = 90.0
RUN_S = 9.0
MEASURED = Path(__file__).with_name("measured.py")
# launcher, bootcheck, checks that the journal must have, the aim
KINDS = {
    "torchrun": ("torchrun", "", frozenset[str](), 1.0),
    "off": ("aegis-run", "off", frozenset[str](), 0.0),
    "env": ("aegis-run", "env", frozenset({"env"}), 1.1),
    "full": ("aegis-run", "full", frozenset({"env", "health"}), 1.5),
}


class Parts(NamedTuple):
    """When the last rank had got there, in seconds after the command."""

    script_s: float
    imported_s: float
    group_s: float
    step_s: float


def measure(kind: str, shape: Shape) -> Parts:
    """Starts the measured training once. ValueError if it doesn't train, or its journal lacks something."""
    launcher, bootcheck, checks, _ = KINDS[kind]
    with tempfile.TemporaryDirectory(prefix="aegis-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with Job(launcher, shape, folder, (str(MEASURED), name, "none"), libraries=False) as job:
            flags = ("--aegis-bootcheck", bootcheck) if bootcheck else ()
            began = time.monotonic()
            for _ in range(shape.nodes):
                job.add_node(*flags)
            try:
                wait(
                    lambda: _count(folder, "step") == shape.world, "first step of all ranks", READY_TIMEOUT_S
                )
                for node in job.nodes:
                    if node.wait(END_TIMEOUT_S):
                        raise ValueError(f"exit code {node.returncode}")
            except (ValueError, subprocess.TimeoutExpired) as error:
                tail = "\n".join(job.logs().splitlines()[-20:])
                raise ValueError(f"{kind} did not train: {error}\n{tail}") from error
            if checks:
                _check_journal(folder, checks, shape.nodes)
            stamps = read(folder)
    last = {what: max(s.at for s in stamps if s.what == what) - began for what in _WHAT}
    return Parts(*(round(last[what], 4) for what in _WHAT))


_WHAT = ("main", "imported", "group", "step")


def _count(folder: Path, what: str) -> int:
    return sum(stamp.what == what for stamp in read(folder))


def _check_journal(folder: Path, checks: frozenset[str], nodes: int) -> None:
    (file,) = (folder / "state").glob("aegis/*/*/*/journal.jsonl")
    replayed = journal.replay(journal.read(file))
    raw = [json.loads(line)["event"] for line in file.read_text().splitlines()]
    checked = [{check["checkType"] for check in event.get("checks") or ()} for event in raw]
    if not replayed.ok or sum(names >= checks for names in checked) != nodes:
        raise ValueError(f"the journal doesn't show {sorted(checks)}: {[sorted(c) for c in checked if c]}")


def table(found: Mapping[str, Sequence[Parts]]) -> str:
    """The ratios first, then one line for each kind."""
    medians = {kind: Parts(*map(statistics.median, zip(*runs, strict=True))) for kind, runs in found.items()}
    lines = []
    for kind, parts in medians.items():
        if kind != "torchrun" and "torchrun" in medians:
            ratio, aim = parts.step_s / medians["torchrun"].step_s, KINDS[kind][3]
            lines.append(f"{kind}: {ratio:.2f} times torchrun" + (f" (aim: {aim:g})" if aim else ""))
    lines.append(
        f"{'':10}" + "".join(f"{name:>14}" for name in ("script", "imported", "group", "first step"))
    )
    for kind, parts in medians.items():
        spread = f"   ({min(r.step_s for r in found[kind]):.2f} to {max(r.step_s for r in found[kind]):.2f})"
        lines.append(f"{kind:10}" + "".join(f"{part:14.2f}" for part in parts) + spread)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table."""
    parser = argparse.ArgumentParser(description="seconds from the command to all ranks' first step")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of " + ", ".join(KINDS))
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4, help="on each node")
    parser.add_argument("--json", type=Path, help="writes all figures here")
    arguments = parser.parse_args(argv)
    kinds = arguments.kinds.split(",")
    if unknown := sorted(set(kinds) - KINDS.keys()):
        parser.error(f"cannot measure {', '.join(unknown)}: choose of {', '.join(KINDS)}")
    adopt_orphans()
    load, minutes = os.getloadavg()[0], arguments.runs * len(kinds) * RUN_S / 60
    print(f"about {minutes:.0f} minutes; load {load:.1f}", file=sys.stderr, flush=True)
    found: dict[str, list[Parts]] = {kind: [] for kind in kinds}
    for run in range(1, arguments.runs + 1):
        for kind in kinds:
            try:
                found[kind].append(measure(kind, Shape(arguments.nodes, arguments.ranks)))
            except ValueError as error:
                print(error, file=sys.stderr)
                return 1
            step_s = found[kind][-1].step_s
            print(f"run {run}/{arguments.runs} {kind}: {step_s:.2f} s", file=sys.stderr, flush=True)
    shape = f"{arguments.nodes}x{arguments.ranks}"
    print(
        f"{shape}, medians of {arguments.runs}, seconds from the command to the last rank (load {load:.1f}):"
    )
    print(table(found))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        runs = {kind: [parts._asdict() for parts in recoveries] for kind, recoveries in found.items()}
        arguments.json.write_text(json.dumps({"shape": shape, "load": load, "runs": runs}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
