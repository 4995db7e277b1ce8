"""The report at the end of a job, on one screen: outcome, failures with their root causes, recovery times.

Long lists are shortened to their first and last items, so a job of a thousand nodes fits on the same screen.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from aegis_elastic.core.accounts.report import CheckEntry, FailureEntry, Incarnation, Recovery, Report
from aegis_elastic.core.accounts.status_view import WorkerView
from aegis_elastic.core.diagnosis.attribution import signature_of
from aegis_elastic.launch.screens import formatting
from aegis_elastic.launch.screens.formatting import clean, clock, duration, fold, plural, ranges

# Together these keep the screen within 45 lines.
_WORKERS_MAX = 6
_INCARNATIONS_MAX = 5
# Fault classes that add nothing to the failure itself.
_PLAIN = ("", "process", "unknown")
_ROOTS_MAX = 3
_RECOVERIES_MAX = 4
_BAD_CHECKS_MAX = 3
_NODES_MAX = 3
_DOUBTS_MAX = 2

_OUTCOME_STYLE = {"succeeded": "bold green", "failed": "bold red"}
_SEGMENTS = ("detect", "stop", "diagnose", "decide", "rendezvous", "start", "first step", "total")


def render(report: Report, job: str = "") -> RenderableType:
    """The report as a rich renderable; `job` is named in the first line if given."""
    head = Text(f"aegis: {f'job {clean(job)} ' if job else ''}")
    head.append(clean(report.outcome), style=_OUTCOME_STYLE.get(report.outcome, "bold yellow"))
    if report.fail_reason:
        head.append(f": {clean(report.fail_reason)}")
    parts: list[RenderableType] = [head, Text(report.summary)]
    parts += [
        Text(f"DOUBTFUL SUCCESS: {clean(doubt)}", style="bold yellow")
        for doubt in _first_doubts(report.doubts)
    ]
    parts += _section("workers", _workers(report.workers, report.max_retry))
    parts += _section("incarnations", _incarnations(report.incarnations))
    parts += _section("failures", _failures(report.failures))
    parts += _section("recovery times", _recoveries(report.recoveries))
    parts += _section("checks", _checks(report.checks))
    nodes = [
        Text(f"  {clean(node.node_name)}: {node.kind}, {clean(node.reason)}")
        for node in report.error_nodes[:_NODES_MAX]
    ]
    if len(report.error_nodes) > _NODES_MAX:
        nodes.append(_more(len(report.error_nodes) - _NODES_MAX))
    parts += _section("nodes not to be used", nodes)
    return Group(*parts)


def text(report: Report, job: str = "") -> str:
    """The screen as plain text, as a log or a pipe gets it."""
    file = io.StringIO()
    show(report, job, formatting.console(file))
    return file.getvalue()


def show(report: Report, job: str = "", console: Console | None = None, file: IO[str] | None = None) -> None:
    """Print the screen on `console`, or on `file` (default stdout); plain where that is no terminal."""
    (console or formatting.console(file)).print(render(report, job))


def _section(title: str, body: Sequence[RenderableType]) -> list[RenderableType]:
    return [Text(title, style="bold"), *body] if body else []


def _first_doubts(texts: Sequence[str]) -> list[str]:
    more = len(texts) - _DOUBTS_MAX
    return [*texts[:_DOUBTS_MAX], *([f"and {more} more of this kind"] if more > 0 else [])]


def _more(count: int, what: str = "") -> Text:
    return Text(f"  ... {count} more{' ' if what else ''}{what}", style="dim")


def _grid(columns: int, right: Sequence[int] = ()) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for column in range(columns):
        table.add_column(justify="right" if column in right else "left", overflow="fold")
    return table


def _workers(workers: Sequence[WorkerView], max_retry: int) -> list[RenderableType]:
    shown = workers
    if len(workers) > _WORKERS_MAX:
        # Workers with failures come first; a last line counts those left out.
        shown = sorted(workers, key=lambda worker: (not worker.last_failed_reason, -worker.retries))
        shown = shown[:_WORKERS_MAX]
    table = _grid(4)
    for worker in shown:
        name = clean(worker.name, 30)
        if worker.node != worker.name:
            name += f" on {clean(worker.node, 30)}"
        last = f"last: {clean(worker.last_failed_reason, 60)}" if worker.last_failed_reason else ""
        retries = f"retries {worker.retries} of {max_retry}"
        table.add_row(Text(f"  {name}"), Text(f"ranks {ranges(worker.ranks)}"), Text(retries), Text(last))
    left_out = len(workers) - len(shown)
    return [table, *([_more(left_out)] if left_out else [])] if workers else []


def _incarnations(incarnations: Sequence[Incarnation]) -> list[RenderableType]:
    first, left_out, rest = fold(incarnations, _INCARNATIONS_MAX)
    out: list[RenderableType] = [_incarnation(incarnation) for incarnation in first]
    if left_out:
        out.append(_more(left_out))
    return [*out, *(_incarnation(incarnation) for incarnation in rest)]


def _incarnation(incarnation: Incarnation) -> Text:
    lasted = None if incarnation.ended_at is None else incarnation.ended_at - incarnation.started_at
    span = f"{clock(incarnation.started_at)} to {clock(incarnation.ended_at)} ({duration(lasted)})"
    return Text(f"  {incarnation.n}  {span}  {clean(incarnation.cause, 80)}")


def _failures(failures: Sequence[FailureEntry]) -> list[RenderableType]:
    groups: list[list[FailureEntry]] = []
    for failure in failures:
        if failure.role == "root" or not groups:
            groups.append([])
        groups[-1].append(failure)
    first, left_out, rest = fold(groups, _ROOTS_MAX)
    out = [line for group in first for line in _failure_group(group)]
    if left_out:
        out.append(_more(left_out, "root causes"))
    return [*out, *(line for group in rest for line in _failure_group(group))]


def _failure_group(group: Sequence[FailureEntry]) -> list[RenderableType]:
    """One root cause with the last output of its rank, and its consequences in one line."""
    out: list[RenderableType] = []
    consequences = list(group)
    if group[0].role == "root":
        root = consequences.pop(0)
        line = Text(f"  {clock(root.time)} ").append("root cause", style="bold red")
        line.append(f": {_process(root)}, {_cause(root)}")
        if root.fault_class:
            line.append(f" [class {root.fault_class}, level {root.level}]")
        signature = signature_of(root)
        if signature:
            line.append(f" [signature {signature.fault_class}]")
        out.append(line)
        if root.fault_class not in _PLAIN:
            out.append(Text(f"      {clean(root.reason, 300)}", style="bold"))
        last_output = _last_output(root)
        out += [Text(f"      | {last_output}", style="dim")] if last_output else []
    if consequences:
        out.append(Text(f"      consequences: {_consequences(consequences)}", style="dim"))
    return out


def _last_output(failure: FailureEntry) -> str:
    """The innermost frame of the traceback with its code, or else the last line that the rank printed."""
    lines = [line for line in map(clean, failure.last_lines) if line]
    frame = next((n for n in reversed(range(len(lines))) if lines[n].startswith('File "')), None)
    if frame is not None:
        return ": ".join(lines[frame : frame + 2])
    # The last line of a traceback is the exception, which is shown above already.
    return next((line for line in reversed(lines) if line != clean(failure.exception)), "")


def _process(failure: FailureEntry) -> str:
    where = clean(failure.worker, 30)
    return where if failure.rank is None else f"rank {failure.rank} of {where}"


def _cause(failure: FailureEntry) -> str:
    if failure.rank is None:
        return clean(failure.reason, 100)
    how = failure.signal or f"exit code {failure.exit_code}"
    return f"{how}, {clean(failure.exception, 120)}" if failure.exception else how


def _consequences(consequences: Sequence[FailureEntry]) -> str:
    """What came after the root cause: `3 ranks (SIGTERM 2, exit code 1 1), agents lost: w2`."""
    ranks = [failure for failure in consequences if failure.rank is not None]
    kinds = Counter(failure.signal or f"exit code {failure.exit_code}" for failure in ranks)
    agents = [failure.worker for failure in consequences if failure.rank is None]
    parts = []
    if ranks:
        how = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common(4))
        parts.append(f"{plural(len(ranks), 'rank')} ({how})")
    if agents:
        named = ", ".join(clean(name, 20) for name in agents[:4]) + (" ..." if len(agents) > 4 else "")
        parts.append(f"{plural(len(agents), 'agent')} lost ({named})")
    return ", ".join(parts)


def _recoveries(recoveries: Sequence[Recovery]) -> list[RenderableType]:
    if not recoveries:
        return []
    table = _grid(len(_SEGMENTS) + 1, right=range(1, len(_SEGMENTS) + 1))
    table.add_row("  ", *(Text(name, style="dim") for name in _SEGMENTS))
    numbered = list(enumerate(recoveries, start=1))
    first, left_out, rest = fold(numbered, _RECOVERIES_MAX)
    for number, recovery in first:
        table.add_row(Text(f"  {number}"), *_segments(recovery))
    if left_out:
        table.add_row(Text("  ...", style="dim"))
    for number, recovery in rest:
        table.add_row(Text(f"  {number}"), *_segments(recovery))
    return [table]


def _segments(recovery: Recovery) -> list[Text]:
    values = (
        recovery.detect_s, recovery.stop_s, recovery.diagnose_s, recovery.decide_s,
        recovery.rendezvous_s, recovery.start_s, recovery.first_step_s, recovery.total_s,
    )  # fmt: skip
    return [Text(duration(value)) for value in values]


def _checks(checks: Sequence[CheckEntry]) -> list[RenderableType]:
    if not checks:
        return []
    counts = {
        phase: Counter(check.passed for check in checks if check.phase == phase)
        for phase in dict.fromkeys(check.phase for check in checks)
    }
    counted = "; ".join(
        f"{phase}: {count[True]} passed, {count[False]} failed" for phase, count in counts.items()
    )
    failed = [check for check in checks if not check.passed]
    out: list[RenderableType] = [Text(f"  {counted}")]
    out += [
        Text(f"  {check.check_type} of {clean(check.worker, 30)}: {clean(check.result, 100)}", style="red")
        for check in failed[:_BAD_CHECKS_MAX]
    ]
    if len(failed) > _BAD_CHECKS_MAX:
        out.append(_more(len(failed) - _BAD_CHECKS_MAX, "failed"))
    return out
