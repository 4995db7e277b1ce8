"""`aegisctl restart | hang | evict`: what an operator asks of a running job's master."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console

from aegis_elastic.control.host.errors import NoSuchJob
from aegis_elastic.launch.ctl import admin_client
from aegis_elastic.launch.ctl.admin_client import Admin, FindMaster
from aegis_elastic.launch.screens.formatting import clean

_VERDICTS = ("frozen", "desync", "stalled", "unreachable", "slow")
AddCommand = Callable[..., argparse.ArgumentParser]


def add_commands(add: AddCommand, find_master: FindMaster) -> None:
    """Add the commands."""

    def restart(args: argparse.Namespace, console: Console) -> int:
        return _print(console, _call_master(find_master, args, "restart"))

    def hang(args: argparse.Namespace, console: Console) -> int:
        if args.worker is None:
            return _print_marks(console, admin_client.call(_admin(find_master, args), "status"))
        return _print(console, _call_master(find_master, args, "unmark" if args.clear else "mark"))

    def evict(args: argparse.Namespace, console: Console) -> int:
        return _print(console, _call_master(find_master, args, "evict"))

    restart_command = add(
        "restart", restart, "Restart training: all ranks stop and start again. Counts like a failure."
    )
    restart_command.add_argument(
        "worker", nargs="?", metavar="WORKER", help="whose restart it is; default: the first"
    )
    hang_command = add(
        "hang", hang, "Show which nodes are marked; with WORKER, mark its node. A mark kills nothing."
    )
    hang_command.add_argument("worker", nargs="?", metavar="WORKER", help="whose node is marked")
    hang_command.add_argument(
        "--verdict", choices=_VERDICTS, default="frozen", help="as what; default: frozen"
    )
    hang_command.add_argument("--clear", action="store_true", help="take the mark away")
    evict_command = add(
        "evict", evict, "Evict a worker's node after the next checkpoint, if training can spare it."
    )
    evict_command.add_argument("worker", metavar="WORKER", help="whose node leaves")
    for command in (restart_command, hang_command, evict_command):
        command.add_argument("--reason", default="", help="why, for the journal")


def _admin(find_master: FindMaster, args: argparse.Namespace) -> Admin:
    admin = find_master(args)
    if admin is None:
        raise NoSuchJob("cannot ask this job's master: the job has ended")
    return admin


def _call_master(find_master: FindMaster, args: argparse.Namespace, op: str) -> str:
    given = {name: getattr(args, name, None) for name in ("worker", "verdict", "reason")}
    answer = admin_client.call(
        _admin(find_master, args), op, {name: value for name, value in given.items() if value}
    )
    return str(answer["said"])


def _print(console: Console, text: str) -> int:
    console.print(clean(text), soft_wrap=True)
    return 0


def _print_marks(console: Console, view: dict[str, Any]) -> int:
    """0 if no node is marked, 1 if one is: a finding."""
    marks = (view.get("plane") or {}).get("marks", [])
    for mark in marks:
        where, why = clean(mark.get("nodeName")), clean(mark.get("reason"))
        allowed = "; the guard lets it go" if mark.get("evict") else ""
        console.print(f"{where} is marked {clean(mark.get('verdict'))}: {why}{allowed}", soft_wrap=True)
    if not marks:
        console.print("no node is marked")
    return 1 if marks else 0
