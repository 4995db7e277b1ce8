"""The journal on disk: every event with what was made of it, and the log for people beside it."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import IO

import msgspec

from aegis_elastic.control.run_files import JOURNAL_FILE, LOG_FILE, journal_parts
from aegis_elastic.core.accounts import journal
from aegis_elastic.core.accounts.journal import BadJournal
from aegis_elastic.core.events import Reconcile
from aegis_elastic.core.machine import Transition
from aegis_elastic.core.model import Phase, Status

logger = logging.getLogger(__name__)

# A journal that is longer than this goes on in a new file at the next start of training: a thousand nodes
# write some megabytes at every restart, and whoever takes a job over, or reports on it, reads the newest one.
PART_BYTES_MAX = 64 << 20


class Journal:
    """The run's `journal.jsonl`, appended to line by line, and `aegis.log` for a collector beside it.

    A disk that is full, or a quota, is no reason to stop leading a job: what can't be written is missing, and
    where writing goes on an `adopt` line says from which status.
    """

    def __init__(self, run_dir: Path, part_bytes_max: int = PART_BYTES_MAX) -> None:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = run_dir / JOURNAL_FILE
        self._part_bytes_max = part_bytes_max
        self.seq = self._last_seq()
        self._file: IO[bytes] = _open_to_append(self.path)
        self._log: IO[bytes] = _open_to_append(run_dir / LOG_FILE)
        self._bytes = self.path.stat().st_size
        # Whether the last line is torn, or missing.
        self._torn = bool(self._bytes) and not _ends_a_line(self.path)
        self._failing = False

    def write(
        self, t: float, event: journal.Create | journal.Adopt | journal.StepEvent, transition: Transition
    ) -> None:
        """Append an event and its transition, at the wall second `t`."""
        status = transition.status
        if self._failing and not isinstance(event, journal.Create):
            event, transition = journal.Adopt(status), journal.adopted(status)
        self.seq += 1
        self._append_line(journal.encode_line(journal.line_of(t, self.seq, event, transition)))
        starts = isinstance(event, Reconcile) and status.phase is Phase.RUN_COMMAND
        if starts and self._bytes > self._part_bytes_max and not self._failing:
            self._begin_part()
            self.write(t, journal.Adopt(status), journal.adopted(status))

    def log(self, status: Status, t: float, message: str) -> None:
        """Append one fact to `aegis.log` in the collector's form."""
        line = {
            "podName": "master",
            "podIP": "",
            "nodeName": os.uname().nodename,
            "nodeIP": "",
            "timeStamp": t,
            "phase": status.phase.value,
            "message": message,
        }
        try:
            self._log.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            self._report_failing(error)

    def lines(self) -> list[journal.Line]:
        """All lines so far, of the newest file."""
        return journal.read(self.path)

    @property
    def parts(self) -> list[Path]:
        """The files before the newest."""
        return journal_parts(self.path.parent)

    def close(self) -> None:
        """Give the files back."""
        self._file.close()
        self._log.close()

    def _last_seq(self) -> int:
        try:
            lines = journal.read(self.path) if self.path.exists() else []
        except BadJournal as error:
            logger.error("a journal that can't be read is put aside, and another begun: %s", error)
            self.path.rename(self._next_part())
            return 0
        return lines[-1].seq if lines else 0

    def _next_part(self) -> Path:
        names = (self.path.with_name(f"journal-{number}.jsonl") for number in itertools.count(1))
        return next(path for path in names if not path.exists())

    def _begin_part(self) -> None:
        try:
            self.path.rename(self._next_part())
            part = _open_to_append(self.path)
        except OSError as error:
            self._report_failing(error)
            return
        self._file.close()
        self._file, self._bytes, self._torn = part, 0, False

    def _append_line(self, line: bytes) -> None:
        try:
            text = b"\n" + line if self._torn else line
            written = self._file.write(text)
            self._bytes += written
            # A disk that has just become full takes the beginning of a line.
            self._torn = written < len(text)
        except OSError as error:
            self._report_failing(error)
            return
        if self._torn:
            self._report_failing(OSError("it takes no whole line"))
        elif self._failing:
            self._failing = False
            logger.warning("the journal can be written again; what happened meanwhile is not in it")

    def _report_failing(self, error: OSError) -> None:
        if not self._failing:
            self._failing = True
            logger.error("THE JOURNAL CAN'T BE WRITTEN in %s: %s. The job goes on", self.path.parent, error)


def _ends_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _open_to_append(path: Path) -> IO[bytes]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return os.fdopen(descriptor, "ab", buffering=0)
