"""`aegisctl check|bootcheck|burn --job NAME`: the same on every node of a job, through its master.

Exit codes: 0 nothing found, 1 a finding or a node that doesn't answer, 2 wrong use, 3 no such job.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
from rich.console import Console

from aegis_elastic.checks.contract.environments import summarise
from aegis_elastic.control.host.errors import AdminRefused, NoSuchJob, UsageError
from aegis_elastic.core.protocol import operator_checks
from aegis_elastic.core.protocol.operator_checks import NodeAnswer, Progress
from aegis_elastic.launch.ctl import admin_client
from aegis_elastic.launch.ctl.admin_client import Admin
from aegis_elastic.launch.screens.formatting import clean
from aegis_elastic.launch.screens.node_checks import Bars, table

FindJob = Callable[[argparse.Namespace], "Admin | None"]
# The master holds an answer for a few seconds when there is nothing new.
ANSWER_S = 15.0
_FLAG = "--while-training"


def add_flag(command: argparse.ArgumentParser) -> None:
    """Declare what only a look at a whole job needs."""
    command.add_argument(
        _FLAG, action="store_true", help="with --job: also what would disturb the ranks that train"
    )


def wanted(args: argparse.Namespace) -> bool:
    """Whether the command line names a job; a variable alone doesn't make a check of this node one of all."""
    return getattr(args, "job", None) is not None or getattr(args, "run_dir", None) is not None


def look(find: FindJob, args: argparse.Namespace, console: Console, asked: Mapping[str, Any]) -> int:
    """Ask the job's master for this look, show how it goes and what came out; returns the exit code."""
    way = find(args)
    if way is None:
        raise NoSuchJob("cannot look at this job's nodes: the job has ended")
    try:
        begun = _ask(way, "look", {**asked, "while_training": args.while_training})
    except AdminRefused as error:
        raise UsageError(str(error)) from error
    progress = _follow(way, begun, float(asked.get("burn_s") or begun.limit_s), args.json)
    if args.json:
        print(_as_json(progress))
    else:
        _show(progress, console)
    return 0 if all(map(_passed, progress.nodes)) else 1


def without_disturbing(checks: Sequence[str], args: argparse.Namespace) -> tuple[str, ...]:
    """Of these checks those that a training doesn't feel, if the command line doesn't say otherwise."""
    if args.while_training:
        return tuple(checks)
    left = tuple(check for check in checks if check in operator_checks.HARMLESS)
    out = [check for check in checks if check not in operator_checks.HARMLESS]
    if out:
        said = f"without {', '.join(out)}, which would disturb a training; {_FLAG} runs it all the same"
        print(f"aegisctl: {said}", file=sys.stderr)
    return left


def _ask(way: Admin, op: str, args: Mapping[str, Any]) -> Progress:
    return msgspec.convert(admin_client.call(way, op, args, timeout_s=ANSWER_S), Progress)


def _follow(way: Admin, begun: Progress, usual_s: float, quiet: bool) -> Progress:
    """Wait until it is over; bars meanwhile where people look on, full after `usual_s`."""
    progress, seen = begun, set[str]()
    with ExitStack() as undo:
        bars = undo.enter_context(Bars(quiet))
        for node in progress.nodes:
            bars.add(node.worker, usual_s)
        while not progress.over:
            progress = _ask(way, "looked", {"look": begun.look})
            for node in progress.nodes:
                _draw(bars, node, usual_s, seen)
    return progress


def _draw(bars: Bars, node: NodeAnswer, usual_s: float, seen: set[str]) -> None:
    answer = node.answer
    if answer is None:
        return
    for device in answer.devices:
        bars.show(f"{node.worker} {device.device}", usual_s, device.elapsed_s, clean(device.says, 80))
    took_s = sum(result.duration_s for result in answer.results)
    names = ", ".join(result.check_type for result in answer.results)
    bars.show(node.worker, usual_s, took_s, clean(names, 60))
    if answer.done and node.worker not in seen:
        seen.add(node.worker)
        bars.end(node.worker, _passed(node))


def _passed(node: NodeAnswer) -> bool:
    answer = node.answer
    return (
        answer is not None
        and answer.done
        and not answer.why
        and bool(answer.results)
        and all(result.passed for result in answer.results)
    )


def _show(progress: Progress, console: Console) -> None:
    environments: dict[str, Mapping[str, Any]] = {}
    for node in progress.nodes:
        answer = node.answer
        if answer is not None and answer.results:
            console.print(table(f"{clean(node.worker)} on {clean(node.node)}", answer.results))
            for result in answer.results:
                if result.check_type == "env":
                    environments[node.worker] = result.details
        if not (answer is not None and answer.done):
            console.print(
                f"{clean(node.worker)} on {clean(node.node)}: NO ANSWER in {progress.limit_s:.0f} s"
            )
        elif answer.why:
            console.print(f"{clean(node.worker)} on {clean(node.node)}: {clean(answer.why, 300)}")
    if environments:
        console.print(clean(summarise(environments)[0], 1000))


def _as_json(progress: Progress) -> str:
    """{"pass", "nodes": [{"worker", "node", "pass", "done", "why", "results"}]}."""
    nodes = [
        {
            "worker": node.worker,
            "node": node.node,
            "pass": _passed(node),
            "done": node.answer is not None and node.answer.done,
            "why": node.answer.why if node.answer is not None else "no answer",
            "results": node.answer.results if node.answer is not None else (),
        }
        for node in progress.nodes
    ]
    said = {"pass": all(map(_passed, progress.nodes)), "nodes": nodes}
    return msgspec.json.format(msgspec.json.encode(said), indent=2).decode()
