"""The argument parser: torch's own, so that none of its flags is missed, plus our group."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch.distributed.run import get_args_parser

from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.launch.flags.group import Collect, FromEnvironment, add_flags

_ABOUT = """\
aegis-run starts a training as torchrun does and keeps it alive: it checks the machines before training,
notices when a rank dies, finds out where the fault is, and takes the cheapest recovery that can work. It
takes every flag of torchrun, with torchrun's meaning; --max-restarts alone has another default (3, not 0).
"""
_AFTER = """\
Exit codes: 0 the training succeeded, 1 it failed, 2 the command line can't be used, 75 please requeue,
128+N ended by signal N. While it runs: `aegisctl status` and `aegisctl log`.
"""


# difflib calls strings similar from 0.6 on; flags share dashes and short words, so more is required.
_SIMILARITY_MIN = 0.75


class Parser(argparse.ArgumentParser):
    """torch's arguments and ours; raises `UsageError` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError; for an unknown flag with the nearest known one."""
        if message.startswith("the following arguments are required") and "training_script" in message:
            raise UsageError("cannot start: no training script was given; try: aegis-run train.py")
        unknown = re.match(r"unrecognized arguments: (--?[^\s=]+)", message)
        nearest = _nearest(unknown[1], self._option_string_actions) if unknown else ""
        hint = f"; did you mean {nearest}?" if nearest else ""
        raise UsageError(f"cannot read the command line: {message}{hint}")


def _nearest(unknown: str, known: Iterable[str]) -> str:
    """The known flag that `unknown` looks like, as a whole or as its beginning; "" if none does."""

    def similarity(flag: str) -> float:
        ratios = (difflib.SequenceMatcher(a=unknown, b=b).ratio() for b in (flag, flag[: len(unknown)]))
        return max(ratios)

    best = max((flag for flag in known if flag.startswith("--")), key=similarity)
    return best if similarity(best) >= _SIMILARITY_MIN else ""


def make_parser(*, passes_local_rank: bool = False) -> Parser:
    """The whole parser; `passes_local_rank`: that of torch.distributed.launch, which has one flag more.
    UsageError if a PET_ variable has a value that torch can't take.
    """
    try:
        torch_parser = get_args_parser()
    except ValueError as error:
        variables = " ".join(sorted(f"{k}={v!r}" for k, v in os.environ.items() if k.startswith("PET_")))
        raise UsageError(
            f"cannot read the PET_ variables ({variables}): {error}; PET_STANDALONE and its like want 0 or 1"
        ) from error
    parser = Parser(
        prog="aegis-run",
        parents=[torch_parser],
        add_help=False,
        description=_ABOUT,
        epilog=_AFTER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for action in parser._actions:
        # "Not given" must be distinguished from "given as the default": torch's 0 isn't our default, and a
        # node rank names the worker only if someone chose it.
        if action.dest in ("max_restarts", "node_rank") and f"PET_{action.dest.upper()}" not in os.environ:
            action.default = None
    if passes_local_rank:
        parser.add_argument(
            "--use-env",
            "--use_env",
            action="store_true",
            help="Don't pass --local-rank to the script, which reads LOCAL_RANK.",
        )
    add_flags(parser)
    return parser


def resolve_environment(parser: Parser, args: argparse.Namespace) -> None:
    """Replace each `FromEnvironment` by its value, in place. UsageError names the bad variable."""
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if isinstance(value, FromEnvironment):
            given = f"{value.variable}={value.text!r}"
            setattr(args, action.dest, _value_of(action, value.text, given))
        elif isinstance(value, str) and action.choices is not None:
            # argparse checks choices on the command line only; torch's PET_ defaults come in unchecked.
            _check_choice(action, value, f"PET_{action.dest.upper()}={value!r}")


def _value_of(action: argparse.Action, text: str, given: str) -> Any:
    if action.nargs == 0:
        return _switch(text, given)
    if isinstance(action, Collect):
        return [_converted(action, part, given) for part in text.split(",") if part]
    value = _converted(action, text, given)
    _check_choice(action, value, given)
    return value


def _converted(action: argparse.Action, text: str, given: str) -> Any:
    convert: Callable[[str], Any] = action.type if callable(action.type) else str
    try:
        return convert(text)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UsageError(f"cannot use {given}: {error}") from error


def _check_choice(action: argparse.Action, value: object, given: str) -> None:
    if action.choices is not None and value not in action.choices:
        raise UsageError(f"cannot use {given}: choose from {', '.join(map(str, action.choices))}")


def _switch(text: str, given: str) -> bool:
    switches = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False}
    switches |= {"off": False, "": False}
    if text.strip().lower() not in switches:
        raise UsageError(f"cannot use {given}: want 1 or 0")
    return switches[text.strip().lower()]
