"""`AEGIS_OFF=1`: execute the stock torchrun in our place, with the command line that was meant for us.

It is the emergency switch, so it depends on as little of ours as possible: values of our flags aren't
validated, and torchrun is executed in a new program image without our imports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.launch.flags import command_line
from aegis_elastic.launch.flags.parser import make_parser
from aegis_elastic.worker.environment import without_secrets

VARIABLE = "AEGIS_OFF"
_SWITCH = {"1": True, "true": True, "yes": True, "on": True}
_SWITCH |= {"": False, "0": False, "false": False, "no": False, "off": False}
# Our rendezvous backend, and the one that takes its place: with ours torchrun would load our handler.
_OUR_BACKEND, _TORCH_BACKEND = "aegis", "c10d"
# Our modules and those of torch that they stand in for.
_TORCH_MODULE_OF = {
    "aegis_elastic.launch.run": "torch.distributed.run",
    "aegis_elastic.launch.launch": "torch.distributed.launch",
}


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the stock launcher is wanted. UsageError if the variable is neither 0 nor 1."""
    text = environment.get(VARIABLE, "").strip().lower()
    if text not in _SWITCH:
        raise UsageError(f"cannot use {VARIABLE}={environment[VARIABLE]!r}: want 1 or 0")
    return _SWITCH[text]


def torchrun_command_line(argv: Sequence[str], *, passes_local_rank: bool = False) -> tuple[list[str], str]:
    """The command line as the stock launcher takes it, and a notice of what was left out."""
    flags, command = command_line.split(argv, make_parser(passes_local_rank=passes_local_rank))
    kept: list[str] = []
    dropped: list[str] = []
    names = set()
    for given in flags:
        name = given.action.dest if given.action is not None else ""
        names.add(name)
        if given.flag.startswith(("--aegis-", "--aegis_")) or name.startswith("aegis_"):
            dropped.append(given.flag)
        elif name == "rdzv_backend" and given.value == _OUR_BACKEND:
            kept += [given.flag, _TORCH_BACKEND]
        else:
            kept += given.arguments
    left_out = f"without {' '.join(dropped)}" if dropped else "none of our flags was given"
    restarts = "" if "max_restarts" in names or "PET_MAX_RESTARTS" in os.environ else "; at most 0 restarts"
    return [*kept, *command], f"{VARIABLE} is set: this is the stock torchrun, {left_out}{restarts}"


def execute(argv: Sequence[str], *, passes_local_rank: bool = False) -> NoReturn:
    """Become the stock launcher. OSError if the interpreter can't be executed."""
    torch_argv, notice = torchrun_command_line(argv, passes_local_rank=passes_local_rank)
    sys.stderr.write(f"[aegis] {notice}\n")
    sys.stderr.flush()
    environment = without_secrets(os.environ)
    if environment.get("PET_RDZV_BACKEND") == _OUR_BACKEND:
        environment["PET_RDZV_BACKEND"] = _TORCH_BACKEND
    module = _TORCH_MODULE_OF[f"aegis_elastic.launch.{'launch' if passes_local_rank else 'run'}"]
    unbuffered = ["-u"] if "-u" in _interpreter_flags() else []
    os.execve(sys.executable, [sys.executable, *unbuffered, "-m", module, *torch_argv], environment)


def _interpreter_flags() -> list[str]:
    arguments = sys.orig_argv[1:]
    return arguments[: arguments.index("-m")] if "-m" in arguments else []
