"""`aegisctl`: shows a job, running or ended, or this node, and asks a job's master to act.

Exit codes: 0 fine, 1 a finding (a failed job, a difference, a master that doesn't answer), 2 wrong use,
3 no such job.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from aegis_elastic.control.host.errors import BadRecord, LaunchError, NoSuchJob
from aegis_elastic.core.accounts.journal import BadJournal, Line, encode_line, read, replay, walk
from aegis_elastic.core.model import TERMINAL
from aegis_elastic.launch.ctl import (
    admin_client,
    node_checks,
    nodes,
    operator_actions,
    run_directory,
    signatures,
    verdicts,
)
from aegis_elastic.launch.ctl.follow_file import follow
from aegis_elastic.launch.flags import bus
from aegis_elastic.launch.screens import final_report, formatting
from aegis_elastic.launch.screens.status import render_line, render_status
from aegis_elastic.launch.slurm import script

_INTERRUPTED = 130  # 128 + SIGINT
_ABOUT = """\
Shows a job of aegis-run, and asks its master to act.

Which job: --run-dir, or --job (or AEGIS_JOB), or else the only live job of yours on this machine.
check, bootcheck and burn examine this machine; with --job or --run-dir every node of that job.
"""
_AFTER = "Exit codes: 0 fine, 1 a finding or a failed job, 2 wrong use, 3 no such job."


def main(argv: Sequence[str] | None = None) -> int:
    """Run `aegisctl`; returns its exit code."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace, Console], int] = args.command
    try:
        code = command(args, formatting.console())
        sys.stdout.flush()
    except LaunchError as error:
        print(f"aegisctl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    which = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    which.add_argument("--job", metavar="NAME", help="name of the job; the default is $AEGIS_JOB")
    which.add_argument("--namespace", metavar="NAME", help="its namespace, where several have such a job")
    which.add_argument("--run-dir", metavar="DIR", type=Path, help="its run directory")
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print JSON, for programs")

    parser = argparse.ArgumentParser(
        prog="aegisctl",
        description=_ABOUT,
        epilog=_AFTER,
        parents=[which],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str,
        command: Callable[[argparse.Namespace, Console], int],
        about: str,
        *parents: argparse.ArgumentParser,
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about, parents=[which, *parents])
        sub.set_defaults(command=command)
        return sub

    add("status", _status, "Show what the job does now, and why.", as_json)
    log_command = add("log", _log, "Show the job's journal: every event, decision and reason.", as_json)
    log_command.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    add("report", _report, "Show the report of a job that has ended.", as_json)
    replay_command = add(
        "replay",
        _replay,
        "Feed a journal to the phase machine again and compare every line; with --policy, show what the "
        "guard would have done under another policy.",
        as_json,
    )
    replay_command.add_argument(
        "--policy", type=Path, metavar="FILE", help="a policy file, as aegis-run takes it"
    )
    replay_command.add_argument(
        "journal", nargs="?", type=Path, metavar="RUN|JOURNAL", help="a run directory or a journal.jsonl"
    )
    classify = add(
        "signatures",
        _signatures,
        "Show which lines of a log are signs of which fault, and what to do.",
        as_json,
    )
    classify.add_argument("log", metavar="FILE|-", help="a log file; - reads standard input")
    node_checks.add_commands(add, as_json, _find_master)
    for name in ("quit", "stop"):
        quit_command = add(name, _quit, "Close the job: all ranks are stopped, and the job counts as failed.")
        quit_command.add_argument("--reason", default=f"asked by aegisctl {name}", help="why, for the report")
    script.add_command(add)
    bus.add_command(add)
    operator_actions.add_commands(add, _find_master)
    nodes.add_commands(add, as_json, _find_master)
    verdicts.add_command(add, as_json)
    return parser


def _run_dir(args: argparse.Namespace) -> Path:
    job = getattr(args, "job", None) or os.environ.get("AEGIS_JOB") or None
    return run_directory.locate(getattr(args, "run_dir", None), job, getattr(args, "namespace", None))


def _find_master(args: argparse.Namespace) -> admin_client.Admin | None:
    """How to reach the master of the job that the arguments mean; None if it has ended."""
    run_dir = _run_dir(args)
    return None if run_directory.read_status(run_dir).ended else admin_client.load(run_dir)


def _status(args: argparse.Namespace, console: Console) -> int:
    run_dir = _run_dir(args)
    status = run_directory.read_status(run_dir)
    if args.json:
        print(_pretty(msgspec.json.encode(status.view)))
    else:
        console.print(render_status(status.view, _last_line(run_dir)))
    if status.why_not_live:
        print(f"aegisctl: this is the last status written down: {status.why_not_live}", file=sys.stderr)
    return 1 if status.why_not_live or status.view.get("phase") == "Failed" else 0


def _last_line(run_dir: Path) -> Line | None:
    """The newest decision. It is an addition to the status, so a missing journal is no failure."""
    try:
        lines = run_directory.read_journal(run_dir)
    except (NoSuchJob, BadRecord):
        return None
    return next((line for line in reversed(lines) if line.effects), None)


def _log(args: argparse.Namespace, console: Console) -> int:
    file = run_directory.journal_file(_run_dir(args))
    lines = _followed_lines(file) if args.follow else iter(run_directory.read_journal(file))
    try:
        for walked in walk(lines):
            if args.json:
                print(encode_line(walked.line).decode(), end="", flush=args.follow)
            else:
                console.print(render_line(walked), soft_wrap=True)
            if walked.made.status.phase in TERMINAL and args.follow:
                break
    except BadJournal as error:
        raise BadRecord(str(error)) from error
    return 0


def _followed_lines(file: Path) -> Iterator[Line]:
    for number, raw in enumerate(follow(file), start=1):
        lines = read([raw])
        if not lines and raw.strip():
            print(
                f"aegisctl: line {number} of {file} can't be read; its writer may have died", file=sys.stderr
            )
        yield from lines


def _report(args: argparse.Namespace, console: Console) -> int:
    report = run_directory.read_report(_run_dir(args))
    if args.json:
        print(_pretty(msgspec.json.encode(report)))
    else:
        final_report.show(report, console=console)
    return 0 if report.outcome == "succeeded" else 1


def _replay(args: argparse.Namespace, console: Console) -> int:
    path = args.journal if args.journal is not None else _run_dir(args)
    if args.policy is not None:
        return verdicts.replay_policy(run_directory.read_journal(path), args.policy, args.json, console)
    result = replay(run_directory.read_journal(path))
    if not result.ok:
        console.print(
            f"{formatting.plural(result.lines, 'line')} came out the same, then: {result.first_difference}"
        )
        return 1
    console.print(
        f"{formatting.plural(result.lines, 'line')} came out the same: every decision and every status"
    )
    return 0


def _signatures(args: argparse.Namespace, console: Console) -> int:
    return signatures.show(args.log, args.json, console)


def _quit(args: argparse.Namespace, console: Console) -> int:
    run_dir = _run_dir(args)
    admin = admin_client.load(run_dir)
    status = run_directory.read_status(run_dir)
    if admin is None or status.ended:
        raise NoSuchJob(f"cannot quit job {status.view.get('job')!r}: it has ended")
    admin_client.call(admin, "quit", {"reason": args.reason})
    console.print(f"job {status.view.get('job')} was asked to quit: {args.reason}")
    return 0


def _pretty(encoded: bytes) -> str:
    return msgspec.json.format(encoded, indent=2).decode()


if __name__ == "__main__":
    sys.exit(main())
