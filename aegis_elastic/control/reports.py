"""What arrives from agents, on its way to `step`: repetitions are dropped, Errors wait for their root.

Memory only: an Error that a dying master held back is reported again until somebody answers it.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from aegis_elastic.bus import subjects
from aegis_elastic.control.membership import Membership
from aegis_elastic.core.diagnosis.attribution import Evidence, Verdict, attribute
from aegis_elastic.core.events import Error, Event, Independent, Lost, Started
from aegis_elastic.core.machine import step
from aegis_elastic.core.model import RECOVERING, JobSpec, Mode, Phase, Status
from aegis_elastic.core.protocol.messages import BadMessage, Message

# An agent that was heard within this time lives: three heartbeats.
RIVAL_S = 3.0
# So many are remembered before those that have gone are forgotten.
STARTED_MIN = 64


class ReportIntake:
    """Sorts the events of one job's reports."""

    def __init__(self, roll: Membership, attribution_s: float) -> None:
        self._membership = roll
        self._attribution_s = attribution_s
        # uid -> the incarnation that it has told to have started.
        self._told_started: dict[str, int] = {}

    async def no_rival(self, worker: str, uid: str) -> None:
        """Refuse (ValueError) a newcomer under the name of an agent that lives: each would replace the other
        for ever.

        An agent that has just died without its connection being closed is given the time to be missed.
        """
        if self._membership.alive_since(worker, uid, time.monotonic() - RIVAL_S):
            asked_s = time.monotonic()
            await asyncio.sleep(RIVAL_S)
            if self._membership.alive_since(worker, uid, asked_s):
                raise ValueError(
                    f"a worker called {worker!r} is taking part already; give this one another "
                    "--aegis-worker-name"
                )

    async def nobody_left(self) -> bool:
        """Whether all agents that are known have ended, as they have when a scheduler starts the job anew.

        One that lives shows that it hasn't: the newcomer may be of an allocation that counts for itself.

        Who has just died without its connection being closed is given the time to be missed.
        """
        asked_s = time.monotonic()
        if self._membership.anybody_since(asked_s - RIVAL_S):
            await asyncio.sleep(RIVAL_S)
            return not self._membership.anybody_since(asked_s)
        return True

    def sort_in(self, status: Status, event: Event, message: Message, now_s: float) -> Event | None:
        """The event if it is to be put in line now; None if it is known already, or an Error that waits.

        Repeated reports are dropped here, so that the journal holds each fact once.
        """
        if isinstance(event, (Error, Independent)) and not _is_seated(status, message):
            return None  # Only who takes part in an incarnation can know how it ended; a spare doesn't.
        if isinstance(event, Error):
            if event.worker not in self._membership.evidence and _is_recent(status, message):
                clock = self._membership.clock(event.uid, now_s)
                evidence = Evidence(event.worker, now_s, event.failures, event.reason, event.clues, clock)
                timed = msgspec.structs.replace(event, clock=tuple(clock) if clock else None)
                self._membership.evidence[event.worker] = (evidence, timed)
            return None
        if isinstance(event, Started):
            if self._told_started.get(message.uid) == message.incarnation:
                return None
            if len(self._told_started) > 2 * len(status.workers) + STARTED_MIN:
                self._told_started = {
                    uid: told for uid, told in self._told_started.items() if self._membership.knows(uid)
                }
            self._told_started[message.uid] = message.incarnation
            return event
        return event if step(status, event, 0.0).status is not status else None

    def verdict(self, status: Status, suspects: frozenset[str], now_s: float) -> Verdict:
        """Whose failure came first, as far as the Errors that wait say."""
        waiting = [evidence for evidence, _ in self._membership.evidence.values()]
        expected = sum(not worker.finished and not worker.gone for worker in status.workers)
        return attribute(waiting, suspects, expected, now_s, self._attribution_s)

    def attributed(
        self, status: Status, suspects: frozenset[str], in_line: list[Event], now_s: float
    ) -> list[Error]:
        """The Errors that have waited, the root's first, once it is clear whose failure came first."""
        if not self._membership.evidence:
            return []
        deciding = status.phase is Phase.RUN_COMMAND or status.mode is Mode.INDEPENDENT
        verdict = self.verdict(status, suspects, now_s)
        if deciding and verdict.root is None and not any(isinstance(event, Lost) for event in in_line):
            return []
        errors = [error for _, error in self._membership.evidence.values()]
        errors.sort(key=lambda error: error.worker != verdict.root)
        self._membership.evidence.clear()
        return errors


def check_speaker(spec: JobSpec, subject: str, message: Message) -> None:
    """The bus lets a worker publish on its own subject only; what it says there is of itself, too.

    BadMessage if it isn't.
    """
    try:
        rightful = subjects.report(spec.namespace, spec.job_name, message.worker)
    except ValueError as error:
        raise BadMessage(f"cannot read a message: {error}") from error
    if subject != rightful:
        raise BadMessage(f"cannot read a message: {message.worker!r} has another subject")


def _is_seated(status: Status, message: Message) -> bool:
    worker = status.worker(message.worker)
    return worker is not None and worker.uid == message.uid


def _is_recent(status: Status, message: Message) -> bool:
    """Errors are worth keeping until the next start of training, so that consequences are recorded too."""
    recent = status.phase is Phase.RUN_COMMAND or status.phase in RECOVERING
    recent = recent or status.mode is Mode.INDEPENDENT
    return recent and message.incarnation == status.incarnation
