"""Signatures of log lines: fault class, component, role and fitting action, from `signatures.json`.

The data file lists signatures in the order in which they are tried; the first that matches counts, so what
is specific comes before what is general. A rule is a regular expression (ignoring case, over the line with
single blanks) and the words of which a line must hold at least one for the expression to be tried at all. A
line's words are looked up in an index, so a line of no interest, and nearly all are, costs a lookup of its
words and nothing else. Words are runs of letters: numbers, underscores and punctuation separate them.

A rule may name a *form* instead: an expression with a hole for a list of codes (Xids, errnos, signals),
because there the number alone makes the difference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

import msgspec

Action = Literal[
    "ignore",
    "restart_in_place",
    "restart_container",
    "isolate_node",
    "diagnose",
    "wait",
    "fallback_checkpoint",
    "fail_fast",
]
SignatureRole = Literal["root", "either", "cascade", "context"]

UNKNOWN = "unknown"  # the action of a line that nothing matches
LINE_CHARS_MAX = 4096  # of a longer line (a payload, hours of a progress bar) its two ends are looked at
_COMBINATIONS_MAX = 4096
_CODES = "CODES"  # the hole of a form
_DATA = Path(__file__).with_name("signatures.json")

# A capital becomes small, all that is no letter becomes a blank; beyond ASCII there are no words of ours.
_LETTERS = bytes(ord(chr(b).lower()) if b < 128 and chr(b).isalpha() else ord(" ") for b in range(256))
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class BadSignatures(ValueError):
    """The data file isn't as it must be; the message says where."""


class Signature(msgspec.Struct, frozen=True):
    """What a kind of line means.

    `role`: whether such a line shows a root cause, may be either, follows from another failure (cascade), or
    accompanies one (context). `action`: what fits it; `isolate_node` only after a check confirms it.
    """

    fault_class: str
    component: str
    role: SignatureRole
    action: Action


class _Form(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    words: tuple[str, ...]
    pattern: str


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either `words` and `pattern`, or `form` and `codes`."""

    words: tuple[str, ...] = ()
    pattern: str = ""
    form: str = ""
    codes: tuple[str, ...] = ()


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fault_class: str
    component: str
    role: SignatureRole
    action: Action
    rules: tuple[_Rule, ...]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    forms: dict[str, _Form]
    signatures: tuple[_Entry, ...]


class Rule(msgspec.Struct, frozen=True):
    """One expression and what it stands for; `words`: a line without any of them can't match."""

    words: frozenset[bytes]
    pattern: str
    signature: Signature


class Signatures:
    """A table of signatures, ready to classify lines."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        index: dict[bytes, list[int]] = {}
        for number, rule in enumerate(self.rules):
            for word in rule.words:
                index.setdefault(word, []).append(number)
        self._index = index
        self._words = frozenset(index)
        # Expressions are compiled when a line first needs them: all of them take a fifth of a second, and one
        # failure needs a few, at a moment when everybody waits.
        self.compiled = cache(self._compile)
        self._candidates = lru_cache(maxsize=_COMBINATIONS_MAX)(self._rules_with)

    def _compile(self, number: int) -> re.Pattern[str]:
        return re.compile(self.rules[number].pattern, re.IGNORECASE | re.ASCII)

    def _rules_with(self, words: frozenset[bytes]) -> tuple[int, ...]:
        return tuple(sorted({number for word in words for number in self._index[word]}))

    def classify(self, line: str) -> Signature | None:
        """The signature of a line, or None."""
        if len(line) > LINE_CHARS_MAX:
            half = LINE_CHARS_MAX // 2
            line = f"{line[:half]} {line[-half:]}"
        if "\x1b" in line:
            line = _COLOUR.sub("", line)
        words = self._words.intersection(line.encode("utf-8", "replace").translate(_LETTERS).split())
        if not words:
            return None
        line = " ".join(line.split())
        for number in self._candidates(words):
            if self.compiled(number).search(line):
                return self.rules[number].signature
        return None


@cache
def load() -> Signatures:
    """The signatures that ship with the package."""
    return parse(_DATA.read_bytes())


def parse(data: bytes) -> Signatures:
    """A table from the text of a data file. Raises BadSignatures."""
    try:
        file = msgspec.json.decode(data, type=_File)
    except msgspec.MsgspecError as error:
        raise BadSignatures(f"cannot read the signatures: {error}") from error
    return Signatures([_rule(file, entry, rule) for entry in file.signatures for rule in entry.rules])


def _rule(file: _File, entry: _Entry, rule: _Rule) -> Rule:
    words, pattern = rule.words, rule.pattern
    if rule.form:
        form = file.forms.get(rule.form)
        if form is None or pattern or words or not rule.codes:
            raise BadSignatures(
                f"cannot use a rule of {entry.fault_class}: want a form of this file and codes"
            )
        words, pattern = form.words, form.pattern.replace(_CODES, "|".join(map(re.escape, rule.codes)))
    if not words or not all(word.isascii() and word.isalpha() and word.islower() for word in words):
        raise BadSignatures(
            f"cannot use the words {words} of {entry.fault_class}: want one or more, small letters"
        )
    signature = Signature(entry.fault_class, entry.component, entry.role, entry.action)
    return Rule(frozenset(word.encode() for word in words), pattern, signature)
