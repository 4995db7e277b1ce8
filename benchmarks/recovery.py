"""From the death of a rank to the first step of *all* ranks again: aegis-run beside torchrun, in one run.

    python -m benchmarks.recovery --runs 7 --faults exit,deaf,again --shapes 1x4,2x2 --json FILE

Launchers take turns, so that a busy minute hits them alike; the table has the median of each part. torchrun
runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: by default it never recovers with gloo. The floor
(`benchmarks.floor`) is measured in the same turns. Of every run of ours the journal is read: a recovery whose
failure was not accounted for, or whose checks did not run, is no figure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from aegis_elastic.core import journal
from benchmarks import floor

RUN_TIMEOUT_S = 240.0
READY_TIMEOUT_S = 120.0
TERM_TIMEOUT_S = 45.0
SETTLED_S = 3.0
MEASURED = Path(__file__).with_name("measured.py")
CHEAP_CHECKS = {"io", "gpu", "runtime", "rdma", "hang"}

LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "aegis-run": ["-m", "aegis_elastic.launch.run"],
    "aegis-cold": ["-m", "aegis_elastic.launch.run", "--aegis-warm-spares", "off"],
}
FAULTS = ("exit", "exception", "kill", "deaf", "again")
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class Shape(NamedTuple):
    """Nodes (launchers, here all on this host) and ranks on each."""

    nodes: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks}"


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


def parts_of(stamps: Sequence[Stamp], ranks: int, life: int = 1) -> Parts:
    """Splits the recovery into `life` by the stamps of all ranks. ValueError when a rank never came back."""

    def times(life: int, what: str) -> list[float]:
        return [stamp.at for stamp in stamps if (stamp.life, stamp.what) == (life, what)]

    (fault,) = times(life - 1, "fault")
    second = {what: times(life, what) for what in ("start", "imported", "group", "step")}
    for what, found in second.items():
        if len(found) != ranks:
            raise ValueError(f"{len(found)} of {ranks} ranks reached {what!r} in life {life}")
    # A survivor that is killed outright leaves no stamp: detect and stop then count as restart.
    stopped = times(life - 1, "stopped") or [fault]
    # A process may have been held ready since before the fault: no part ends before the one ahead of it.
    ends = [fault, min(stopped), max(stopped)]
    for what in ("start", "imported", "group", "step"):
        ends.append(max(ends[-1], *second[what]))
    spans = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return Parts._make(round(span, 4) for span in [*spans, ends[-1] - fault])


def measure(launcher: str, fault: str, shape: Shape) -> Parts:
    """Runs the measured training once under `launcher`. Raises `RecoveryFailed`."""
    world = shape.nodes * shape.ranks
    with tempfile.TemporaryDirectory(prefix="aegis-bench-") as name:
        folder = Path(name)
        processes = _launch(launcher, fault, shape, folder)
        try:
            _strike_when_ready(launcher, world, folder)
            deadline = time.monotonic() + RUN_TIMEOUT_S
            codes = [process.wait(max(deadline - time.monotonic(), 0.1)) for process in processes]
            if any(codes):
                raise ValueError(f"exit codes {codes}")
            life = 2 if fault == "again" else 1
            if launcher.startswith("aegis"):
                _prove(folder, life)
            return parts_of(_stamps(folder), world, life)
        except (ValueError, subprocess.TimeoutExpired) as error:
            said = "\n".join(file.read_text() for file in sorted(folder.glob("*.log")))
            tail = "\n".join(said.splitlines()[-25:])
            raise RecoveryFailed(f"{launcher} did not recover: {error}\n{tail}") from error
        finally:
            for process in processes:
                _end(process)


def _launch(launcher: str, fault: str, shape: Shape, folder: Path) -> list[subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--nproc-per-node", str(shape.ranks), "--max-restarts", "3"]
    if shape.nodes == 1:
        flags.append("--standalone")
    else:
        flags += ["--nnodes", str(shape.nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        flags += ["--rdzv-id", "bench"]
    processes = []
    for node in range(shape.nodes):
        own = ["--aegis-worker-name", f"node{node}"] if launcher.startswith("aegis") else []
        with open(folder / f"launch{node}.log", "wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *LAUNCHERS[launcher], *flags, *own, str(MEASURED), str(folder), fault],
                    env=os.environ | ENVIRONMENT | {"XDG_STATE_HOME": str(folder / "state")},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return processes


def _strike_when_ready(launcher: str, world: int, folder: Path) -> None:
    """Let the training settle, as it has long before most faults; with warm spares, until they are there."""
    nodes = len(list(folder.glob("launch*.log")))

    def ready() -> bool:
        trains = sum(stamp.what == "step" for stamp in _stamps(folder)) == world
        said = "".join(file.read_text(errors="replace") for file in folder.glob("launch*.log"))
        return trains and (launcher != "aegis-run" or said.count("warm spares ready: ") >= nodes)

    deadline = time.monotonic() + READY_TIMEOUT_S
    while not ready():
        if time.monotonic() > deadline:
            raise ValueError(f"not ready for the fault after {READY_TIMEOUT_S:g} s")
        time.sleep(0.2)
    time.sleep(SETTLED_S)
    (folder / "fault").touch()


def _stamps(folder: Path) -> list[Stamp]:
    files = sorted(folder.glob("*.jsonl"))
    return [Stamp(**json.loads(line)) for file in files for line in file.read_text().splitlines()]


def _prove(folder: Path, failures: int) -> None:
    """The journal of the run replays, the failures were charged, and all cheap checks ran for each."""
    (file,) = (folder / "state").glob("aegis/*/*/*/journal.jsonl")
    lines = journal.read(file)
    replayed = journal.replay(lines)
    if not replayed.ok:
        raise ValueError(f"the journal does not replay: {replayed.first_difference}")
    charged = sum(line.transition == "failed" for line in lines)
    raw = [json.loads(line)["event"] for line in file.read_text().splitlines()]
    checked = [{check["checkType"] for check in event.get("checks") or ()} for event in raw]
    if charged != failures or sum(names >= CHEAP_CHECKS for names in checked) < failures:
        raise ValueError(f"{charged} of {failures} failures charged, checks {[c for c in checked if c]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher that hangs, the gentle way first: killed outright, torchrun leaves its ranks behind."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=TERM_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def median_of(recoveries: Sequence[Parts]) -> Parts:
    """The median of each part on its own (so the parts need not add up to the total)."""
    return Parts(*(statistics.median(column) for column in zip(*recoveries, strict=True)))


Row = tuple[str, str, Shape]  # launcher, fault, shape


def table(medians: dict[Row, Parts], floors: dict[Shape, float]) -> str:
    """The ratios first, then one line per launcher, fault and shape, in seconds."""
    lines = [sentence for row in medians for sentence in _ratios(row, medians, floors)]
    lines.append(f"{'':24}" + "".join(f"{heading:>13}" for heading in HEADINGS))
    for (launcher, fault, shape), parts in medians.items():
        lines.append(f"{f'{launcher} {fault} {shape}':24}" + "".join(f"{part:13.3f}" for part in parts))
    lines += [f"{f'floor {shape}':24}{'':78}{seconds:13.3f}" for shape, seconds in floors.items()]
    return "\n".join(lines)


def _ratios(row: Row, medians: dict[Row, Parts], floors: dict[Shape, float]) -> list[str]:
    launcher, fault, shape = row
    other = medians.get(("torchrun", fault, shape))
    if launcher == "torchrun":
        return []
    ours = medians[row].total_s
    said = [f"{launcher} {fault} {shape}: {ours:.3f} s"]
    if other is not None:
        said.append(f"{other.total_s / ours:.1f} times as fast as torchrun")
    if shape in floors:
        said.append(f"{ours / floors[shape]:.1f} times the floor")
    return [", ".join(said)]


def _shape(text: str) -> Shape:
    nodes, _, ranks = text.partition("x")
    try:
        return Shape(int(nodes), int(ranks))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODESxRANKS") from None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Which launchers, faults and shapes, how often, and where to keep the figures."""
    parser = argparse.ArgumentParser(description="seconds from a rank's death to all ranks' first step again")
    parser.add_argument("--runs", type=int, default=7, help="recoveries for each row (default 7)")
    parser.add_argument("--launchers", default="torchrun,aegis-run", help="of " + ", ".join(LAUNCHERS))
    parser.add_argument("--faults", default="exit", help="of " + ", ".join(FAULTS))
    parser.add_argument("--shapes", default="1x4,2x2", help="nodes x ranks on each (default 1x4,2x2)")
    parser.add_argument("--json", type=Path, help="writes all figures here")
    arguments = parser.parse_args(argv)
    arguments.launchers = arguments.launchers.split(",")
    arguments.faults = arguments.faults.split(",")
    for given, known in ((arguments.launchers, LAUNCHERS), (arguments.faults, FAULTS)):
        unknown = sorted(set(given) - set(known))
        if unknown:
            parser.error(f"cannot measure {', '.join(unknown)}: choose of {', '.join(known)}")
    try:
        arguments.shapes = [_shape(text) for text in arguments.shapes.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if arguments.runs < 1:
        parser.error(f"cannot take the median of {arguments.runs} runs: at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table; 1 if a launcher did not recover."""
    arguments = parse_arguments(argv)
    rows = list(itertools.product(arguments.launchers, arguments.faults, arguments.shapes))
    found: dict[Row, list[Parts]] = {row: [] for row in rows}
    floors: dict[Shape, list[float]] = {shape: [] for shape in arguments.shapes}
    for run in range(1, arguments.runs + 1):
        for shape in floors:
            floors[shape].append(floor.measure(shape.nodes * shape.ranks))
        for row in rows:
            try:
                found[row].append(measure(*row))
            except RecoveryFailed as error:
                print(error, file=sys.stderr)
                return 1
            total = found[row][-1].total_s
            what = " ".join(map(str, row))
            print(f"run {run}/{arguments.runs} {what}: {total:.3f} s", file=sys.stderr, flush=True)
    medians = {row: median_of(recoveries) for row, recoveries in found.items()}
    lowest = {shape: statistics.median(seconds) for shape, seconds in floors.items()}
    print(f"median of {arguments.runs}, seconds from the fault, until the last rank is through:")
    print(table(medians, lowest))
    if arguments.json is not None:
        figures = as_json(arguments.runs, found, floors)
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def as_json(runs: int, found: dict[Row, list[Parts]], floors: dict[Shape, list[float]]) -> dict[str, object]:
    """All figures, in seconds, with what they were taken on."""
    rows = [
        {
            "launcher": launcher,
            "fault": fault,
            "nodes": shape.nodes,
            "ranks": shape.ranks,
            "median": median_of(recoveries)._asdict(),
            "runs": [parts._asdict() for parts in recoveries],
        }
        for (launcher, fault, shape), recoveries in found.items()
    ]
    lowest = [
        {"nodes": shape.nodes, "ranks": shape.ranks, "median": statistics.median(seconds), "runs": seconds}
        for shape, seconds in floors.items()
    ]
    load = os.getloadavg()[0]
    machine = {
        "cpus": os.cpu_count(),
        "load": load,
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    return {"machine": machine, "runs": runs, "rows": rows, "floors": lowest}


if __name__ == "__main__":
    sys.exit(main())
