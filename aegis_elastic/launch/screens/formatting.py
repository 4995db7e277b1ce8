"""Small pieces of text for people: times, ranks, and foreign text made safe for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import IO, TypeVar

from rich.console import Console

# A log or a pipe has no width; this is what most people's windows and pagers show without wrapping.
_WIDTH_WITHOUT_TERMINAL = 120

_T = TypeVar("_T")


def console(file: IO[str] | None = None) -> Console:
    """A console on `file` (stdout): colours and the window's width on a terminal, plain text elsewhere."""
    file = file or sys.stdout
    width = None if file.isatty() else _WIDTH_WITHOUT_TERMINAL
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def clean(text: object, limit: int = 300) -> str:
    """`text` on one line without control characters, which could move the cursor or change colours."""
    printable = "".join(char if char.isprintable() else " " for char in ("" if text is None else str(text)))
    short = " ".join(printable.split())
    return short if len(short) <= limit else short[: limit - 1] + "…"


def clock(wall_s: float | None, *, fine: bool = False) -> str:
    """A wall time in this machine's zone: `14:03:07`, with milliseconds if `fine`."""
    if not wall_s:
        return "-"
    when = datetime.fromtimestamp(wall_s, tz=timezone.utc).astimezone()
    return when.strftime("%H:%M:%S") + (f".{when.microsecond // 1000:03d}" if fine else "")


def duration(seconds: float | None) -> str:
    """A length of time that is short to read: `0.08 s`, `41 s`, `2 h 05 min`; `-` if unknown."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 8` for 0, 1, 2, 3 and 8; `-` for none."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "-"


def plural(count: int, one: str, many: str = "") -> str:
    """`1 restart`, `2 restarts`."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def fold(items: Sequence[_T], limit: int) -> tuple[Sequence[_T], int, Sequence[_T]]:
    """The first and the last of `items`, at most `limit` together, and how many between them are left out."""
    if len(items) <= limit:
        return items, 0, ()
    last = limit // 2
    return items[: limit - last], len(items) - limit, items[len(items) - last :]
