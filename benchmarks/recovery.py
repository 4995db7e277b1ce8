"""From a fault to the first step of *all* ranks again: aegis-run beside its peers, in one run.

    python -m benchmarks.recovery                           the crash rows, as `make bench` (about an hour)
    python -m benchmarks.recovery --faults all --json FILE  every row, as `make bench-all` (about three hours)
    python -m benchmarks.recovery --runs 1 --launchers torchrun,aegis-run --faults exit --shapes 1x4

Launchers take turns, so that a busy minute affects them alike; the table has the median of each part, ratios
first. torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: by default it never recovers with gloo. Peers
are installed under `build/peers` when they are first needed; a row that can't be measured shows why. The
floor (`benchmarks.floor`) is measured in the same turns. Of every run of ours the journal is read: a recovery
whose failure was not counted, or whose checks did not run, doesn't count. Runs with a name look-up that timed
out are listed apart and not averaged in.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from aegis_elastic.core.accounts import journal
from benchmarks import floor, peers
from benchmarks.launchers import LAUNCHERS, LIBRARIES, NEVER, Job, Shape, adopt_orphans, wait
from benchmarks.rows import CRASHES, FAULTS, Row, as_json, plan, table
from benchmarks.stamps import Parts, Stamp, note, parts_of, read

BACK_TIMEOUT_S = 150.0
READY_TIMEOUT_S = 120.0
END_TIMEOUT_S = 90.0
SETTLED_S = 2.0
REPLACEMENT_S = 2.0
SPARE_S = 6.0
# Seconds instead of minutes: these waits are settings of the user, not part of a recovery.
SHORT_TIMEOUTS = (
    "--aegis-guard-persistence-s",
    "2",
    "--aegis-guard-heartbeat-stale-s",
    "5",
    "--aegis-hang-after-s",
    "5",
)
HERE = Path(__file__).parent
SCRIPTS = {"heavy": "measured_heavy.py", "trainer": "measured_trainer.py"}
CHEAP_CHECKS = {"io", "gpu", "runtime", "rdma", "hang"}
QUIET_LOAD = 1.0


class RecoveryFailed(RuntimeError):
    """A launcher didn't bring the training back; the message has the end of its output."""


# ------------------------------------------------------------ one run


def measure(row: Row) -> Parts:
    """Runs the measured training once. Raises RecoveryFailed, PeerMissing."""
    fault, shape = FAULTS[row.fault], row.shape
    with tempfile.TemporaryDirectory(prefix="aegis-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        script = (
            str(HERE / SCRIPTS.get(fault.workload, "measured.py")),
            name,
            fault.argument,
            fault.workload,
        )
        flags = SHORT_TIMEOUTS if row.fault == "freeze" else ()
        with Job(row.launcher, shape, folder, script, fault.workload in LIBRARIES) as job:
            try:
                for _ in range(shape.nodes):
                    job.add_node(*flags)
                _wait_ready(row, job, folder)
                _inject_fault(row, job, folder)
                parts = _wait_back(row, job, folder)
                if job.launcher.ours:
                    _wait_end(job)
                    _check_journal(folder, 2 if row.fault == "again" else 1, checks=fault.nodes == 1)
            except (ValueError, subprocess.TimeoutExpired) as error:
                tail = "\n".join(job.logs().splitlines()[-25:])
                raise RecoveryFailed(f"{row} did not recover: {error}\n{tail}") from error
    return parts


def _wait_ready(row: Row, job: Job, folder: Path) -> None:
    """Let the training settle, as it has before most faults; with warm spares, until they are ready."""

    def ready() -> bool:
        _check_all_alive(job)
        trains = sum(stamp.what == "step" for stamp in read(folder)) == row.shape.world
        return trains and (
            row.launcher != "aegis-run" or job.logs().count("warm spares ready: ") >= row.shape.nodes
        )

    wait(ready, "training that is ready for the fault", READY_TIMEOUT_S)
    time.sleep(SETTLED_S)


def _check_all_alive(job: Job, but: int = -1) -> None:
    codes = [node.poll() for number, node in enumerate(job.nodes) if number != but]
    if any(code is not None for code in codes):
        raise ValueError(f"launchers ended with {codes}")


def _inject_fault(row: Row, job: Job, folder: Path) -> None:
    if FAULTS[row.fault].argument != "outside":
        (folder / "fault").touch()
    elif row.fault == "freeze":
        (pid,) = {stamp.pid for stamp in read(folder) if stamp.rank == 1}
        note(folder, "fault", time.monotonic())
        os.kill(pid, signal.SIGSTOP)
    else:
        if row.fault == "lost":
            job.add_node()
            time.sleep(SPARE_S)
            _check_all_alive(job)
            if row.launcher == "aegis-run":
                held = row.shape.nodes + 1
                wait(lambda: job.logs().count("warm spares ready: ") >= held, "spare node", READY_TIMEOUT_S)
        note(folder, "fault", job.lose(row.shape.nodes - 1))
        if row.fault == "replaced":
            time.sleep(REPLACEMENT_S)
            job.add_node()


def _wait_back(row: Row, job: Job, folder: Path) -> Parts:
    found: list[Parts] = []
    faults = 2 if row.fault == "again" else 1
    lost = row.shape.nodes - 1 if FAULTS[row.fault].nodes > 1 else -1

    def recovered() -> bool:
        stamps: list[Stamp] = read(folder)
        try:
            if sum(stamp.what == "fault" for stamp in stamps) < faults:
                raise ValueError("the fault is still to come")
            found.append(parts_of(stamps, row.shape.world))
        except ValueError:
            _check_all_alive(job, but=lost)
            return False
        return True

    wait(recovered, "step of all ranks", BACK_TIMEOUT_S)
    return found[0]


def _wait_end(job: Job) -> None:
    """All launchers that were not lost end with 0."""
    until = time.monotonic() + END_TIMEOUT_S
    codes = [node.wait(max(until - time.monotonic(), 0.1)) for node in job.nodes]
    if any(code not in (0, -signal.SIGKILL) for code in codes):
        raise ValueError(f"exit codes {codes}")


def _check_journal(folder: Path, failures: int, checks: bool) -> None:
    """The journal of the run replays, the failures were charged, and all cheap checks ran for each."""
    (file,) = (folder / "state").glob("aegis/*/*/*/journal.jsonl")
    lines = journal.read(file)
    replayed = journal.replay(lines)
    if not replayed.ok:
        raise ValueError(f"the journal does not replay: {replayed.first_difference}")
    statuses = [walked.made.status for walked in journal.walk(lines)]
    charged = statuses[-1].recover_count
    raw = [json.loads(line)["event"] for line in file.read_text().splitlines()]
    checked = [{check["checkType"] for check in event.get("checks") or ()} for event in raw]
    ran = not checks or sum(names >= CHEAP_CHECKS for names in checked) >= failures
    if charged != failures or not ran:
        raise ValueError(f"{charged} of {failures} failures charged, checks {[c for c in checked if c]}")


# ------------------------------------------------------------ all rows


def why_not(row: Row) -> str:
    """Why this row can't be measured; "" if it can."""
    if (row.launcher, row.fault) in NEVER:
        return f"not run: {NEVER[row.launcher, row.fault]}"
    try:
        for peer in (
            LAUNCHERS[row.launcher].peer,
            "libraries" if FAULTS[row.fault].workload in LIBRARIES else "",
        ):
            if peer:
                peers.python_of(peer)
    except peers.PeerMissing as error:
        return str(error)
    return ""


def estimate_s(wanted: Mapping[Row, int]) -> float:
    """Roughly how long all of it takes, on two cores."""
    return sum(count * _run_s(row) for row, count in wanted.items())


def _run_s(row: Row) -> float:
    if LAUNCHERS[row.launcher].ours:
        return 22.0 + 10.0 * (row.fault in ("heavy", "trainer", "again", "lost", "replaced"))
    return (
        20.0
        + 35.0 * (row.fault in ("deaf", "stuck", "lost", "replaced"))
        + 20.0 * (row.launcher == "dlrover")
    )


def run_all(
    wanted: Mapping[Row, int], why: dict[Row, str]
) -> tuple[dict[Row, list[Parts]], dict[Shape, list[float]]]:
    """Measures; adds to `why` the rows that did not recover, and goes on with the others."""
    found: dict[Row, list[Parts]] = {row: [] for row in wanted if row not in why}
    floors: dict[Shape, list[float]] = {row.shape: [] for row in wanted}
    most = max(wanted.values())
    for run in range(1, most + 1):
        for shape, seconds in floors.items():
            seconds.append(floor.measure(shape.world))
        for row in [row for row in found if run <= wanted[row] and row not in why]:
            try:
                found[row].append(measure(row))
            except (RecoveryFailed, peers.PeerMissing) as error:
                why[row] = f"did not recover in run {run}: {str(error).splitlines()[0]}"
                print(error, file=sys.stderr)
                continue
            total = found[row][-1].total_s
            print(f"run {run}/{wanted[row]} {row}: {total:.3f} s", file=sys.stderr, flush=True)
    return found, floors


# ------------------------------------------------------------ the command


def _shape(text: str) -> Shape:
    nodes, _, ranks = text.partition("x")
    try:
        return Shape(int(nodes), int(ranks))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODESxRANKS") from None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Launchers, faults and shapes, number of runs, and the file for the figures."""
    parser = argparse.ArgumentParser(description="seconds from a fault to all ranks' first step again")
    parser.add_argument(
        "--runs", type=int, default=7, help="recoveries for each crash row; 3 at most for others"
    )
    known = "torchrun,ft_launcher,dlrover,aegis-run"
    parser.add_argument("--launchers", default=known, help="of " + ", ".join(LAUNCHERS))
    what = "; ".join(f"{name}: {fault.what}" for name, fault in FAULTS.items())
    parser.add_argument("--faults", default=",".join(CRASHES), help=f"all, or of these. {what}")
    parser.add_argument("--shapes", default="1x4,2x2", help="nodes x ranks on each (default 1x4,2x2)")
    parser.add_argument("--json", type=Path, help="writes all figures here")
    arguments = parser.parse_args(argv)
    arguments.launchers = arguments.launchers.split(",")
    arguments.faults = list(FAULTS) if arguments.faults == "all" else arguments.faults.split(",")
    for given, all_known in ((arguments.launchers, LAUNCHERS), (arguments.faults, FAULTS)):
        unknown = sorted(set(given) - set(all_known))
        if unknown:
            parser.error(f"cannot measure {', '.join(unknown)}: choose of {', '.join(all_known)}")
    try:
        arguments.shapes = [_shape(text) for text in arguments.shapes.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if arguments.runs < 1:
        parser.error(f"cannot take the median of {arguments.runs} runs: at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table; 1 if one of ours did not recover."""
    arguments = parse_arguments(argv)
    adopt_orphans()
    wanted = plan(arguments.launchers, arguments.faults, arguments.shapes, arguments.runs)
    if not wanted:
        print("nothing to measure: a lost node needs a shape of two", file=sys.stderr)
        return 2
    why = {row: reason for row in wanted if (reason := why_not(row))}
    runs = {row: count for row, count in wanted.items() if row not in why}
    load, minutes = os.getloadavg()[0], estimate_s(runs) / 60
    print(
        f"{sum(runs.values())} runs, about {minutes:.0f} minutes; load {load:.1f}",
        file=sys.stderr,
        flush=True,
    )
    found, floors = run_all(wanted, why)
    quiet = load < QUIET_LOAD
    lowest = {shape: statistics.median(seconds) for shape, seconds in floors.items()}
    noise = "" if quiet else f"; NOT a quiet machine (load {load:.1f} at the start)"
    print(f"medians, seconds from the fault until the last rank is through{noise}:")
    print(table(found, why, lowest))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(as_json(found, why, floors, quiet), indent=2) + "\n")
    return int(
        any(LAUNCHERS[row.launcher].ours and "did not recover" in reason for row, reason in why.items())
    )


if __name__ == "__main__":
    sys.exit(main())
