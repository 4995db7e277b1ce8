"""Which waiting spares have passed their checks: only they make an eviction possible."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from aegis_elastic.control.controllers.contract import Applied
from aegis_elastic.core.events import Event, Fit, Noted
from aegis_elastic.core.model import Status, Worker
from aegis_elastic.core.protocol.messages import Message, ReportData

logger = logging.getLogger(__name__)

UNFIT = "spare.unfit"


class FitnessFacts(msgspec.Struct, frozen=True):
    """What a spare's agent found of its node."""

    fit: bool
    reason: Annotated[str, msgspec.Meta(max_length=2000)] = ""


_decoder = msgspec.json.Decoder(FitnessFacts)


class SpareController:
    """One job's."""

    def __init__(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed
        self._last_facts: dict[str, bytes] = {}
        self._waiting: dict[str, Worker] = {}

    def on_report(self, report: Message, now_s: float) -> None:
        """Feed the outcome when a spare's checks have ended."""
        data = report.data
        if not isinstance(data, ReportData) or report.uid not in self._waiting:
            return
        if self._waiting[report.uid].name != report.worker:
            return
        facts = bytes(data.watched.get("fitness", b""))
        if not facts or self._last_facts.get(report.uid) == facts:
            return
        self._last_facts[report.uid] = facts
        try:
            found = _decoder.decode(facts)
        except msgspec.MsgspecError as error:
            logger.warning("cannot read what %s reports of its fitness: %s", report.worker, error)
            return
        self._feed(Fit(report.worker, report.uid, found.fit, found.reason))
        if not found.fit:
            # For `step` it is what it was before; people want to know that nobody can take a place.
            node = self._waiting[report.uid].node_name
            self._feed(Noted(report.worker, node, UNFIT, found.reason, time.time()))

    def on_transitions(self, status: Status, transitions: Sequence[Applied]) -> None:
        """Keep who waits; one that waits again, after it had ranks, is checked and fed again."""
        self._waiting = {spare.uid: spare for spare in status.spares}
        self._last_facts = {uid: facts for uid, facts in self._last_facts.items() if uid in self._waiting}

    def due_s(self) -> float:
        """It waits for no time."""
        return math.inf

    def events_due(self, now_s: float) -> Sequence[Event]:
        """Never due."""
        return ()

    async def close(self) -> None:
        """It holds nothing."""
