"""`aegisctl restart | hang | evict`: what an operator asks of a running job's master."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console

from aegis_elastic.control.host.errors import NoSuchJob
from aegis_elastic.launch.ctl import admin_client
from aegis_elastic.launch.ctl.admin_client import Admin
from aegis_elastic.launch.screens.formatting import clean

_VERDICTS = ("frozen", "desync", "stalled", "unreachable", "slow")
AddCommand = Callable[..., argparse.ArgumentParser]
FindJob = Callable[[argparse.Namespace], "Admin | None"]


def add_commands(add: AddCommand, find: FindJob) -> None:
    """Add the commands; `find` gives the way to the master of the job that the arguments name."""

    def restart(args: argparse.Namespace, console: Console) -> int:
        return _say(console, _ask(find, args, "restart"))

    def hang(args: argparse.Namespace, console: Console) -> int:
        if args.worker is None:
            return _list(console, admin_client.call(_way(find, args), "status"))
        return _say(console, _ask(find, args, "unmark" if args.clear else "mark"))

    def evict(args: argparse.Namespace, console: Console) -> int:
        return _say(console, _ask(find, args, "evict"))

    again = add(
        "restart", restart, "Restart training: all ranks stop and start again. Counts like a failure."
    )
    again.add_argument("worker", nargs="?", metavar="WORKER", help="whose restart it is; default: the first")
    mark = add("hang", hang, "Show which nodes are marked; with WORKER, mark its node. A mark kills nothing.")
    mark.add_argument("worker", nargs="?", metavar="WORKER", help="whose node is marked")
    mark.add_argument("--verdict", choices=_VERDICTS, default="frozen", help="as what; default: frozen")
    mark.add_argument("--clear", action="store_true", help="take the mark away")
    leave = add(
        "evict", evict, "Let a worker's node leave after the next checkpoint, if training can spare it."
    )
    leave.add_argument("worker", metavar="WORKER", help="whose node leaves")
    for command in (again, mark, leave):
        command.add_argument("--reason", default="", help="why, for the journal")


def _way(find: FindJob, args: argparse.Namespace) -> Admin:
    way = find(args)
    if way is None:
        raise NoSuchJob("cannot ask this job's master: the job has ended")
    return way


def _ask(find: FindJob, args: argparse.Namespace, op: str) -> str:
    asked = {name: getattr(args, name, None) for name in ("worker", "verdict", "reason")}
    answer = admin_client.call(_way(find, args), op, {name: value for name, value in asked.items() if value})
    return str(answer["said"])


def _say(console: Console, text: str) -> int:
    console.print(clean(text), soft_wrap=True)
    return 0


def _list(console: Console, view: dict[str, Any]) -> int:
    """0 if no node is marked, 1 if one is: a finding."""
    marks = (view.get("plane") or {}).get("marks", [])
    for mark in marks:
        where, why = clean(mark.get("nodeName")), clean(mark.get("reason"))
        allowed = "; the guard lets it go" if mark.get("evict") else ""
        console.print(f"{where} is marked {clean(mark.get('verdict'))}: {why}{allowed}", soft_wrap=True)
    if not marks:
        console.print("no node is marked")
    return 1 if marks else 0
