"""The agent's notes on their way to the plane: kept while it can't be reached, delivered once each."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from aegis_elastic.agents.plane.address import PlaneAddress
from aegis_elastic.bus.contact import notes
from aegis_elastic.bus.contact.first_contact import Place
from aegis_elastic.bus.contact.notes import Note, NoteRefused
from aegis_elastic.bus.credentials import NKey
from aegis_elastic.core.detection.anomalies import Anomaly

logger = logging.getLogger(__name__)

KEPT_MAX = 256
TIMEOUT_S = 3.0
SPREAD_S = 1.0
RETRY_S, RETRY_S_MAX = 2.0, 60.0


class NoteDelivery:
    """`put` from any thread; `deliver` is a task of the link's loop, once first contact has been made."""

    def __init__(self, blank: Note, door: PlaneAddress, key: NKey) -> None:
        """`blank`: a note with nothing in it but who writes. `key` is the one that the writer's JWT is
        for.
        """
        self._blank = blank
        self._address = door
        self._key = key
        self._kept: deque[Anomaly] = deque(maxlen=KEPT_MAX)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._come = asyncio.Event()
        self._number = 0

    def put(self, anomalies: Sequence[Anomaly]) -> None:
        """Have these delivered. When too many wait, the oldest are dropped."""
        self._kept.extend(anomalies)
        if self._loop is not None and anomalies:
            try:
                self._loop.call_soon_threadsafe(self._come.set)
            except RuntimeError:
                return  # The loop has ended with the link.

    async def deliver(self, place: Callable[[], tuple[Place, str]]) -> None:
        """Deliver what is put, until cancelled. `place`: first contact's outcome, and the newest JWT."""
        self._loop = asyncio.get_running_loop()
        while True:
            if not self._kept:
                await self._come.wait()
            self._come.clear()
            # When all nodes have something to tell at once, they shouldn't all knock at once.
            await asyncio.sleep(random.uniform(0.0, SPREAD_S))
            if self._kept:
                await self._deliver(self._take(), place)

    def _take(self) -> Note:
        self._number += 1
        taken = [self._kept.popleft() for _ in range(min(len(self._kept), notes.ANOMALIES_MAX))]
        return msgspec.structs.replace(self._blank, number=self._number, anomalies=tuple(taken))

    async def _deliver(self, note: Note, place: Callable[[], tuple[Place, str]]) -> None:
        retry_s = RETRY_S
        while True:
            where, jwt = place()
            try:
                host, port = self._address.host, self._address.port
                await asyncio.to_thread(
                    notes.send, host, port, where.certificate_pem, self._key, jwt, note, TIMEOUT_S
                )
                return
            except NoteRefused as refusal:
                if not refusal.retry:
                    logger.warning("%d anomalies are not told: %s", len(note.anomalies), refusal)
                    return
                logger.info("%s; trying again in %g s", refusal, retry_s)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_S_MAX)
