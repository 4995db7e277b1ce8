"""The events of a report: each fact once, and Errors only when it is known whose failure came first.

Memory only: an Error that a dying master held back is reported again until somebody answers it.
"""

from __future__ import annotations

import msgspec

from aegis_elastic.control.membership import Membership
from aegis_elastic.core.diagnosis.attribution import Attribution, ReportedError, attribute
from aegis_elastic.core.events import Error, Event, Finish, Independent, Lost, Offer, Started
from aegis_elastic.core.machine import step
from aegis_elastic.core.model import RECOVERING, Mode, Phase, Status
from aegis_elastic.core.protocol.messages import Message, MessageType
from aegis_elastic.core.protocol.orders import Order

# So many are remembered before those that have gone are forgotten.
STARTED_MIN = 64


def events_of(report: Message) -> tuple[Event, ...]:
    """What a worker's report means for the machine, in the order in which `step` is to be given it.

    First what happened while the plane was away (the accounts are behind until it is in them), then the
    store that the worker holds, then its answer to the order. An order means nothing to its own sender.
    The function has no memory: a heartbeat repeats `Started`, and the machine ignores what it knows.
    """
    data = report.data
    if isinstance(data, Order):
        return ()
    events: list[Event] = [
        Independent(end.worker, end.incarnation, end.reason, end.failures, end.ended)
        for end in sorted(data.independent, key=lambda end: end.incarnation)
    ]
    worker, uid, incarnation = report.worker, report.uid, report.incarnation
    if data.store:
        events.append(Offer(worker, uid, data.store))
    if report.type is MessageType.FINISH:
        events.append(
            Finish(
                worker, uid, incarnation, report.seq_num, data.findings, data.store, data.checks,
                data.timings_s,
            )
        )  # fmt: skip
    elif report.type is MessageType.ERROR:
        events.append(
            Error(
                worker, uid, incarnation, report.seq_num, data.reason, data.failures, data.clues, data.store,
                data.timings_s,
            )
        )  # fmt: skip
    elif data.started:
        events.append(Started(worker, uid, incarnation, data.timings_s))
    return tuple(events)


class ReportEvents:
    """The events of one job's reports."""

    def __init__(self, membership: Membership, attribution_s: float) -> None:
        """`attribution_s`: how long an Error that looks like a consequence waits for its root cause."""
        self._membership = membership
        self._attribution_s = attribution_s
        # worker -> its Error that waits, and what attribution judges it by.
        self._waiting: dict[str, tuple[ReportedError, Error]] = {}
        # uid -> the newest incarnation that it has reported as started.
        self._started: dict[str, int] = {}

    @property
    def errors_waiting(self) -> int:
        """How many Errors wait for their root cause."""
        return len(self._waiting)

    def new_events(self, status: Status, report: Message, now_s: float) -> list[Event]:
        """The report's events without those that are known already, and without Errors: those wait.

        Repetitions are dropped here, so that the journal holds each fact once. `now_s`: monotonic seconds.
        """
        return [event for event in events_of(report) if self._is_new(status, event, report, now_s)]

    def attribution(self, status: Status, suspects: frozenset[str], now_s: float) -> Attribution:
        """Whose failure came first, as far as the Errors that wait say."""
        evidence = [each for each, _ in self._waiting.values()]
        expected = sum(not worker.finished and not worker.gone for worker in status.workers)
        return attribute(evidence, suspects, expected, now_s, self._attribution_s)

    def attributed_errors(
        self, status: Status, suspects: frozenset[str], in_line: list[Event], now_s: float
    ) -> list[Error]:
        """The Errors that have waited, the root cause first, once it is clear whose failure came first.

        `in_line`: the other events of this turn; a worker that is lost is the root cause of all.
        """
        if not self._waiting:
            return []
        deciding = status.phase is Phase.RUN_COMMAND or status.mode is Mode.INDEPENDENT
        attribution = self.attribution(status, suspects, now_s)
        if deciding and attribution.root is None and not any(isinstance(event, Lost) for event in in_line):
            return []
        errors = [error for _, error in self._waiting.values()]
        errors.sort(key=lambda error: error.worker != attribution.root)
        self._waiting.clear()
        return errors

    def _is_new(self, status: Status, event: Event, report: Message, now_s: float) -> bool:
        if isinstance(event, (Error, Independent)) and not _has_ranks(status, report):
            return False  # Only who takes part in an incarnation can know how it ended; a spare doesn't.
        if isinstance(event, Error):
            if event.worker not in self._waiting and _is_recent(status, report):
                self._wait_for_attribution(event, now_s)
            return False
        if isinstance(event, Started):
            return self._is_first_start(status, report)
        return step(status, event, 0.0).status is not status

    def _wait_for_attribution(self, error: Error, now_s: float) -> None:
        clock = self._membership.clock(error.uid, now_s)
        reported = ReportedError(error.worker, now_s, error.failures, error.reason, error.clues, clock)
        timed = msgspec.structs.replace(error, clock=tuple(clock) if clock else None)
        self._waiting[error.worker] = (reported, timed)

    def _is_first_start(self, status: Status, report: Message) -> bool:
        if self._started.get(report.uid) == report.incarnation:
            return False
        if len(self._started) > 2 * len(status.workers) + STARTED_MIN:
            self._started = {
                uid: incarnation for uid, incarnation in self._started.items() if self._membership.knows(uid)
            }
        self._started[report.uid] = report.incarnation
        return True


def _has_ranks(status: Status, report: Message) -> bool:
    worker = status.worker(report.worker)
    return worker is not None and worker.uid == report.uid


def _is_recent(status: Status, report: Message) -> bool:
    """Errors are worth keeping until the next start of training, so that consequences are recorded too."""
    recent = status.phase is Phase.RUN_COMMAND or status.phase in RECOVERING
    recent = recent or status.mode is Mode.INDEPENDENT
    return recent and report.incarnation == status.incarnation
