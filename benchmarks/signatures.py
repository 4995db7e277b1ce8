"""How fast lines of logs are classified by signature, on one core, and how often correctly.

    python -m benchmarks.signatures --lines 200000 --json build/signatures.json

The measured log is mixed as a training's is: progress, losses, NCCL's INFO at start-up, warnings, traceback
frames, and faults among them. Its lines come from `tests/core/diagnosis/signature_lines.jsonl`, with new
numbers in each, so that nothing can be cached. The real lines (`--real`) are judged if they are there: as
they are, with all their numbers changed, and with each source left out in turn.
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

from aegis_elastic.core.diagnosis.signatures import UNKNOWN, Signature, Signatures, load

ROOT = Path(__file__).resolve().parent.parent
KINDS = ROOT / "tests" / "core" / "diagnosis" / "signature_lines.jsonl"
REAL = ROOT.parent / "shared" / "data" / "log_lines.jsonl"
FAULT_SHARES = (0.0, 0.01, 0.1, 1.0)
AIM_PER_S = 100_000

# Of each line: itself, its action, its source.
Rows = Sequence[tuple[str, str, str]]

_CODES = re.compile(
    r"(?i)\bxid\b[^,]*?\): \d+|\bxid \d+|sxid[^,]*?: \d+|errno:? ?-?\d+|exit ?code ?:? ?\(?-?\d+|"
    r"code: -?\d+|signal \d+|(?:status=|error |state error: )\d+|error \(\d+\)|\b0x\d \(|"
    r"[a-z_]\d+|\d+[a-z_]|\d+ \(0x\d+\)"
)


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
    number = re.compile(r"(?<![\w\[])[1-9]\d*(?!\w)")  # codes change, too: this measures speed, not accuracy
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


def with_other_numbers(line: str, seed: int) -> str:
    """The line with the numbers changed that make no difference: addresses, ids, sizes, times.

    Codes stay: numbers that decide a class (Xids, errnos, signals, statuses), those inside a name
    (`mlx5`, `H100`) and a recovery action.
    """
    draw = random.Random(seed)
    parts, end = [], 0
    for match in _CODES.finditer(line):
        parts += [re.sub(r"\d", lambda _: draw.choice("123456789"), line[end : match.start()]), match.group()]
        end = match.end()
    return "".join([*parts, re.sub(r"\d", lambda _: draw.choice("123456789"), line[end:])])


def right_with_other_numbers(table: Signatures, rows: Rows, seed: int) -> int:
    """Of how many lines the action is still right."""
    return sum(_action(table.classify(with_other_numbers(line, seed))) == action for line, action, _ in rows)


def right_without_their_source(table: Signatures, rows: Rows) -> int:
    """Of how many lines the action is right when their source is left out: a rule then counts only if a line
    of another source needs it, too (a real line, or one of the kinds, which are from no source). A rule that
    only one line needs is a copy of that line.
    """
    elsewhere = [(str(row["line"]), "kinds") for row in rows_of(KINDS) if row["fault_class"]]
    users: dict[int, set[str]] = {}
    for line, source in [*((line, source) for line, _, source in rows), *elsewhere]:
        for number in range(len(table.rules)):
            if table.compiled(number).search(" ".join(line.split())):
                users.setdefault(number, set()).add(source)
    right = 0
    for line, action, source in rows:
        text = " ".join(line.split())
        left = (n for n in range(len(table.rules)) if users.get(n, set()) - {source})
        found = next((table.rules[n].signature for n in left if table.compiled(n).search(text)), None)
        right += _action(found) == action
    return right


def real_rows(file: Path) -> Rows:
    """(line, action, source) of each real line; the source is the repository or site that it is from."""
    return [
        (str(row["line"]), str(row["suggested_action"]), "/".join(str(row["source_url"]).split("/")[2:5]))
        for row in rows_of(file)
    ]


def _action(signature: Signature | None) -> str:
    return signature.action if signature else UNKNOWN


def _hard(table: Signatures, file: Path) -> dict[str, str]:
    """The two scores that memorised lines would fail."""
    rows = real_rows(file)
    changed = min(right_with_other_numbers(table, rows, seed) for seed in range(3))
    left_out = right_without_their_source(table, rows)
    return {
        "action_numbers_changed": f"{changed} of {len(rows)}",
        "action_each_source_left_out": f"{left_out} of {len(rows)} ({len({row[2] for row in rows})} sources)",
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description="How fast lines are classified by signature, and how often correctly."
    )
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
        scores = judged(table, args.real) | _hard(table, args.real)
        figures["real"] = scores
        for name, score in scores.items():
            print(f"real lines, {name.replace('_', ' ')} right: {score}")
    print(f"{figures['rules']} rules, loaded in {figures['load_s']} s")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
