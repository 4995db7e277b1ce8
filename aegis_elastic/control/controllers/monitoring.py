"""Constant monitoring: agents' notes become lines of the journal, the usage that they report is kept.

A note is signed by its worker (`bus.contact.notes`); here it is held against what the master knows of that
worker, counted once, and bounded: a worker that notes without end must not fill the journal.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from aegis_elastic.bus.contact.notes import ANOMALIES_MAX, Note
from aegis_elastic.control.controllers.contract import Applied
from aegis_elastic.control.host.grpc_server import Refused
from aegis_elastic.core.detection.anomalies import DETAIL_CHARS_MAX, Anomaly
from aegis_elastic.core.detection.samples import Usage
from aegis_elastic.core.events import Event, Noted
from aegis_elastic.core.model import Status, Worker
from aegis_elastic.core.protocol.messages import TIME_MAX, Message, ReportData

logger = logging.getLogger(__name__)

WATCHER = "monitor"  # whose facts in the reports are for us
CODE_CHARS_MAX = 100
NUMBERS_MAX = 16
# Of one worker in a minute: an agent sends at most half of that.
NOTED_MAX = 60
MINUTE_S = 60.0
# A failure that all of 2,000 nodes note is noted often enough by some of them.
_ALL = "", 600


class MonitoringController:
    """See `control.controllers.contract.Controller`."""

    def __init__(self, feed: Callable[[Event], None], status: Status) -> None:
        self._feed = feed
        self._status = status
        self._numbers: dict[str, int] = {}  # by uid: the last note that was taken
        self._allowance: dict[str, tuple[float, int]] = {}
        self._usage: dict[str, Usage] = {}

    @property
    def usage(self) -> Mapping[str, Usage]:
        """What each worker's node and ranks use, as it reported last."""
        return self._usage

    async def take(self, note: Note) -> None:
        """Take a worker's note. Refused if that worker isn't known, ValueError if it makes no sense."""
        spec = self._status.spec
        if (note.namespace, note.job) != (spec.namespace, spec.job_name):
            raise ValueError(f"this is the control plane of {spec.job_name!r} in {spec.namespace!r}")
        worker = self._worker(note.worker, note.uid)
        if worker is None:
            raise Refused(f"no agent {note.uid[:40]!r} of {note.worker!r} takes part now")
        if len(note.anomalies) > ANOMALIES_MAX:
            raise ValueError(f"{len(note.anomalies)} anomalies, at most {ANOMALIES_MAX}")
        for anomaly in note.anomalies:
            if len(anomaly.numbers) > NUMBERS_MAX or any(
                len(name) > CODE_CHARS_MAX for name in anomaly.numbers
            ):
                raise ValueError(f"an anomaly with {len(anomaly.numbers)} numbers")
            coded = 0 < len(anomaly.code) <= CODE_CHARS_MAX and anomaly.code.isprintable()
            if not coded or not 0 <= anomaly.time <= TIME_MAX:
                raise ValueError(f"an anomaly {anomaly.code[:40]!r} at {anomaly.time}")
        if note.number <= self._numbers.get(note.uid, 0):
            return  # its answer was lost
        self._numbers[note.uid] = note.number
        left = min(
            self._allowed(who, most, len(note.anomalies)) for who, most in ((note.worker, NOTED_MAX), _ALL)
        )
        for anomaly in note.anomalies[:left]:
            self._feed(Noted(worker.name, worker.node_name, anomaly.code, _as_text(anomaly), anomaly.time))

    def _worker(self, name: str, uid: str) -> Worker | None:
        workers = (*self._status.workers, *self._status.spares)
        return next(
            (worker for worker in workers if (worker.name, worker.uid) == (name, uid) and not worker.gone),
            None,
        )

    def _allowed(self, who: str, most: int, wanted: int) -> int:
        """How many of so many anomalies they may have noted now, of `most` in a minute."""
        now_s = time.monotonic()
        since_s, count = self._allowance.get(who, (-math.inf, 0))
        if now_s - since_s >= MINUTE_S:
            since_s, count = now_s, 0
        if count <= most < count + wanted:
            logger.warning("%s: more than %d anomalies in a minute, the rest is dropped", who or "all", most)
        self._allowance[who] = since_s, count + wanted
        return max(most - count, 0)

    # ------------------------------------------------------------ as a `Controller`

    def on_report(self, report: Message, now_s: float) -> None:
        """Keep what the worker's node uses."""
        if not isinstance(report.data, ReportData) or WATCHER not in report.data.watched:
            return
        try:
            self._usage[report.worker] = msgspec.json.decode(report.data.watched[WATCHER], type=Usage)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            logger.debug("ignored what %s reports of its usage: %s", report.worker, error)

    def on_transitions(self, status: Status, transitions: Sequence[Applied]) -> None:
        """Forget who has left."""
        self._status = status
        workers = (*status.workers, *status.spares)
        if self._numbers.keys() - {worker.uid for worker in workers} or len(self._usage) > len(workers):
            self._numbers = {
                worker.uid: self._numbers[worker.uid] for worker in workers if worker.uid in self._numbers
            }
            self._usage = {
                worker.name: self._usage[worker.name] for worker in workers if worker.name in self._usage
            }

    def due_s(self) -> float:
        """Never: notes come by themselves."""
        return math.inf

    def events_due(self, now_s: float) -> Sequence[Event]:
        """Nothing."""
        return ()

    async def close(self) -> None:
        """Nothing to give back."""


def _as_text(anomaly: Anomaly) -> str:
    """Its detail and its numbers, in one line that a terminal can be shown: parts of it a rank has
    written.
    """
    numbers = ", ".join(f"{name}={value:.6g}" for name, value in anomaly.numbers.items())
    text = (
        f"{anomaly.detail[:DETAIL_CHARS_MAX]} [{numbers}]" if numbers else anomaly.detail[:DETAIL_CHARS_MAX]
    )
    return "".join(char if char.isprintable() else " " for char in text)
