"""Notes to the control plane: what has happened, kept while it can't be reached, delivered once each."""

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

    def __init__(self, blank: Note, address: PlaneAddress, key: NKey) -> None:
        """`blank`: a note with nothing in it but who writes. `key`: what the writer's JWT is for."""
        self._blank = blank
        self._address = address
        self._key = key
        self._waiting: deque[Anomaly] = deque(maxlen=KEPT_MAX)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._added = asyncio.Event()
        self._number = 0

    def put(self, anomalies: Sequence[Anomaly]) -> None:
        """Have these delivered. When too many wait, the oldest are dropped."""
        self._waiting.extend(anomalies)
        if self._loop is not None and anomalies:
            try:
                self._loop.call_soon_threadsafe(self._added.set)
            except RuntimeError:
                return  # The loop has ended with the link.

    async def deliver(self, place: Callable[[], tuple[Place, str]]) -> None:
        """Deliver what is put, until cancelled. `place`: first contact's outcome, and the newest JWT."""
        self._loop = asyncio.get_running_loop()
        while True:
            if not self._waiting:
                await self._added.wait()
            self._added.clear()
            # When all nodes have something to report at once, they shouldn't all connect at once.
            await asyncio.sleep(random.uniform(0.0, SPREAD_S))
            if self._waiting:
                await self._deliver(self._next_note(), place)

    def _next_note(self) -> Note:
        self._number += 1
        taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), notes.ANOMALIES_MAX))]
        return msgspec.structs.replace(self._blank, number=self._number, anomalies=tuple(taken))

    async def _deliver(self, note: Note, place: Callable[[], tuple[Place, str]]) -> None:
        retry_s = RETRY_S
        while True:
            known, jwt = place()
            try:
                host, port = self._address.host, self._address.port
                await asyncio.to_thread(
                    notes.send, host, port, known.certificate_pem, self._key, jwt, note, TIMEOUT_S
                )
                return
            except NoteRefused as refusal:
                if not refusal.retry:
                    logger.warning("%d anomalies are not reported: %s", len(note.anomalies), refusal)
                    return
                logger.info("%s; trying again in %g s", refusal, retry_s)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_S_MAX)
