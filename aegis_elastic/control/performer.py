"""Performs what `core` decided: orders and words on the bus, lines in the journal, the report at the end."""

from __future__ import annotations

import itertools
import logging
import os
import time
from pathlib import Path
from typing import IO

import msgspec

from aegis_elastic.bus import names
from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.control.config import write_private
from aegis_elastic.core import brief, journal, messages, orders, report, words
from aegis_elastic.core.machine import Transition
from aegis_elastic.core.messages import MESSAGE_BYTES_MAX, Message, MessageType, WirePhase
from aegis_elastic.core.model import Phase, Status

logger = logging.getLogger(__name__)

JOURNAL_FILE = "journal.jsonl"
REPORT_FILE = "report.json"
STATUS_FILE = "status.json"
LOG_FILE = "aegis.log"
# What a message has beside the report in it.
ENVELOPE_BYTES_MAX = 4096


def set_aside(run_dir: Path) -> None:
    """Before a job begins in this run directory: what an earlier one has left there gets a folder beside it.

    Users name the same directory again and again, and two jobs in one journal are neither's.
    """
    left = [run_dir / name for name in (JOURNAL_FILE, REPORT_FILE, STATUS_FILE, LOG_FILE)]
    left = [path for path in left if path.exists()]
    if left:
        folders = (run_dir / f"earlier-{number}" for number in itertools.count(1))
        folder = next(folder for folder in folders if not folder.exists())
        folder.mkdir(mode=0o700)
        for path in left:
            path.rename(folder / path.name)


class Journal:
    """The run's `journal.jsonl`, appended to line by line, and `aegis.log` for a collector beside it."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = run_dir / JOURNAL_FILE
        self.seq = journal.read(self.path)[-1].seq if self.path.exists() and self.path.stat().st_size else 0
        self._file: IO[bytes] = _append(self.path)
        self._log: IO[bytes] = _append(run_dir / LOG_FILE)
        if self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")

    def write(
        self, t: float, event: journal.Create | journal.Adopt | journal.StepEvent, made: Transition
    ) -> None:
        """Append what became of this event."""
        self.seq += 1
        self._file.write(journal.encode_line(journal.line_of(t, self.seq, event, made)))

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
        self._log.write(msgspec.json.encode(line) + b"\n")

    def lines(self) -> list[journal.Line]:
        """All lines so far."""
        return journal.read(self.path)

    def close(self) -> None:
        """Give the files back."""
        self._file.close()
        self._log.close()


class Performer:
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
            pod_name="master",
            type=MessageType.ORDER,
            phase=WirePhase(orders.WIRE_PHASE[order.action]),
            data=order,
            time_stamp=time.time(),
            seq_num=status.seq_num,
            uid="",
            incarnation=status.incarnation,
        )
        await self._bus.publish(names.order_all(self._namespace, self._job), messages.encode(message))

    async def say(self, worker: str, word: words.Word) -> None:
        """Say something to one worker alone."""
        await self._bus.publish(names.order(self._namespace, self._job, worker), words.encode(word))

    async def close_job(self, run_dir: Path, book: Journal, status: Status) -> report.Report:
        """Write the report and send it to everybody who is still there, as far as it fits into a message."""
        final = report.build(book.lines(), status)
        write_private(run_dir / REPORT_FILE, msgspec.json.format(msgspec.json.encode(final), indent=2))
        told = brief.fitting(final, MESSAGE_BYTES_MAX - ENVELOPE_BYTES_MAX)
        for pod in (*status.pods, *status.spares):
            if not pod.gone:
                await self.say(pod.name, words.FinalReport(pod.uid, told))
        if status.phase is Phase.FAILED:
            logger.warning("job %s failed: %s", self._job, status.fail_reason)
        return final


def _append(path: Path) -> IO[bytes]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return os.fdopen(descriptor, "ab", buffering=0)
