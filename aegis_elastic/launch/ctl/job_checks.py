"""`aegisctl check|bootcheck|burn --job NAME`: operator checks on every node of a job, through its master.

Exit codes: 0 nothing found, 1 a finding or a node that doesn't answer, 2 wrong use, 3 no such job.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
from rich.console import Console

from aegis_elastic.checks.contract.environments import summarise
from aegis_elastic.control.host.errors import AdminRefused, NoSuchJob, UsageError
from aegis_elastic.core.protocol import operator_checks
from aegis_elastic.core.protocol.operator_checks import NodeAnswer, Progress
from aegis_elastic.launch.ctl import admin_client
from aegis_elastic.launch.ctl.admin_client import Admin, FindMaster
from aegis_elastic.launch.screens.formatting import clean
from aegis_elastic.launch.screens.node_checks import Bars, table

# The master holds its answer for a few seconds when there is nothing new.
ANSWER_S = 15.0
_FLAG = "--while-training"


def add_flag(command: argparse.ArgumentParser) -> None:
    """Declare the flag that only checks of a whole job have."""
    command.add_argument(
        _FLAG, action="store_true", help="with --job: also what would disturb the ranks that train"
    )


def names_a_job(args: argparse.Namespace) -> bool:
    """Whether the command line names a job. AEGIS_JOB alone doesn't: a check of this node stays one."""
    return getattr(args, "job", None) is not None or getattr(args, "run_dir", None) is not None


def run_on_job(
    find_master: FindMaster, args: argparse.Namespace, console: Console, request: Mapping[str, Any]
) -> int:
    """Have the job's master run this operator check, show its progress and results; returns the exit code."""
    admin = find_master(args)
    if admin is None:
        raise NoSuchJob("cannot check this job's nodes: the job has ended")
    try:
        first = _call(admin, "look", {**request, "while_training": args.while_training})
    except AdminRefused as error:
        raise UsageError(str(error)) from error
    progress = _follow(admin, first, float(request.get("burn_s") or first.limit_s), args.json)
    if args.json:
        print(_as_json(progress))
    else:
        _show(progress, console)
    return 0 if all(map(_passed, progress.nodes)) else 1


def only_harmless(checks: Sequence[str], args: argparse.Namespace) -> tuple[str, ...]:
    """Of these checks the ones that don't disturb training; all of them with --while-training."""
    if args.while_training:
        return tuple(checks)
    harmless = tuple(check for check in checks if check in operator_checks.HARMLESS)
    excluded = [check for check in checks if check not in operator_checks.HARMLESS]
    if excluded:
        notice = (
            f"without {', '.join(excluded)}, which would disturb a training; {_FLAG} runs it all the same"
        )
        print(f"aegisctl: {notice}", file=sys.stderr)
    return harmless


def _call(admin: Admin, op: str, args: Mapping[str, Any]) -> Progress:
    return msgspec.convert(admin_client.call(admin, op, args, timeout_s=ANSWER_S), Progress)


def _follow(admin: Admin, first: Progress, expected_s: float, quiet: bool) -> Progress:
    """Wait until it is over; progress bars meanwhile on a terminal, full after `expected_s`."""
    progress, ended = first, set[str]()
    with ExitStack() as stack:
        bars = stack.enter_context(Bars(quiet))
        for node in progress.nodes:
            bars.add(node.worker, expected_s)
        while not progress.over:
            progress = _call(admin, "looked", {"look": first.check_id})
            for node in progress.nodes:
                _draw(bars, node, expected_s, ended)
    return progress


def _draw(bars: Bars, node: NodeAnswer, expected_s: float, ended: set[str]) -> None:
    answer = node.answer
    if answer is None:
        return
    for device in answer.devices:
        bars.show(f"{node.worker} {device.device}", expected_s, device.elapsed_s, clean(device.text, 80))
    took_s = sum(result.duration_s for result in answer.results)
    names = ", ".join(result.check_type for result in answer.results)
    bars.show(node.worker, expected_s, took_s, clean(names, 60))
    if answer.done and node.worker not in ended:
        ended.add(node.worker)
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
    document = {"pass": all(map(_passed, progress.nodes)), "nodes": nodes}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
