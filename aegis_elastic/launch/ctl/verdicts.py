"""`aegisctl verdicts`: the owner and the action of each verdict. `aegisctl replay --policy`: what would have
been done in a recorded run under another policy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aegis_elastic.control.host.errors import BadRecord
from aegis_elastic.core.accounts import policy_replay
from aegis_elastic.core.accounts.journal import BadJournal, Line, walk
from aegis_elastic.core.accounts.policy_replay import ReplayedAction
from aegis_elastic.core.policy import verdicts
from aegis_elastic.launch.flags import guard
from aegis_elastic.launch.screens import formatting


def add_command(add: Callable[..., argparse.ArgumentParser], as_json: argparse.ArgumentParser) -> None:
    """Add the command."""
    add("verdicts", _verdicts, "Show who acts on which verdict of which detector, and how.", as_json)


def _verdicts(args: argparse.Namespace, console: Console) -> int:
    rows = verdicts.as_json()
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return 0
    table = Table("verdict", "evidence", "owner", "action", box=None, pad_edge=False, header_style="bold")
    kind = ""
    for row in rows:
        if row["kind"] != kind:
            kind = row["kind"]
            table.add_section()
        table.add_row(row["verdict"], row["evidence"], row["owner"], row["action"])
    console.print(table)
    return 0


def replay_policy(lines: Sequence[Line], policy: Path, as_json: bool, console: Console) -> int:
    """Show what would have been done under this policy; returns 1 if that differs. BadRecord, UsageError."""
    try:
        actions = policy_replay.replay_policy(walk(lines), guard.load(policy))
    except BadJournal as error:
        raise BadRecord(str(error)) from error
    if as_json:
        rows = [{**each._asdict(), "differs": each.differs} for each in actions]
        print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
    else:
        for each in actions:
            console.print(_line_of(each), soft_wrap=True)
        if not actions:
            console.print("no mark and no hold in this run: the policy makes no difference")
    return 1 if any(each.differs for each in actions) else 0


def _line_of(action: ReplayedAction) -> Text:
    done = "nothing was done" if action.done_s is None else f"acted after {action.done_s:.0f} s"
    would = "nothing" if action.would_s is None else f"acts after {action.would_s:.0f} s"
    head = "DIFFERS" if action.differs else "same"
    text = f"{head:<8}{action.what}: {done}; with this policy: {would} ({formatting.clean(action.why)})"
    return Text(text, style="bold" if action.differs else "")
