"""Reads torchelastic's error files: what a rank recorded about its own failure, however broken the file."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime, timezone
from typing import NamedTuple

from aegis_elastic.agents.guard.client import Exited

ERROR_FILE_BYTES_MAX = 1 << 20
# A traceback's line for a frame; that of a SyntaxError has no function.
_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?\s*$', re.MULTILINE
)
FRAME_CHARS_MAX = 500
# All ranks of a node share one message to the master, and an exception's text may contain a whole batch.
EXCEPTION_CHARS_MAX, LINE_CHARS_MAX, TRACEBACK_CHARS_MAX = 4000, 1000, 16384


class RankFailure(NamedTuple):
    """A rank's exit with what it recorded. ``exception`` is "Type: message" or "" if it recorded none;
    ``traceback`` likewise; ``time_s`` is the wall time of the record (whole seconds) or else of the death."""

    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    first: bool
    exception: str
    traceback: str
    time_s: float

    @property
    def time(self) -> str:
        """``time_s`` in ISO 8601, UTC."""
        return datetime.fromtimestamp(self.time_s, timezone.utc).isoformat(timespec="seconds")


def failure_of(exited: Exited, error_file: str) -> RankFailure:
    """Combine an exit with torchelastic's error file of that rank. A missing or broken file is no error: the
    rank may have been killed while writing it."""
    exception, traceback, time_s = _read_error_file(error_file)
    return RankFailure(
        exited.local_rank,
        exited.pid,
        exited.exit_code,
        exited.signal,
        exited.first,
        exception,
        traceback,
        exited.wall_s if time_s is None else time_s,
    )


def raised_at(traceback: str) -> str:
    """Where the exception of this traceback was raised: "FILE:LINE FUNCTION" of the innermost frame, "" if it
    has none.
    """
    frames = list(_FRAME.finditer(traceback))
    if not frames:
        return ""
    last = frames[-1]
    return f"{last['file']}:{last['line']} {last['function'] or ''}".rstrip()[-FRAME_CHARS_MAX:]


def _read_error_file(path: str) -> tuple[str, str, float | None]:
    nothing = ("", "", None)
    if not path or not os.path.isfile(path):
        return nothing
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read(ERROR_FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return nothing
    if not isinstance(data, dict):
        return nothing
    message = data.get("message")
    if isinstance(message, str):  # the older format, and what torch writes for signals
        return _clean(message)[:EXCEPTION_CHARS_MAX], "", _seconds(data.get("timestamp"))
    if not isinstance(message, dict):
        return nothing
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    traceback = _clean(extra.get("py_callstack")).split("\n")
    return (
        _clean(message.get("message"))[:EXCEPTION_CHARS_MAX],
        "\n".join(line[:LINE_CHARS_MAX] for line in traceback)[-TRACEBACK_CHARS_MAX:],
        _seconds(extra.get("timestamp")),
    )


def _clean(value: object) -> str:
    """Text that can be encoded: names of files need not be UTF-8."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def _seconds(value: object) -> float | None:
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if 0 < seconds < 1e11 else None  # else it is no valid time
