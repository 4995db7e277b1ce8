"""The rows of the recovery benchmark: which faults there are, how often each is measured, and the table."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from benchmarks import peers
from benchmarks.launchers import LAUNCHERS, Shape
from benchmarks.stamps import HEADINGS, Parts, median_of

SLOW_RUNS = 3


class Fault(NamedTuple):
    """`argument`: FAULT of the script. `slow`: measured less often. `nodes`: how many are needed."""

    argument: str
    workload: str = "plain"
    slow: bool = False
    nodes: int = 1
    what: str = ""


FAULTS = {
    "exit": Fault("exit", what="a rank ends with a code"),
    "exception": Fault("exception", what="a rank ends by an exception that nobody catches"),
    "kill": Fault("kill", what="a rank is killed"),
    "deaf": Fault("deaf", slow=True, what="as exit, and survivors ignore SIGTERM"),
    "stuck": Fault("stuck", slow=True, what="as exit, and survivors hang where their handlers can't run"),
    "again": Fault("again", slow=True, what="a second crash two seconds after the first"),
    "heavy": Fault("exit", "heavy", slow=True, what="as exit, with transformers, pandas and scikit-learn"),
    "loader": Fault("exit", "loader", slow=True, what="as exit, with DataLoader workers"),
    "trainer": Fault("exit", "trainer", slow=True, what="as exit, in a Trainer of transformers"),
    "freeze": Fault("outside", slow=True, what="a rank is stopped (SIGSTOP); hangs count after seconds here"),
    "lost": Fault("outside", slow=True, nodes=2, what="a node is lost, a spare waits"),
    "replaced": Fault("outside", slow=True, nodes=2, what="a node is lost, another comes 2 s later"),
}
CRASHES = tuple(name for name, fault in FAULTS.items() if not fault.slow)


class Row(NamedTuple):
    """One line of the table."""

    launcher: str
    fault: str
    shape: Shape

    def __str__(self) -> str:
        return " ".join(map(str, self))


def plan(
    launchers: Sequence[str], faults: Sequence[str], shapes: Sequence[Shape], runs: int
) -> dict[Row, int]:
    """How often each row is measured."""
    rows = [Row(*each) for each in itertools.product(launchers, faults, shapes)]
    return {
        row: min(runs, SLOW_RUNS) if FAULTS[row.fault].slow else runs
        for row in rows
        if row.shape.nodes >= FAULTS[row.fault].nodes
    }


def table(found: Mapping[Row, Sequence[Parts]], why: Mapping[Row, str], floors: Mapping[Shape, float]) -> str:
    """The ratios first, then one line for each launcher, fault and shape, in seconds, then what is
    missing.
    """
    medians = {row: median_of(recoveries) for row, recoveries in found.items() if recoveries}
    lines = [_ratios(row, medians, floors) for row in medians if LAUNCHERS[row.launcher].ours]
    lines.append(f"{'':28}" + "".join(f"{heading:>13}" for heading in HEADINGS))
    for row, parts in medians.items():
        lines.append(f"{row!s:28}" + "".join(f"{part:13.3f}" for part in parts))
    lines += [f"{f'floor {shape}':28}{'':78}{seconds:13.3f}" for shape, seconds in floors.items()]
    for row, recoveries in found.items():
        stalls = [f"{parts.total_s:.1f}" for parts in recoveries if parts.stalled]
        if stalls:
            lines.append(f"{row!s:28}not averaged in, a name look-up timed out: {', '.join(stalls)} s")
    lines += [f"{row!s:28}{reason}" for row, reason in why.items()]
    return "\n".join(lines)


def _ratios(row: Row, medians: Mapping[Row, Parts], floors: Mapping[Shape, float]) -> str:
    ours = medians[row].total_s
    parts = [f"{row}: {ours:.3f} s"]
    for name in LAUNCHERS:
        other = medians.get(Row(name, row.fault, row.shape))
        if other is not None and not LAUNCHERS[name].ours:
            parts.append(f"{other.total_s / ours:.1f} times as fast as {name}")
    if row.shape in floors:
        parts.append(f"{ours / floors[row.shape]:.1f} times the floor")
    return ", ".join(parts)


def as_json(
    found: Mapping[Row, Sequence[Parts]],
    why: Mapping[Row, str],
    floors: Mapping[Shape, Sequence[float]],
    quiet: bool,
) -> dict[str, Any]:
    """All figures, in seconds, and the machine that they were measured on."""

    def named(row: Row) -> dict[str, object]:
        place = {"nodes": row.shape.nodes, "ranks": row.shape.ranks}
        return {"launcher": row.launcher, "fault": row.fault, "what": FAULTS[row.fault].what, **place}

    rows = [
        {
            **named(row),
            "median": median_of(recoveries)._asdict(),
            "runs": [parts._asdict() for parts in recoveries],
        }
        for row, recoveries in found.items()
        if recoveries
    ]
    rows += [{**named(row), "why": reason} for row, reason in why.items()]
    lowest = [
        {
            "nodes": shape.nodes,
            "ranks": shape.ranks,
            "median": statistics.median(seconds),
            "runs": list(seconds),
        }
        for shape, seconds in floors.items()
    ]
    machine = {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "quiet": quiet,
        "python": platform.python_version(),
        "torch": version("torch"),
        "peers": {name: peers.version_of(name) for name in ("nvrx", "dlrover")},
    }
    return {"machine": machine, "rows": rows, "floors": lowest}
