"""The flags that `aegis-run` adds to torch's, as one group of the parser.

Every one begins with `--aegis-`, so that no later torch can collide with it; each has both spellings
(`--aegis-x-y`, `--aegis_x_y`) and takes its default from `AEGIS_X_Y`, as torch's take theirs from `PET_X_Y`.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aegis_elastic.checks.contract.budgets import ALL
from aegis_elastic.launch.flags import bus, checkpoints, guard, monitoring, nodes, progress

CHECK_PATH_KINDS = ("checkpoint", "data", "log", "shm")


class FromEnvironment:
    """The raw text of an environment variable, as a default that the command line may override."""

    def __init__(self, variable: str, text: str) -> None:
        self.variable = variable
        self.text = text


class Collect(argparse.Action):
    """A flag that can be given several times; values on the command line replace those of the variable."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Append to a new list, so that the default is never changed."""
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*(before if isinstance(before, list) else []), values])


class _Adder:
    """Adds flags to our group, each in both spellings and with its variable as default."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._group = parser.add_argument_group(
            "aegis", "What aegis-run adds. Each flag can also be given as a variable: AEGIS_REPORT=FILE."
        )

    def __call__(self, name: str, about: str, default: Any = None, **how: Any) -> None:
        variable = "AEGIS_" + name.replace("-", "_").upper()
        if variable in os.environ:
            default = FromEnvironment(variable, os.environ[variable])
        self._group.add_argument(
            f"--aegis-{name}",
            f"--aegis_{name.replace('-', '_')}",
            help=about.replace("%", "%%"),
            default=default,
            **how,
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group "aegis" to a parser. Values of variables arrive as `FromEnvironment`."""
    add = _Adder(parser)
    _add_protection(add)
    _add_checks(add)
    _add_files(add)
    _add_plane(add)
    nodes.add_node_flags(add, _seconds, _whole_number)
    checkpoints.add_checkpoint_flags(add, Collect)
    progress.add_progress_flags(add, _seconds)
    guard.add_guard_flags(add, _path)
    bus.add_bus_flags(add, _path)
    monitoring.add_monitor_flags(add, _seconds, _whole_number)


def _add_protection(add: _Adder) -> None:
    add(
        "bootcheck",
        "What is checked before training starts: `env` compares the versions of all nodes, `full` also "
        "runs a verified all-reduce over all ranks, `off` starts at once. The default is full.",
        "full",
        choices=("off", "env", "full"),
    )
    add(
        "fault-grace-s",
        "Seconds that the other ranks have between SIGTERM and SIGKILL after a failure; ranks that ignore "
        "SIGTERM have none. The default is 1, and less for ranks that are stuck where no signal is handled. "
        "(--shutdown-timeout governs signals that you send and the end of the job.)",
        type=_seconds(at_least_zero=True),
        metavar="SECONDS",
    )
    add(
        "warm-spares",
        "Hold a second process ready for each rank, started and past its imports, so that a restart takes a "
        "fraction of a second: `auto` does so unless the node is short of memory (less than 2 GiB free, or "
        "0.5 GiB for each rank), `on` always, `off` never. The default is auto.",
        "auto",
        choices=("auto", "on", "off"),
    )
    add(
        "lost-timeout-s",
        "Seconds without a report after which a node counts as lost, if training makes no progress either. "
        "The default is 30.",
        30.0,
        type=_seconds(),
        metavar="SECONDS",
    )
    add(
        "rejoin-timeout-s",
        "Seconds to wait for a lost node to come back or be replaced when too few are left. The default "
        "is the join timeout (--rdzv-conf join_timeout=600).",
        type=_seconds(),
        metavar="SECONDS",
    )
    add(
        "recovery-budget",
        'How often nodes may be lost during one recovery before the job fails with "recovery did not '
        'converge". These losses do not use up --max-restarts. The default is 10.',
        10,
        type=_whole_number(1),
        metavar="N",
    )
    add(
        "retry-decay",
        "Give one restart back for every N completed checkpoints of steps that were not saved before. The "
        "default is 0: never.",
        0,
        type=_whole_number(0),
        metavar="N",
    )
    add(
        "renew-exit-code",
        "On Kubernetes, exit with this code when this process must be replaced by a clean one, so that the "
        "platform restarts the container (elsewhere the launcher executes itself again). The default is 75.",
        75,
        type=_whole_number(1, 255),
        metavar="CODE",
    )
    add(
        "propagate-exit-code",
        "Exit with the code of the rank that failed first, instead of 1.",
        False,
        action="store_true",
    )


def _add_checks(add: _Adder) -> None:
    add(
        "troubleshoot",
        "What is checked after a failure: `adaptive` runs the cheap checks, and the collective ones only "
        "if the evidence points at communication; `full` always runs all seven; `off` none. The default is "
        "adaptive.",
        "adaptive",
        choices=("adaptive", "full", "off"),
    )
    add(
        "requeue",
        "When too few nodes are left: `on` leaves the job open and exits with 75, so that a scheduler puts "
        "it back into its queue and it goes on with its accounts; `off` fails it. The default, auto, is on "
        "under srun.",
        "auto",
        choices=("auto", "on", "off"),
    )
    add(
        "check-path",
        "A directory for the storage check, as KIND=DIR; KIND is one of checkpoint, data, log, shm "
        "(`data` is only read, the others are written to). Can be given several times.",
        type=_check_path,
        action=Collect,
        metavar="KIND=DIR",
    )
    add(
        "check-budget",
        f"Seconds that a check may take, as CHECK=SECONDS; an overrun is its finding. CHECK is one of "
        f"{', '.join(ALL)}. Can be given several times, also as io=30,gpu=66.",
        type=_check_budgets,
        action=Collect,
        metavar="CHECK=SECONDS",
    )
    add(
        "gpus-per-node",
        "How many GPUs each node should have: a node on which the checks find fewer is isolated. The default "
        "is the number at the start, or one for each rank if there are somewhat fewer than ranks.",
        type=_whole_number(0),
        metavar="N",
    )
    add(
        "fail-fast",
        "End the job at once when a failure is the user's own error: one that says so (a syntax error, a "
        "missing module, a wrong type ...), or the same exception at the same place again without any "
        "progress in between. Without this flag such failures are restarted like any other.",
        False,
        action="store_true",
    )


def _add_files(add: _Adder) -> None:
    add(
        "report",
        "Write the report on the run (outcome, failures with their causes, recovery times) to this file "
        "as JSON.",
        type=_path,
        metavar="FILE",
    )
    add(
        "run-dir",
        "Directory for the journal, the report, our log and the credentials of aegisctl (made with mode "
        "0700). The default is aegis/ in the run's directory under --log-dir, or one in your state "
        "directory.",
        type=_path,
        metavar="DIR",
    )
    add(
        "state-dir",
        "Shared directory for records that outlive jobs: nodes that must not be used, and why. Without it, "
        "they end with the job.",
        type=_path,
        metavar="DIR",
    )
    add("namespace", "Namespace of the job; the default is `default`.", "default", metavar="NAME")
    add(
        "worker-name",
        "Name of this node's worker; a relaunch must keep it to keep its retries. The "
        "default is the host name, with -<node rank> if --node-rank is given.",
        metavar="NAME",
    )
    add(
        "log-level",
        "How much aegis-run logs about its own work; the default is info.",
        "info",
        choices=("debug", "info", "warning", "error"),
    )
    add(
        "explain-flags",
        "Print what each given flag means here, and which defaults apply; start nothing.",
        False,
        action="store_true",
    )


def _add_plane(add: _Adder) -> None:
    add(
        "join-secret-file",
        "File with the secret that nodes prove to join the job. It must not be readable by everybody. The "
        "variable AEGIS_JOIN_SECRET gives the secret itself; with neither, the first contact is trusted.",
        type=_path,
        metavar="FILE",
    )
    add(
        "plane",
        "HOST:PORT of a standing control plane: `aegis-master`, started with this flag and the others of "
        "the job on a host outside of it. No node serves one then. Nodes still meet at the endpoint if that "
        "plane can't be reached.",
        type=_host_port,
        metavar="HOST:PORT",
    )
    add("require-secret", "Refuse to start without a join secret.", False, action="store_true")
    add(
        "fallback-port",
        "Port for the TCPStore at which nodes meet when the master can't be reached. The default is the "
        "port of the endpoint plus 1.",
        type=_whole_number(1, 65535),
        metavar="PORT",
    )
    add(
        "plane-linger-s",
        "Seconds that the control plane keeps running after its launcher has died while other nodes are "
        "connected. The default is 60.",
        60.0,
        type=_seconds(at_least_zero=True),
        metavar="SECONDS",
    )
    add(
        "plane-restarts",
        "How often the control plane is started again when it dies; training goes on meanwhile. The "
        "default is 5.",
        5,
        type=_whole_number(0),
        metavar="N",
    )


def _seconds(*, at_least_zero: bool = False) -> Callable[[str], float]:
    wanted = "a number of seconds, 0 or more" if at_least_zero else "a number of seconds above 0"

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not at_least_zero):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return convert


def _whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    wanted = f"{least} or more" if most is None else f"{least} to {most}"

    def convert(text: str) -> int:
        value = int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {wanted}")
        return value

    return convert


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text).expanduser().absolute()


def _host_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    number = int(port) if re.fullmatch(r"[0-9]{1,5}", port) else 0
    if not colon or not host.strip("[]") or not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT with a port of 1 to 65535")
    return host.strip("[]"), number


def _check_path(text: str) -> tuple[str, Path]:
    kind, equals, directory = text.partition("=")
    if not equals or kind not in CHECK_PATH_KINDS or not directory:
        kinds = ", ".join(CHECK_PATH_KINDS)
        raise argparse.ArgumentTypeError(f"{text!r} is not KIND=DIR with KIND one of {kinds}")
    return kind, _path(directory)


def _check_budgets(text: str) -> dict[str, float]:
    budgets = {}
    for part in text.split(","):
        check, equals, seconds = part.partition("=")
        if not equals or check not in ALL:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not CHECK=SECONDS with CHECK one of {', '.join(ALL)}"
            )
        budgets[check] = _seconds()(seconds)
    return budgets
