"""Performs what `core` decided: orders and words on the bus, lines in the journal, the report at the end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from pathlib import Path
from typing import IO

import msgspec

from aegis_elastic.bus import subjects
from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.control.host.config import write_private
from aegis_elastic.core.accounts import journal, report, report_summary
from aegis_elastic.core.accounts.journal import BadJournal
from aegis_elastic.core.events import Reconcile
from aegis_elastic.core.machine import Transition
from aegis_elastic.core.model import Phase, Status
from aegis_elastic.core.protocol import directives, messages, orders
from aegis_elastic.core.protocol.messages import MESSAGE_BYTES_MAX, Message, MessageType, WirePhase

logger = logging.getLogger(__name__)

JOURNAL_FILE = "journal.jsonl"
REPORT_FILE = "report.json"
STATUS_FILE = "status.json"
LOG_FILE = "aegis.log"
# A journal that is longer than this goes on in a new file at the next start of training: a thousand nodes
# write some megabytes at every restart, and whoever takes a job over, or reports on it, reads the newest one.
PART_BYTES_MAX = 64 << 20
# What a message has beside the report in it.
ENVELOPE_BYTES_MAX = 4096


def set_aside(run_dir: Path) -> None:
    """Before a job begins in this run directory: what an earlier one has left there gets a folder beside it.

    Users name the same directory again and again, and two jobs in one journal are neither's.
    """
    left = [run_dir / name for name in (JOURNAL_FILE, REPORT_FILE, STATUS_FILE, LOG_FILE)]
    left = [path for path in (*left, *parts(run_dir)) if path.exists()]
    if left:
        folders = (run_dir / f"earlier-{number}" for number in itertools.count(1))
        folder = next(folder for folder in folders if not folder.exists())
        folder.mkdir(mode=0o700)
        for path in left:
            path.rename(folder / path.name)


def parts(run_dir: Path) -> list[Path]:
    """The files in which a long journal began, oldest first. The newest, `journal.jsonl`, is not one of
    them.
    """
    found = {path: path.stem.removeprefix("journal-") for path in run_dir.glob("journal-*.jsonl")}
    return sorted((path for path, number in found.items() if number.isdigit()), key=lambda p: int(found[p]))


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
        self._file: IO[bytes] = _append(self.path)
        self._log: IO[bytes] = _append(run_dir / LOG_FILE)
        self._bytes = self.path.stat().st_size
        # Whether the last line is torn, or missing.
        self._torn = bool(self._bytes) and not _ends_a_line(self.path)
        self._failing = False

    def write(
        self, t: float, event: journal.Create | journal.Adopt | journal.StepEvent, made: Transition
    ) -> None:
        """Append what became of this event."""
        if self._failing and not isinstance(event, journal.Create):
            event, made = journal.Adopt(made.status), journal.adopted(made.status)
        self.seq += 1
        self._put(journal.encode_line(journal.line_of(t, self.seq, event, made)))
        begins = isinstance(event, Reconcile) and made.status.phase is Phase.RUN_COMMAND
        if begins and self._bytes > self._part_bytes_max and not self._failing:
            self._go_on_in_a_new_file()
            self.write(t, journal.Adopt(made.status), journal.adopted(made.status))

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
            self._say_failing(error)

    def lines(self) -> list[journal.Line]:
        """All lines so far, of the newest file."""
        return journal.read(self.path)

    @property
    def parts(self) -> list[Path]:
        """The files before the newest."""
        return parts(self.path.parent)

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

    def _go_on_in_a_new_file(self) -> None:
        try:
            self.path.rename(self._next_part())
            following = _append(self.path)
        except OSError as error:
            self._say_failing(error)
            return
        self._file.close()
        self._file, self._bytes, self._torn = following, 0, False

    def _put(self, line: bytes) -> None:
        try:
            text = b"\n" + line if self._torn else line
            written = self._file.write(text)
            self._bytes += written
            # A disk that has just become full takes the beginning of a line.
            self._torn = written < len(text)
        except OSError as error:
            self._say_failing(error)
            return
        if self._torn:
            self._say_failing(OSError("it takes no whole line"))
        elif self._failing:
            self._failing = False
            logger.warning("the journal can be written again; what happened meanwhile is not in it")

    def _say_failing(self, error: OSError) -> None:
        if not self._failing:
            self._failing = True
            logger.error("THE JOURNAL CAN'T BE WRITTEN in %s: %s. The job goes on", self.path.parent, error)


class Publisher:
    """Speaks for the master of one job."""

    def __init__(self, bus: BusConnection, namespace: str, job: str) -> None:
        self._bus = bus
        self._namespace = namespace
        self._job = job

    async def publish_order(self, status: Status, peers: dict[str, float] | None = None) -> None:
        """Send the order that this status wants; `peers` are the figures that checks compare with."""
        order = orders.wanted(status)
        if peers:
            order = msgspec.structs.replace(order, peers=peers)
        message = Message(
            aegis_name=self._job,
            aegis_namespace=self._namespace,
            worker="master",
            type=MessageType.ORDER,
            phase=WirePhase(orders.WIRE_PHASE[order.action]),
            data=order,
            time_stamp=time.time(),
            seq_num=status.seq_num,
            uid="",
            incarnation=status.incarnation,
        )
        await self._bus.publish(subjects.order_all(self._namespace, self._job), messages.encode(message))

    async def say(self, worker: str, word: directives.Directive) -> None:
        """Say something to one worker alone."""
        await self._bus.publish(subjects.order(self._namespace, self._job, worker), directives.encode(word))

    async def close_job(self, run_dir: Path, book: Journal, status: Status) -> report.Report:
        """Write the report and send it to everybody who is still there, as far as it fits into a message."""
        # Beside the loop: of a large job it takes a while, and agents must not take us for dead meanwhile.
        final = await asyncio.to_thread(_report, book, status)
        write_if_it_goes(run_dir / REPORT_FILE, msgspec.json.format(msgspec.json.encode(final), indent=2))
        told = report_summary.fit_report(final, MESSAGE_BYTES_MAX - ENVELOPE_BYTES_MAX)
        for worker in (*status.workers, *status.spares):
            if not worker.gone:
                await self.say(worker.name, directives.FinalReport(worker.uid, told))
        if status.phase is Phase.FAILED:
            logger.warning("job %s failed: %s", self._job, status.fail_reason)
        return final


def write_if_it_goes(path: Path, content: bytes) -> None:
    """Write a file that others wait for less than for what comes after it: a full disk is said, no more."""
    try:
        write_private(path, content)
    except OSError as error:
        logger.error("cannot write %s: %s", path, error)


def _report(book: Journal, status: Status) -> report.Report:
    try:
        final = report.build(book.lines(), status)
    except (BadJournal, OSError) as error:
        logger.error("the report tells of the end only: %s", error)
        final = report.build((), status)
    if book.parts:
        names = ", ".join(path.name for path in book.parts)
        final = msgspec.structs.replace(final, summary=f"{final.summary} (how it began: {names})")
    return final


def _ends_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _append(path: Path) -> IO[bytes]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return os.fdopen(descriptor, "ab", buffering=0)
