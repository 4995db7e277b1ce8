"""From the death of a rank to the first step of *all* ranks again: aegis-run beside torchrun, in one run.

    python -m benchmarks.recovery --runs 3 --json build/recovery.json

Launchers take turns, so that a busy minute hits them alike; the table has the median of each part. torchrun
runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: by default it never recovers with gloo.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

RANKS = 4
RUN_TIMEOUT_S = 180.0
TERM_TIMEOUT_S = 45.0
MEASURED = Path(__file__).with_name("measured.py")

LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "aegis-run": ["-m", "aegis_elastic.launch.run"],
}
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class Parts(NamedTuple):
    """Where the seconds of one recovery went; each part ends when the *last* rank is through."""

    detect_s: float
    stop_s: float
    restart_s: float
    import_s: float
    group_s: float
    step_s: float
    total_s: float


HEADINGS = ("detect", "stop", "restart", "start+import", "init_pg", "first step", "total")


class RecoveryFailed(RuntimeError):
    """A launcher didn't bring the training back; the message has the end of its output."""


class Stamp(NamedTuple):
    """One line of a rank's stamp file; `at` in monotonic seconds."""

    life: int
    what: str
    at: float


def parts_of(stamps: Sequence[Stamp], ranks: int) -> Parts:
    """Splits a recovery by the stamps of all ranks. Raises ValueError when a rank never came back."""

    def times(life: int, what: str) -> list[float]:
        return [stamp.at for stamp in stamps if (stamp.life, stamp.what) == (life, what)]

    (fault,) = times(0, "fault")
    second = {what: times(1, what) for what in ("start", "imported", "group", "step")}
    for what, found in second.items():
        if len(found) != ranks:
            raise ValueError(f"{len(found)} of {ranks} ranks reached {what!r} in their second life")
    # A survivor that is killed outright leaves no stamp: detect and stop then count as restart.
    stopped = times(0, "stopped") or [fault]
    # A process may have been held ready since before the fault: no part ends before the one ahead of it.
    ends = [fault, min(stopped), max(stopped)]
    for what in ("start", "imported", "group", "step"):
        ends.append(max(ends[-1], *second[what]))
    spans = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return Parts._make(round(span, 4) for span in [*spans, ends[-1] - fault])


def measure(launcher: str) -> Parts:
    """Runs the measured training once under `launcher`. Raises `RecoveryFailed`."""
    with tempfile.TemporaryDirectory(prefix="aegis-bench-") as folder:
        command = [sys.executable, *LAUNCHERS[launcher], "--standalone", "--nproc-per-node", str(RANKS)]
        command += ["--max-restarts", "3", str(MEASURED), folder]
        process = subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            output = f"no end after {RUN_TIMEOUT_S:g} s\n" + _end(process)
        stamps = [
            Stamp(**json.loads(line))
            for file in sorted(Path(folder).glob("*.jsonl"))
            for line in file.read_text().splitlines()
        ]
    try:
        if process.returncode != 0:
            raise ValueError(f"exit code {process.returncode}")
        return parts_of(stamps, RANKS)
    except ValueError as error:
        tail = "\n".join(output.splitlines()[-15:])
        raise RecoveryFailed(f"{launcher} did not recover: {error}\n{tail}") from error


def _end(process: subprocess.Popen[str]) -> str:
    """Ends a launcher that hangs, the gentle way first: killed outright, torchrun leaves its ranks behind."""
    process.terminate()
    try:
        output, _ = process.communicate(timeout=TERM_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return output


def median_of(recoveries: Sequence[Parts]) -> Parts:
    """The median of each part on its own (so the parts need not add up to the total)."""
    return Parts(*(statistics.median(column) for column in zip(*recoveries, strict=True)))


def table(medians: dict[str, Parts]) -> str:
    """One line per launcher, seconds; then how many times faster aegis-run was, if both ran."""
    lines = [f"{'':16}" + "".join(f"{heading:>13}" for heading in HEADINGS)]
    for launcher, parts in medians.items():
        lines.append(f"{f'{launcher} 1x{RANKS}':16}" + "".join(f"{part:13.2f}" for part in parts))
    if len(medians) == len(LAUNCHERS):
        lines.append(f"torchrun / aegis-run: {ratio(medians):.2f}")
    return "\n".join(lines)


def ratio(medians: dict[str, Parts]) -> float:
    """How many times longer torchrun takes."""
    return medians["torchrun"].total_s / medians["aegis-run"].total_s


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Which launchers, how often, and where to keep the figures."""
    parser = argparse.ArgumentParser(description="seconds from a rank's death to all ranks' first step again")
    parser.add_argument("--runs", type=int, default=3, help="recoveries per launcher (default 3)")
    parser.add_argument("--launchers", default=",".join(LAUNCHERS), help="of " + ", ".join(LAUNCHERS))
    parser.add_argument("--json", type=Path, help="writes all figures here")
    arguments = parser.parse_args(argv)
    arguments.launchers = arguments.launchers.split(",")
    unknown = sorted(set(arguments.launchers) - set(LAUNCHERS))
    if unknown:
        parser.error(f"cannot measure {', '.join(unknown)}: choose of {', '.join(LAUNCHERS)}")
    if arguments.runs < 1:
        parser.error(f"cannot take the median of {arguments.runs} runs: at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table; 1 if a launcher did not recover."""
    arguments = parse_arguments(argv)
    found: dict[str, list[Parts]] = {launcher: [] for launcher in arguments.launchers}
    for run in range(1, arguments.runs + 1):
        for launcher in arguments.launchers:
            try:
                found[launcher].append(measure(launcher))
            except RecoveryFailed as error:
                print(error, file=sys.stderr)
                return 1
            total = found[launcher][-1].total_s
            print(f"run {run}/{arguments.runs} {launcher}: {total:.2f} s", file=sys.stderr, flush=True)
    medians = {launcher: median_of(recoveries) for launcher, recoveries in found.items()}
    print(f"median of {arguments.runs}, seconds from the fault, until the last rank is through:")
    print(table(medians))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(arguments.runs, found, medians), indent=2) + "\n")
    return 0


def as_json(runs: int, found: dict[str, list[Parts]], medians: dict[str, Parts]) -> dict[str, object]:
    """All figures, in seconds, with what they were taken on."""
    rows = [
        {
            "launcher": launcher,
            "nodes": 1,
            "ranks": RANKS,
            "median": medians[launcher]._asdict(),
            "runs": [parts._asdict() for parts in found[launcher]],
        }
        for launcher in found
    ]
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": version("torch")}
    both = len(medians) == len(LAUNCHERS)
    return {"machine": machine, "runs": runs, "rows": rows, "ratio": ratio(medians) if both else None}


if __name__ == "__main__":
    sys.exit(main())
