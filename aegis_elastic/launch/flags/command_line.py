"""Splits a command line into the launcher's own flags and the training's command.

argparse gives values, not their positions; explaining or dropping flags needs the arguments themselves.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GivenFlag:
    """One flag as it was written, with its value. `action` is the parser's; None for an unknown flag."""

    arguments: tuple[str, ...]
    action: argparse.Action | None

    @property
    def flag(self) -> str:
        """The flag as it was written, without a value."""
        return self.arguments[0].partition("=")[0]

    @property
    def value(self) -> str:
        """Its value, "" for a switch."""
        attached = self.arguments[0].partition("=")[2]
        return attached or " ".join(self.arguments[1:])


def split(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[GivenFlag], list[str]]:
    """The launcher's flags in order, and the rest: the training's command, which is not parsed."""
    options = parser._option_string_actions
    found: list[GivenFlag] = []
    position = 0
    while position < len(argv):
        argument = argv[position]
        if argument == "--" or not argument.startswith("-") or argument == "-":
            break
        action, attached = _action(argument, options)
        count = 1 if attached or (action is not None and action.nargs == 0) else 2
        found.append(GivenFlag(tuple(argv[position : position + count]), action))
        position += count
    return found, list(argv[position:])


def _action(argument: str, options: dict[str, argparse.Action]) -> tuple[argparse.Action | None, bool]:
    """The action of the flag in `argument`, and whether its value is in the same argument."""
    if argument in options:
        return options[argument], False
    name, equals, _ = argument.partition("=")
    if name in options:
        return options[name], bool(equals)
    if not argument.startswith("--"):
        return options.get(argument[:2]), True
    # argparse accepts an unambiguous prefix; both spellings of a flag count as one.
    matching = {id(action): action for option, action in options.items() if option.startswith(name)}
    return (next(iter(matching.values())) if len(matching) == 1 else None), bool(equals)
