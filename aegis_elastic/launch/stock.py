"""`AEGIS_OFF=1`: the stock launcher in our place, on the very command line that was meant for us.

The switch for whoever doubts us at three in the morning. So it hangs on as little of ours as it can: values
of our flags aren't looked at, and the stock launcher is executed anew, where we have left no trace.
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
# What c10d is to torchrun, `aegis` is to us; torchrun would look for our handler, which is what was put off.
_OURS, _THEIRS = "aegis", "c10d"
# Whose place each of our modules takes.
_STANDS_FOR = {
    "aegis_elastic.launch.run": "torch.distributed.run",
    "aegis_elastic.launch.launch": "torch.distributed.launch",
}


def asked(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the stock launcher is wanted. UsageError if the variable is neither 0 nor 1."""
    text = environment.get(VARIABLE, "").strip().lower()
    if text not in _SWITCH:
        raise UsageError(f"cannot use {VARIABLE}={environment[VARIABLE]!r}: want 1 or 0")
    return _SWITCH[text]


def without_ours(words: Sequence[str], *, passes_local_rank: bool = False) -> tuple[list[str], str]:
    """The command line as the stock launcher takes it, and one line that says what was left out."""
    flags, command = command_line.split(words, make_parser(passes_local_rank=passes_local_rank))
    kept: list[str] = []
    dropped: list[str] = []
    names = set()
    for one in flags:
        name = one.action.dest if one.action is not None else ""
        names.add(name)
        if one.flag.startswith(("--aegis-", "--aegis_")) or name.startswith("aegis_"):
            dropped.append(one.flag)
        elif name == "rdzv_backend" and one.value == _OURS:
            kept += [one.flag, _THEIRS]
        else:
            kept += one.words
    left_out = f"without {' '.join(dropped)}" if dropped else "none of our flags was given"
    restarts = "" if "max_restarts" in names or "PET_MAX_RESTARTS" in os.environ else "; at most 0 restarts"
    return [*kept, *command], f"{VARIABLE} is set: this is the stock torchrun, {left_out}{restarts}"


def execute(words: Sequence[str], *, passes_local_rank: bool = False) -> NoReturn:
    """Become the stock launcher. OSError if the interpreter can't be executed."""
    theirs, said = without_ours(words, passes_local_rank=passes_local_rank)
    sys.stderr.write(f"[aegis] {said}\n")
    sys.stderr.flush()
    environment = without_secrets(os.environ)
    if environment.get("PET_RDZV_BACKEND") == _OURS:
        environment["PET_RDZV_BACKEND"] = _THEIRS
    module = _STANDS_FOR[f"aegis_elastic.launch.{'launch' if passes_local_rank else 'run'}"]
    unbuffered = ["-u"] if "-u" in _interpreter_flags() else []
    os.execve(sys.executable, [sys.executable, *unbuffered, "-m", module, *theirs], environment)


def _interpreter_flags() -> list[str]:
    begun = sys.orig_argv[1:]
    return begun[: begun.index("-m")] if "-m" in begun else []
