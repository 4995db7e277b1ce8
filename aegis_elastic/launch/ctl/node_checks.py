"""`aegisctl check`, `bootcheck` and `burn`: the checks of a job, run by hand on this node; with --job on
every node of that job (`launch.ctl.job_checks`).

Exit codes: 0 nothing found, 1 a finding, 2 wrong use.
"""

from __future__ import annotations

import argparse
import glob
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console

from aegis_elastic.agents.checks.process import CheckRun, start_checks
from aegis_elastic.checks.contract.budgets import ALL, CHEAP, DEFAULT_BUDGETS_S, IMPORT_BUDGET_S, TORCH
from aegis_elastic.checks.contract.request import CheckRequest, Scalar, World
from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.control.host.run_directories import make_private, user_state_dir
from aegis_elastic.core.diagnosis.recovery import BOOT_CHECKS
from aegis_elastic.core.model import CheckResult
from aegis_elastic.launch.ctl import job_checks, node_burn
from aegis_elastic.launch.ctl.admin_client import FindMaster
from aegis_elastic.launch.screens.node_checks import Bars, as_json, table

_COLLECTIVE = frozenset(TORCH) - {"env"}
_TICK_S = 0.2  # of the bars; without a terminal nothing ticks
_RANKS_WITHOUT_GPU = 2  # a process group of one would prove nothing
_HOST = "127.0.0.1"
# Checks that compare with their last results; of the others nothing is kept.
_KEPT = ("rdma", "gpu")

Add = Callable[..., argparse.ArgumentParser]


def add_commands(add: Add, json_flag: argparse.ArgumentParser, find_master: FindMaster) -> None:
    """Declare the commands. `add(name, command, about, *parents)` makes a subparser."""

    def check_all(args: argparse.Namespace, console: Console) -> int:
        return (
            check_job(find_master, args, console)
            if job_checks.names_a_job(args)
            else check_node(args, console)
        )

    def bootcheck_all(args: argparse.Namespace, console: Console) -> int:
        if not job_checks.names_a_job(args):
            return bootcheck_node(args, console)
        checks = job_checks.only_harmless(BOOT_CHECKS["full"], args)
        return job_checks.run_on_job(find_master, args, console, {"checks": checks})

    def burn_all(args: argparse.Namespace, console: Console) -> int:
        if not job_checks.names_a_job(args):
            return node_burn.burn_node(args, console)
        seconds = node_burn.request_of(args).duration_s
        return job_checks.run_on_job(find_master, args, console, {"burn_s": seconds})

    check = add("check", check_all, "Run checks on this node; the default are the cheap ones.", json_flag)
    check.add_argument("names", nargs="*", metavar="CHECK", help=f"any of: {', '.join(ALL)}")
    check.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="KIND=DIR",
        help='a directory for the io check; "data" is only read, all other kinds are written to',
    )
    check.add_argument(
        "--pid", action="append", default=[], metavar="RANK=PID", help="a training process for the hang check"
    )
    check.add_argument(
        "--budget", action="append", default=[], metavar="CHECK=S", help="seconds that a check may take"
    )
    check.add_argument("--exclusive", action="store_true", help="nobody else may hold memory on the GPUs")
    boot = add(
        "bootcheck", bootcheck_all, "Run the checks before a training, for this node alone.", json_flag
    )
    boot.add_argument("--nproc", type=int, metavar="N", help="ranks; the default is one for each GPU, or 2")
    for each in (check, boot):
        each.add_argument("--gpus", type=int, metavar="N", help="how many GPUs there should be")
    burn = add("burn", burn_all, "Load this node's GPUs (or CPU) and verify every result.", json_flag)
    burn.add_argument("--minutes", type=float, default=1.0, metavar="N", help="how long (default: 1)")
    burn.add_argument("--size", type=int, default=0, metavar="N", help="side of the matrices")
    burn.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads (default: all)")
    for each in (check, boot, burn):
        job_checks.add_flag(each)


def check_node(args: argparse.Namespace, console: Console) -> int:
    """`aegisctl check`."""
    names = _names(args)
    pids = {_number(rank, "--pid"): _number(pid, "--pid") for rank, pid in _pairs(args.pid, "--pid")}
    budgets = _budgets(args)
    paths = {"tmp": tempfile.gettempdir(), "shm": "/dev/shm"} | dict(_pairs(args.path, "--path"))
    return _run_and_show(names, args, console, paths=paths, rank_pids=pids, budgets_s=budgets)


def check_job(find_master: FindMaster, args: argparse.Namespace, console: Console) -> int:
    """`aegisctl check --job`: each node knows its own paths, ranks and GPUs."""
    if args.path or args.pid or args.exclusive or args.gpus is not None:
        raise UsageError("cannot use --path, --pid, --gpus or --exclusive with --job: its nodes know theirs")
    budgets = _budgets(args)
    if not all(name in ALL and seconds > 0 for name, seconds in budgets.items()):
        wanted = f"CHECK=S with S above 0 and CHECK one of {', '.join(ALL)}"
        raise UsageError(f"cannot use --budget {' '.join(args.budget)}: want {wanted}")
    request = {"checks": _names(args), "budgets_s": budgets}
    return job_checks.run_on_job(find_master, args, console, request)


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(args.names)) or CHEAP
    unknown = [name for name in names if name not in ALL]
    if unknown:
        raise UsageError(f"cannot check {', '.join(unknown)}: there are {', '.join(ALL)}")
    return names


def _budgets(args: argparse.Namespace) -> dict[str, float]:
    return {name: _seconds(value) for name, value in _pairs(args.budget, "--budget")}


def bootcheck_node(args: argparse.Namespace, console: Console) -> int:
    """`aegisctl bootcheck`."""
    if args.nproc is not None and args.nproc < 1:
        raise UsageError(f"cannot run {args.nproc} ranks: --nproc wants 1 or more")
    return _run_and_show(BOOT_CHECKS["full"], args, console)


def _run_and_show(
    names: tuple[str, ...], args: argparse.Namespace, console: Console, **details: object
) -> int:
    results = run_checks(names, args, **details)
    if args.json:
        print(as_json(socket.gethostname(), results))
    else:
        console.print(table(socket.gethostname(), results))
    return 0 if all(result.passed for result in results) else 1


def run_checks(names: tuple[str, ...], args: argparse.Namespace, **details: object) -> list[CheckResult]:
    """Run these checks on this node, as the arguments say; returns all results. UsageError."""
    gpus = len(glob.glob("/dev/nvidia[0-9]*"))
    expected = gpus or None if args.gpus is None else args.gpus
    if args.gpus is not None and args.gpus < 0:
        raise UsageError(f"cannot expect {args.gpus} GPUs: --gpus wants 0 or more")
    store = world = None
    if _COLLECTIVE.intersection(names):
        # imported only here, because it takes a second
        from aegis_elastic.agents.peers import stores

        store = stores.serve(_HOST, 0)
        world = _single_node_world(
            getattr(args, "nproc", None) or gpus or _RANKS_WITHOUT_GPU, store.port, bool(gpus)
        )
    node, last = socket.gethostname(), _LastResults()
    try:
        request = CheckRequest(
            checks=names,
            node=node,
            worker=node,
            expected_gpus=expected,
            world=world,
            baseline=last.read(),
            exclusive_gpus=getattr(args, "exclusive", False),
            **details,  # type: ignore[arg-type]  # by name, from the two callers above
        )
    except ValueError as error:
        raise UsageError(f"cannot run these checks: {error}") from error
    results = _run_with_bars(request, args.json)
    last.keep(results)
    return results


def _single_node_world(nproc: int, port: int, cuda: bool) -> World:
    return World(
        group_rank=0,
        group_world_size=1,
        rank_offset=0,
        world_size=nproc,
        local_world_size=nproc,
        master_addr=_HOST,
        master_port=port,
        device="cuda" if cuda else "cpu",
    )


def _run_with_bars(request: CheckRequest, quiet: bool) -> list[CheckResult]:
    """All results in the order of the request; progress bars meanwhile on a terminal."""
    budgets = {name: request.budgets_s.get(name, DEFAULT_BUDGETS_S[name]) for name in request.checks}
    started = time.monotonic()
    shown: set[str] = set()
    with ExitStack() as stack:
        checker = CheckRun(request, start_checks(os.environ))
        stack.callback(lambda: None if checker.done else checker.cancel())
        bars = stack.enter_context(Bars(quiet))
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(checker, selectors.EVENT_READ)
        for name in request.checks:
            # Checks with torch also wait for its import.
            bars.add(name, budgets[name] + (IMPORT_BUDGET_S if name in TORCH else 0.0))
        while not checker.done:
            if selector.select(_TICK_S if bars.visible else None):
                checker.read()
            for result in checker.results:
                if result.check_type not in shown:
                    shown.add(result.check_type)
                    bars.end(result.check_type, result.passed)
            bars.advance(time.monotonic() - started)
    return sorted(checker.results, key=lambda result: request.checks.index(result.check_type))


class _LastResults:
    """What the last check of this user on this node has read, so that counters can be judged by their growth.

    Only results that passed are kept: a fault must be found again until it is repaired. Counters start at
    zero with the node's boot, so results of an earlier boot don't count.
    """

    def __init__(self) -> None:
        self._file = user_state_dir() / "aegis" / f"last-check-{socket.gethostname()}.json"
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def read(self) -> dict[str, Scalar]:
        return {key: value for details in self._read().values() for key, value in details.items()}

    def _read(self) -> dict[str, dict[str, Scalar]]:
        try:
            kept = msgspec.json.decode(self._file.read_bytes(), type=dict[str, dict[str, Scalar]])
        except (OSError, msgspec.DecodeError):
            return {}  # none yet, or not written by us: nothing is compared
        return kept if kept.pop("boot", {}) == {"id": self._boot} else {}

    def keep(self, results: Iterable[CheckResult]) -> None:
        """Keep these for the next check."""
        kept: dict[str, Mapping[str, Scalar]] = dict(self._read())
        kept |= {
            each.check_type: each.details for each in results if each.passed and each.check_type in _KEPT
        }
        kept["boot"] = {"id": self._boot}
        make_private(self._file.parent)
        new = self._file.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(kept))
        new.replace(self._file)


def _pairs(given: Iterable[str], flag: str) -> list[tuple[str, str]]:
    pairs = []
    for each in given:
        key, equals, value = each.partition("=")
        if not (key and equals and value):
            raise UsageError(f"cannot use {flag} {each!r}: want two parts joined by =")
        pairs.append((key, value))
    return pairs


def _number(text: str, flag: str) -> int:
    if not text.isdigit():
        raise UsageError(f"cannot use {flag} with {text!r}: want a number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"cannot use --budget with {text!r}: want seconds") from None
