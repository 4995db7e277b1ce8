"""Which words of a command line are the launcher's own flags, and where the training's command begins.

argparse tells values, not where they stood. Who shows or drops single flags needs the words themselves.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Given:
    """One flag as it was written: its words, and the parser's action. None: the parser doesn't know it."""

    words: tuple[str, ...]
    action: argparse.Action | None

    @property
    def flag(self) -> str:
        """The flag as it was spelt, without a value."""
        return self.words[0].partition("=")[0]

    @property
    def value(self) -> str:
        """What was given with it, "" for a switch."""
        attached = self.words[0].partition("=")[2]
        return attached or " ".join(self.words[1:])


def split(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[Given], list[str]]:
    """The launcher's flags in order, and the rest: the training's command, which is not looked into."""
    options = parser._option_string_actions
    found: list[Given] = []
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--" or not word.startswith("-") or word == "-":
            break
        action, attached = _action(word, options)
        count = 1 if attached or (action is not None and action.nargs == 0) else 2
        found.append(Given(tuple(words[at : at + count]), action))
        at += count
    return found, list(words[at:])


def _action(word: str, options: dict[str, argparse.Action]) -> tuple[argparse.Action | None, bool]:
    """Whose flag `word` is, and whether its value is in the same word."""
    if word in options:
        return options[word], False
    name, equals, _ = word.partition("=")
    if name in options:
        return options[name], bool(equals)
    if not word.startswith("--"):
        return options.get(word[:2]), True
    # argparse takes what only one flag begins with; both spellings of one are one.
    begun = {id(action): action for option, action in options.items() if option.startswith(name)}
    return (next(iter(begun.values())) if len(begun) == 1 else None), bool(equals)
