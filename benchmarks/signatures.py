"""How fast logs are read by signature, on one core, and how right the table is.

    python -m benchmarks.signatures --lines 200000 --json build/signatures.json

The measured log is mixed as a training's is: progress, losses, NCCL's INFO at start-up, warnings, traceback
frames, and faults among them. Its lines come from `tests/core/signature_lines.jsonl`, with new numbers in
each, so that nothing can be remembered. The real lines (`--real`) are judged if they are there.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from aegis_elastic.core.signatures import UNKNOWN, Signatures, load

ROOT = Path(__file__).resolve().parent.parent
KINDS = ROOT / "tests" / "core" / "signature_lines.jsonl"
REAL = ROOT.parent / "shared" / "data" / "log_lines.jsonl"
FAULT_SHARES = (0.0, 0.01, 0.1, 1.0)
AIM_PER_S = 100_000


def rows_of(file: Path) -> list[dict[str, str | None]]:
    """The objects of a JSON-lines file."""
    return [json.loads(row) for row in file.read_text(encoding="utf-8").splitlines()]


def mixed(count: int, fault_share: float, seed: int = 1) -> list[str]:
    """A log of so many lines, that share of them faults, all with numbers of their own."""
    draw = random.Random(seed)
    healthy: list[str] = []
    faults: list[str] = []
    for row in rows_of(KINDS):
        (faults if row["fault_class"] else healthy).append(str(row["line"]))
    number = re.compile(r"(?<![\w\[])[1-9]\d*(?!\w)")  # codes change too: this measures speed, not truth
    lines = [draw.choice(faults if draw.random() < fault_share else healthy) for _ in range(count)]
    return [number.sub(lambda _: str(draw.randrange(1, 9_999)), line) for line in lines]


def lines_per_s(table: Signatures, lines: Sequence[str], runs: int) -> float:
    """The median of some runs, in lines per second of this process's CPU time."""
    for line in lines[:2_000]:  # expressions compile when they are first needed
        table.classify(line)
    speeds = []
    for _ in range(runs):
        start = time.process_time()
        for line in lines:
            table.classify(line)
        speeds.append(len(lines) / (time.process_time() - start))
    return statistics.median(speeds)


def judged(table: Signatures, file: Path) -> dict[str, str]:
    """`right of all` for every field of the real lines."""
    rows = rows_of(file)
    names = {
        "action": "suggested_action",
        "fault_class": "fault_class",
        "component": "component",
        "role": "role",
    }
    right = dict.fromkeys(names, 0)
    for row in rows:
        found = table.classify(str(row["line"]))
        for ours, theirs in names.items():
            right[ours] += getattr(found, ours, UNKNOWN) == row[theirs]
    return {name: f"{count} of {len(rows)}" for name, count in right.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="How fast logs are read by signature, and how right.")
    parser.add_argument("--lines", type=int, default=100_000, help="lines of each measured log")
    parser.add_argument("--runs", type=int, default=3, help="runs; the median counts")
    parser.add_argument("--real", type=Path, default=REAL, help="labelled real lines")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    start = time.process_time()
    table = load()
    figures: dict[str, object] = {"load_s": round(time.process_time() - start, 4), "rules": len(table.rules)}
    for share in FAULT_SHARES:
        speed = lines_per_s(table, mixed(args.lines, share), args.runs)
        figures[f"lines_per_s_with_{share:g}_faults"] = round(speed)
        print(f"{share:>6.0%} faults: {speed:>9,.0f} lines/s (aim {AIM_PER_S:,} on a mostly healthy log)")
    if args.real.is_file():
        figures["real"] = judged(table, args.real)
        print(f"real lines: {figures['real']}")
    print(f"{figures['rules']} rules, loaded in {figures['load_s']} s")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
