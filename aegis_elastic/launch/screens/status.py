"""The screens of `aegisctl status` and `aegisctl log`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from aegis_elastic.core.accounts.journal import Line, Walked
from aegis_elastic.core.events import Dismiss, Lost, Page, RecordErrorNode, Renew
from aegis_elastic.core.model import Phase
from aegis_elastic.launch.screens.formatting import clean, clock, fold, plural, ranges

_WORKERS_MAX = 24
_NODES_MAX = 6

PHASES = {
    Phase.PENDING: ("yellow", "waiting until every worker is there"),
    Phase.BOOT_CHECKING: ("cyan", "checking the machines before training"),
    Phase.RUN_COMMAND: ("green", "training"),
    Phase.RESTARTING: ("yellow", "waiting for lost workers to come back or be replaced"),
    Phase.TROUBLESHOOTING: ("yellow", "all ranks are stopped; looking for the fault"),
    Phase.SUCCEED: ("green", "the training is done"),
    Phase.FAILED: ("red", "the job is closed"),
}


def phase_style(phase: object) -> str:
    """The style of a phase; "" for an unknown one."""
    return next((style for known, (style, _) in PHASES.items() if known.value == phase), "")


def render_status(view: Mapping[str, Any], last: Line | None = None) -> RenderableType:
    """The view of `aegisctl status --json` as a screen; `last`: the newest line of the journal."""
    phase = view.get("phase")
    meaning = next((text for known, (_, text) in PHASES.items() if known.value == phase), "")
    head = Text(f"job {clean(view.get('job'))}", style="bold")
    head.append(f"  ({clean(view.get('namespace'))}, generation {view.get('generation')})", style="dim")
    now = Text(f"{phase}", style=f"bold {phase_style(phase)}".strip()).append(
        f": {meaning}", style="not bold"
    )
    parts: list[RenderableType] = [head, now]
    if last is not None:
        parts.append(Text(f"because {clean(last.reason)} ({clock(last.t)})"))
    used, most = view.get("recoverCount", 0), view.get("maxRetry", 0)
    parts.append(
        Text(f"at most {plural(most, 'restart')}, {used} used; incarnation {view.get('incarnation')}")
    )
    parts.append(_workers(view.get("workers", ())))
    nodes = view.get("errorNodes", ())
    for node in nodes[:_NODES_MAX]:
        where, why = clean(node.get("nodeName")), clean(node.get("reason"))
        parts.append(Text(f"not to be used: {where} ({node.get('kind')}: {why})", style="red"))
    if len(nodes) > _NODES_MAX:
        parts.append(Text(f"... and {len(nodes) - _NODES_MAX} more nodes not to be used", style="red"))
    plane = dict(view.get("plane") or {})
    parts += [_mark(mark) for mark in plane.pop("marks", ())[:_NODES_MAX]]
    if held := plane.pop("held", ""):
        parts.append(Text(f"recovery waits: {clean(held)}", style="yellow"))
    if plane:
        parts.append(Text("plane: " + ", ".join(f"{clean(k)} {clean(v)}" for k, v in plane.items()), "dim"))
    return Group(*parts)


def _mark(mark: Mapping[str, Any]) -> Text:
    where, verdict, why = clean(mark.get("nodeName")), clean(mark.get("verdict")), clean(mark.get("reason"))
    allowed = ", leaves at the next checkpoint" if mark.get("evict") else ""
    return Text(f"marked: {where} is {verdict} ({why}){allowed}", style="yellow")


def _workers(workers: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("worker", "node", "ranks", "phase", "retries", "last failure"):
        table.add_column(column, justify="right" if column == "retries" else "left", overflow="fold")
    first, left_out, rest = fold(workers, _WORKERS_MAX)
    for worker in first:
        table.add_row(*_worker_row(worker))
    if left_out:
        table.add_row(Text(f"... {left_out} more", style="dim"))
    for worker in rest:
        table.add_row(*_worker_row(worker))
    return table


def _worker_row(worker: Mapping[str, Any]) -> tuple[Text, ...]:
    phase = str(worker.get("innerPhase"))
    return (
        Text(clean(worker.get("name"), 40)),
        Text(clean(worker.get("node"), 40)),
        Text(ranges(worker.get("ranks", ()))),
        Text(phase + (" (done)" if worker.get("finished") else ""), style=phase_style(phase)),
        Text(str(worker.get("retries", 0))),
        Text(clean(worker.get("lastFailedReason"), 60) or "-"),
    )


def render_line(walked: Walked) -> Text:
    """One journal line: time, phase after it, event, reason, and effects."""
    line = walked.line
    phase = walked.made.status.phase
    changed = walked.before is None or walked.before.phase is not phase
    text = Text(clock(line.t, fine=True) + "  ")
    text.append(f"{phase.value:<15}", style=("bold " if changed else "") + phase_style(phase.value))
    text.append(f"  {_event(line):<26}  ", style="dim")
    text.append(clean(line.reason))
    done = [described for effect in line.effects if (described := _effect(effect))]
    if done:
        text.append(f"  [{'; '.join(done)}]", style="dim")
    return text


def _event(line: Line) -> str:
    event = line.event
    name = str(event.__struct_config__.tag)
    if isinstance(event, Lost):
        return clean(f"{name} {', '.join(worker for worker, _ in event.agents)}", 26)
    worker = getattr(event, "worker", None)
    if worker is not None:
        return clean(f"{name} {worker}", 26)
    return name if line.transition in ("", name) else clean(f"{name}: {line.transition}", 26)


def _effect(effect: object) -> str:
    if isinstance(effect, RecordErrorNode):
        return f"node {clean(effect.node_name)} recorded as {effect.kind}"
    if isinstance(effect, Dismiss):
        return f"{clean(effect.worker)} told to leave"
    if isinstance(effect, Renew):
        return f"{clean(effect.worker)} told to execute itself again"
    if isinstance(effect, Page):
        return f"a human is called: {clean(effect.key)}"
    return ""
