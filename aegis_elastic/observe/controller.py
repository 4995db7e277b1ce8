"""The metrics' controller: it follows the job's transitions and serves the metrics."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from aegis_elastic.core.accounts.journal import BadJournal, Line, takes_long, walk
from aegis_elastic.core.detection.samples import Usage
from aegis_elastic.core.events import Event
from aegis_elastic.core.machine import Transition
from aegis_elastic.core.model import Status
from aegis_elastic.core.protocol.messages import Message
from aegis_elastic.observe.endpoint import Endpoint
from aegis_elastic.observe.metrics import Metrics

logger = logging.getLogger(__name__)


class MetricsController:
    """See `control.controllers.contract.Controller`."""

    def __init__(
        self,
        usage: Callable[[], Mapping[str, Usage]],
        earlier: Callable[[], Iterable[Line]],
        now: Callable[[], float] = time.time,
    ) -> None:
        """`earlier`: the journal so far, the job's first line included."""
        self._now = now
        self._metrics = Metrics(usage, now)
        self._endpoint = Endpoint(self._metrics.registry)
        self._earlier: Callable[[], Iterable[Line]] | None = earlier

    async def open(self, host: str, port: int) -> str:
        """Serve; returns the URL, "" if it can't be: that is logged, and no reason to end."""
        try:
            return await self._endpoint.open(host, port)
        except (OSError, OverflowError) as error:
            logger.error("cannot serve metrics on %s port %d: %s", host, port, error)
            return ""

    def on_report(self, report: Message, now_s: float) -> None:
        """Nothing: metrics follow transitions."""

    def on_transitions(self, status: Status, transitions: Sequence[tuple[Event, Transition]]) -> None:
        """Count these; at the first call, with none, those of the journal."""
        try:
            if self._earlier is not None:
                self._follow_earlier(self._earlier)
                self._earlier = None
            at = self._now()
            for event, transition in transitions:
                self._metrics.follow(event, transition, at)
        except Exception:  # we are put aside for it, and old numbers must not pass for new ones
            self._endpoint.stop()
            raise

    def due_s(self) -> float:
        """Never: whoever reads asks."""
        return math.inf

    def events_due(self, now_s: float) -> Sequence[Event]:
        """Nothing."""
        return ()

    def _follow_earlier(self, earlier: Callable[[], Iterable[Line]]) -> None:
        try:
            lines = list(earlier())
            if takes_long(lines):
                logger.warning("the metrics begin anew after a journal of %d lines", len(lines))
                lines = lines[-1:]
            for walked in walk(lines):
                self._metrics.follow(walked.line.event, walked.made, walked.line.t)
        except (BadJournal, OSError) as error:
            logger.warning("the metrics begin anew: %s", error)

    async def close(self) -> None:
        """Stop serving."""
        await self._endpoint.close()
