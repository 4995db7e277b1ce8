"""`aegisctl taint`, `untaint`, `nodes` and `probation`: read and change the records of a cluster's nodes.

They need no job: the records are under --state-dir or in --store. Where neither is given they are those of a
running job, and its master is called.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aegis_elastic.control.host import addresses
from aegis_elastic.control.host.cluster import ClusterScope, Edit, of_cluster
from aegis_elastic.control.host.errors import AdminRefused, AdminUnreachable, NoSuchJob, UsageError
from aegis_elastic.control.isolation import drivers
from aegis_elastic.control.isolation.contract import Driver, Outcome, call_driver
from aegis_elastic.control.isolation.isolations import release
from aegis_elastic.core.policy import node_records
from aegis_elastic.core.policy.node_records import MANUAL, Isolated, NodeRecord, NodeTaint, Standing
from aegis_elastic.launch.ctl import admin_client, probation
from aegis_elastic.launch.ctl.admin_client import FindMaster
from aegis_elastic.launch.flags import nodes
from aegis_elastic.launch.screens.formatting import clean, duration, plural
from aegis_elastic.store.contract import StoreError

NODE_CHARS_MAX = 253
SCORE_WORTH_SHOWING = 0.1
Add = Callable[..., argparse.ArgumentParser]
Row = dict[str, Any]
_Result = TypeVar("_Result")


def add_commands(add: Add, as_json: argparse.ArgumentParser, find_master: FindMaster) -> None:
    """Declare the commands."""
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $AEGIS_STATE_DIR")
    where.add_argument("--store", type=nodes.etcd, metavar="URL", help="default: $AEGIS_STORE")
    scheduler = argparse.ArgumentParser(add_help=False)
    scheduler.add_argument(
        "--isolation",
        type=nodes.isolation,
        default=os.environ.get("AEGIS_ISOLATION", "none"),
        metavar="DRIVER",
        help="the driver, without a job (default: $AEGIS_ISOLATION)",
    )
    taint = add(
        "taint", lambda a, c: _taint(a, c, find_master), "Keep nodes out of all later rendezvous.",
        as_json, where, scheduler,
    )  # fmt: skip
    taint.add_argument("--reason", required=True, help="why, for whoever is refused because of it")
    taint.add_argument("--expires", type=nodes.duration, metavar="2h", help="for how long (default: no end)")
    taint.add_argument("--isolate", action="store_true", help="take them from their scheduler, too")
    untaint = add(
        "untaint", lambda a, c: _untaint(a, c, find_master), "Let nodes join again, also those on probation.",
        as_json, where, scheduler,
    )  # fmt: skip
    for each in (taint, untaint):
        each.add_argument("nodes", nargs="+", metavar="NODE")
    listing = add(
        "nodes", lambda a, c: _nodes(a, c, find_master), "Show what is known of nodes.", as_json, where
    )
    listing.add_argument("--all", action="store_true", help="those, too, of which little is known")
    listing.add_argument("--exclude", action="store_true", help="only the names not to be used: a,b,c")
    probation_command = add(
        "probation", _probation, "Check and burn this node, and let it join again if it passes.", where
    )
    probation_command.add_argument(
        "--burn-s", type=nodes.duration, default=nodes.PROBATION_BURN_S, metavar="S",
        help=f"how long (default: {nodes.PROBATION_BURN_S:.0f})",
    )  # fmt: skip
    probation_command.add_argument("--tied-to", type=int, help=argparse.SUPPRESS)


def _taint(args: argparse.Namespace, console: Console, find_master: FindMaster) -> int:
    names, now = _names(args.nodes), time.time()
    until = now + args.expires if args.expires else 0.0
    scope = _scope(args)
    if scope is None:
        request = {
            "nodes": names,
            "reason": args.reason,
            "by": _operator(),
            "until": until,
            "isolate": args.isolate,
        }
        return _show_rows(args, console, _call_master(args, find_master, "taint", request))
    taint = NodeTaint(node_records.clip(args.reason), MANUAL, now, _operator(), until)
    driver = _driver(args)
    if args.isolate and driver is None:
        raise UsageError("cannot isolate: --isolate wants --isolation DRIVER, too, where no job is asked")
    driver = driver if args.isolate else None
    rows, outcomes = _run_and_close(scope, _write_taints(scope, names, taint, driver))
    return _show_rows(args, console, rows, outcomes)


async def _write_taints(
    scope: ClusterScope, names: Sequence[str], taint: NodeTaint, driver: Driver | None
) -> tuple[list[Row], list[Outcome]]:
    rows, outcomes = [], []

    def with_isolation(found: NodeRecord) -> NodeRecord:
        mark = Isolated(driver.name if driver else "", taint.time, taint.job)
        return msgspec.structs.replace(found, isolated=found.isolated or mark)

    for name in names:
        record = await scope.change(name, lambda found: node_records.with_taint(found, taint))
        if driver is not None:
            outcomes.append(outcome := await call_driver(driver, "isolate", name, taint.reason))
            if outcome.ok:
                record = await scope.change(name, with_isolation)
        rows.append(node_records.as_row(record, taint.time))
    return rows, outcomes


def _untaint(args: argparse.Namespace, console: Console, find_master: FindMaster) -> int:
    names, scope = _names(args.nodes), _scope(args)
    if scope is None:
        return _show_rows(args, console, _call_master(args, find_master, "untaint", {"nodes": names}))
    rows, outcomes = _run_and_close(scope, _remove_taints(scope, names, _driver(args)))
    return _show_rows(args, console, rows, outcomes)


async def _remove_taints(
    scope: ClusterScope, names: Sequence[str], driver: Driver | None
) -> tuple[list[Row], list[Outcome]]:
    rows, outcomes = [], []
    for name in names:
        record = await scope.change(name, node_records.without_taints)
        if driver is not None:
            outcome = await release(scope, driver, name, time.time())
            outcomes += [outcome] if outcome else []
            record = await scope.record(name)
        rows.append(node_records.as_row(record, time.time()))
    return rows, outcomes


def _nodes(args: argparse.Namespace, console: Console, find_master: FindMaster) -> int:
    scope = _scope(args)
    if scope is None:
        answer = _call_master(args, find_master, "nodes", {})
        where, rows = str(answer["where"]), list(answer["nodes"])
    else:
        found = _run_and_close(scope, scope.records())
        where, rows = scope.where, [node_records.as_row(record, time.time()) for record in found.values()]
    rows.sort(key=lambda row: (row["standing"] == Standing.FREE.value, -row["score"], row["nodeName"]))
    not_free = [row["nodeName"] for row in rows if row["standing"] != Standing.FREE.value]
    if args.exclude:
        print(",".join(not_free))
    elif args.json:
        print(_pretty({"where": where, "nodes": rows}))
    else:
        shown = [row for row in rows if args.all or _is_worth_showing(row)]
        if shown:
            console.print(_table(shown))
        known = "" if len(shown) == len(rows) else f", {plural(len(rows), 'node')} known (--all)"
        console.print(
            f"{plural(len(not_free), 'node')} not to be used{known}; from {clean(where)}", soft_wrap=True
        )
    return 0


def _probation(args: argparse.Namespace, console: Console) -> int:
    """Prints one line, without --json: `check` and `burn` have the details."""
    if args.tied_to is not None:
        probation.end_with_parent(args.tied_to)
    node = addresses.node_name()

    def scope() -> ClusterScope:
        # A new one for each use: the checks between them run outside of any event loop.
        found = _scope(args)
        if found is None:
            raise UsageError("cannot tell whether this node is on probation: give --state-dir or --store")
        return found

    def read_record() -> NodeRecord:
        return _run_and_close(found := scope(), found.record(node))

    def change_record(edit: Edit) -> NodeRecord:
        return _run_and_close(found := scope(), found.change(node, edit))

    passed, outcome = probation.run_trial(read_record, change_record, node, args.burn_s)
    console.print(outcome, soft_wrap=True)
    return 0 if passed else 1


# ------------------------------------------------------------ where the records are


def _scope(args: argparse.Namespace) -> ClusterScope | None:
    """The records that the arguments mean; None if those of a running job. UsageError."""
    state_dir, store = args.state_dir, args.store
    if state_dir is not None and store:
        raise UsageError("cannot use --state-dir and --store together: the records are in one place")
    if state_dir is None and not store:
        if getattr(args, "job", None) or getattr(args, "run_dir", None):
            return None
        store = os.environ.get("AEGIS_STORE", "")
        state_dir = Path(os.environ["AEGIS_STATE_DIR"]) if os.environ.get("AEGIS_STATE_DIR") else None
    if state_dir is not None and not store and not state_dir.is_dir():
        raise UsageError(f"cannot read records of nodes in {state_dir}: there is no such directory")
    try:
        return of_cluster(str(state_dir.absolute()) if state_dir else "", store or "")
    except ValueError as error:
        raise UsageError(f"cannot use AEGIS_STORE: {error}") from None


def _run_and_close(scope: ClusterScope, work: Awaitable[_Result]) -> _Result:
    async def run() -> _Result:
        try:
            return await work
        finally:
            await scope.close()

    try:
        return asyncio.run(run())
    except StoreError as error:
        raise AdminUnreachable(f"cannot use the records of nodes in {scope.where}: {error}") from error


def _call_master(args: argparse.Namespace, find_master: FindMaster, op: str, request: dict[str, Any]) -> Any:
    try:
        admin = find_master(args)
    except NoSuchJob as error:
        raise NoSuchJob(f"{error}; without a job, give --state-dir or --store") from error
    if admin is None:
        raise NoSuchJob("cannot ask this job's master: the job has ended; give --state-dir or --store")
    return admin_client.call(admin, op, request)


def _names(given: Sequence[str]) -> list[str]:
    for name in given:
        if not name.isprintable() or not name.strip() or len(name) > NODE_CHARS_MAX:
            raise UsageError(f"cannot use {clean(name, 40)!r} as a node's name")
    return list(dict.fromkeys(given))


def _driver(args: argparse.Namespace) -> Driver | None:
    try:
        return drivers.make(args.isolation)
    except ValueError as error:
        raise UsageError(f"cannot use --isolation: {error}") from None


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # a user id without a name
    return f"{user}@{socket.gethostname()}"


# ------------------------------------------------------------ what people see


def _show_rows(
    args: argparse.Namespace, console: Console, rows: Sequence[Row], outcomes: Sequence[Outcome] = ()
) -> int:
    if args.json:
        print(_pretty({"nodes": list(rows), "isolation": [each.message for each in outcomes]}))
    else:
        console.print(_table(rows))
        for outcome in outcomes:
            console.print(clean(outcome.message), soft_wrap=True)
        for row in rows:
            if row["isolatedBy"] and row["standing"] == Standing.FREE.value:
                console.print(
                    f"{clean(row['nodeName'])} is still isolated by {clean(row['isolatedBy'])}: a running "
                    "job with that driver gives it back, or untaint with --isolation DRIVER",
                    soft_wrap=True,
                )
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed and args.json:
        raise AdminRefused(failed[0].message)
    return 1 if failed else 0


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("node", "standing", "kind", "since", "for", "score", "isolated", "says", "why"):
        table.add_column(column, justify="right" if column == "score" else "left", overflow="fold")
    for row in rows:
        not_free = row["standing"] != Standing.FREE.value
        ends = duration(row["until"] - time.time()) if row["until"] > time.time() else "no end"
        table.add_row(
            Text(clean(row["nodeName"], 60)),
            Text(row["standing"], style="red" if not_free else "green"),
            Text(row["kind"] or "-"),
            Text(duration(row["age_s"]) if not_free else "-"),
            Text(ends if row["standing"] == Standing.TAINTED.value else "-"),
            Text(f"{row['score']:.2f}"),
            Text(clean(row["isolatedBy"]) or "-"),
            Text(clean(row["job"], 40) or "-"),
            Text(clean(row["reason"]) or "-"),
        )
    return table


def _is_worth_showing(row: Row) -> bool:
    not_free = row["standing"] != Standing.FREE.value
    return bool(not_free or row["isolatedBy"] or row["score"] >= SCORE_WORTH_SHOWING)


def _pretty(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
