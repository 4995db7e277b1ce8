"""Reads the ranks' log files while they are written, and classifies their lines.

A bounded part of them: of a log that grows too fast only the newest lines are read. The ranks are never
blocked, since they write to files. The output of a rank that writes straight to the terminal can't be read.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from aegis_elastic.core.diagnosis import signatures
from aegis_elastic.core.diagnosis.signatures import Signature

READ_BYTES_MAX = 1 << 18  # of one file, each time
LINES_MAX = 2000  # of one file, each time
LINE_CHARS_MAX = 300
KEPT_LINES_MAX = 5
KEPT_LINES_AGE_S = 120.0
_HARMLESS = ("ignore",)


class Hit(NamedTuple):
    """A line that a signature matches."""

    rank: int
    signature: Signature
    line: str


@dataclass
class _File:
    path: str
    offset: int = 0
    rest: bytes = b""


class LogReader:
    """The logs of one incarnation's ranks."""

    def __init__(self, files: Mapping[int, tuple[str, ...]]) -> None:
        """`files`: by rank."""
        self._files = {rank: [_File(path) for path in paths] for rank, paths in files.items()}
        self._kept: dict[int, deque[tuple[float, str]]] = {}
        self.skipped_bytes = 0

    def read(self) -> list[Hit]:
        """The lines since the last call that match a signature, oldest first in each file."""
        hits = []
        for rank, files in self._files.items():
            for file in files:
                for line in self._lines(file):
                    signature = signatures.load().classify(line)
                    if signature is not None and signature.action not in _HARMLESS:
                        hits.append(Hit(rank, signature, line[:LINE_CHARS_MAX]))
                        self._keep(hits[-1])
        return hits

    def log_lines(self, rank: int) -> tuple[str, ...]:
        """The last lines of this rank with the signature of a root cause, of the last KEPT_LINES_AGE_S.
        Thread-safe.
        """
        since_s = time.monotonic() - KEPT_LINES_AGE_S
        return tuple(line for at_s, line in tuple(self._kept.get(rank, ())) if at_s >= since_s)

    def _keep(self, hit: Hit) -> None:
        # Others are consequences of failures elsewhere, and would be taken for the reason of this rank's end.
        if hit.signature.role == "root":
            kept = self._kept.setdefault(hit.rank, deque(maxlen=KEPT_LINES_MAX))
            if not kept or kept[-1][1] != hit.line:
                kept.append((time.monotonic(), hit.line))

    def _lines(self, file: _File) -> list[str]:
        try:
            # Non-blocking, since it may be a fifo without a writer.
            descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return []  # moved away, or not there yet
        try:
            about = os.fstat(descriptor)
            size = about.st_size if stat.S_ISREG(about.st_mode) else 0
            if size < file.offset:
                file.offset, file.rest = 0, b""  # truncated
            if size == file.offset:
                return []
            if size - file.offset > READ_BYTES_MAX:
                self.skipped_bytes += size - READ_BYTES_MAX - file.offset
                file.offset, file.rest = size - READ_BYTES_MAX, b""
            data = os.pread(descriptor, READ_BYTES_MAX, file.offset)
        except OSError:
            return []
        finally:
            os.close(descriptor)
        file.offset += len(data)
        # A progress bar writes all its states into one line.
        *lines, file.rest = (file.rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(file.rest) > READ_BYTES_MAX:
            file.rest = b""
        if len(lines) > LINES_MAX:
            self.skipped_bytes += sum(map(len, lines[:-LINES_MAX]))
            lines = lines[-LINES_MAX:]
        return [line.decode(errors="replace") for line in lines if line]
