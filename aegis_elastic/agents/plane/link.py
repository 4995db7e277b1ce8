"""An agent's link to the control plane: first contact, the bus, and a report that is repeated with every
heartbeat.

The link lives in a thread of its own with an asyncio loop. What arrives goes into the agent's mailbox as
events (`agents.mailbox.events`); what the agent sends is one newest report, at once and then with every
heartbeat, because the bus may lose anything. The link never gives up trying to reach the plane: losing it
doesn't touch the training.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from aegis_elastic.agents.mailbox.events import (
    BusChanged,
    FinalReportArrived,
    Joined,
    NotJoined,
    ReexecRequested,
    Refused,
)
from aegis_elastic.agents.mailbox.mailbox import Mailbox
from aegis_elastic.agents.plane.address import LookUp, PlaneAddress
from aegis_elastic.agents.plane.notes import NoteDelivery
from aegis_elastic.agents.plane.trimmed_report import without_texts
from aegis_elastic.bus import subjects
from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.bus.contact import address, first_contact
from aegis_elastic.bus.contact.first_contact import ContactError, Dismissed, Hello, Place
from aegis_elastic.bus.contact.notes import Note
from aegis_elastic.bus.credentials import Credentials, NKey, expires_at_s
from aegis_elastic.bus.errors import BusError
from aegis_elastic.bus.subscription import Message as BusMessage
from aegis_elastic.core.detection.anomalies import Anomaly
from aegis_elastic.core.protocol import directives, messages
from aegis_elastic.core.protocol.messages import BadMessage, Message, MessageType, ReportData, WirePhase
from aegis_elastic.core.protocol.orders import Order

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
# An order that is merely repeated is answered anew when the last answer is older: from the times in it the
# master knows our clock.
ECHO_S = 30.0
CONTACT_TIMEOUT_S = 10.0
RETRY_S_MIN = 0.05
RETRY_S_MAX = 2.0
# The bus has been gone for longer than a restart of its server takes: the plane may be elsewhere now.
SEEK_S = 5.0
# The master renews a JWT when a third of its life is left. A restarted one doesn't know ours: then we ask.
OWN_RENEWAL_SHARE = 0.2


@dataclass(frozen=True)
class Identity:
    """Who this agent is. `worker` is kept over its lives, `uid` names this one; `attempt` is how often the
    scheduler has started the job anew.
    """

    namespace: str
    job: str
    worker: str
    uid: str
    node_name: str
    node_ip: str
    nproc: int
    ordinal: int = -1
    attempt: int = 0


class PlaneLink:
    """Owns the thread and the connection. `start` it, give it reports, `close` it."""

    def __init__(
        self,
        identity: Identity,
        endpoint: tuple[str, int],
        secret: bytes | None,
        mailbox: Mailbox,
        parks: bool = False,
        look_up: LookUp = address.look_up,
    ) -> None:
        """`endpoint`: see `PlaneAddress`. `parks`: when dismissed, stay on the bus until the job's end."""
        self._identity = identity
        self._address = PlaneAddress(endpoint, self._hello, secret, look_up)
        self._mailbox = mailbox
        self._parks = parks
        self._parked = False
        self._key = NKey.generate()
        self._bus: BusConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._report: bytes | None = None
        self._order_times: tuple[float, float] | None = None
        self._reported_s = 0.0
        self._wake: asyncio.Event | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aegis-link", daemon=True)
        self._join_timeout_s = self._started_s = 0.0
        self._late = False
        self._contacting: asyncio.Task[None] | None = None
        self._seeking: asyncio.Task[None] | None = None
        self._renew_at_s = float("inf")
        self._generation = 0
        self._place: Place | None = None
        self._jwt = ""
        writer = (identity.namespace, identity.job, identity.worker, identity.uid)
        self._notes = NoteDelivery(Note(*writer, 0, ()), self._address, self._key)

    @property
    def identity(self) -> Identity:
        """Who this agent is."""
        return self._identity

    @property
    def connected(self) -> bool:
        """Whether the bus is there at this moment, as far as we know."""
        return self._bus is not None and self._bus.connected

    @property
    def echo_due(self) -> bool:
        """Whether our newest report is so old that the master can't know our clock from it."""
        return time.monotonic() - self._reported_s > ECHO_S

    def start(self, join_timeout_s: float) -> None:
        """Begin to join; NotJoined goes into the mailbox if that takes longer than `join_timeout_s`."""
        self._join_timeout_s = join_timeout_s
        self._started_s = time.monotonic()
        self._thread.start()

    def report(
        self, kind: MessageType, phase: WirePhase, seq_num: int, incarnation: int, data: ReportData
    ) -> None:
        """Make this the newest report: sent at once and repeated until another takes its place."""
        identity = self._identity
        data = msgspec.structs.replace(data, heard=self._order_times)
        self._reported_s = time.monotonic()
        message = Message(
            aegis_name=identity.job,
            aegis_namespace=identity.namespace,
            worker=identity.worker,
            type=kind,
            phase=phase,
            data=data,
            time_stamp=time.time(),
            seq_num=seq_num,
            uid=identity.uid,
            incarnation=incarnation,
        )
        try:
            self._report = messages.encode(message)
        except BadMessage as error:
            logger.error("reported without the ranks' own output: %s", error)
            self._report = messages.encode(msgspec.structs.replace(message, data=without_texts(data)))
        self._wake_loop()

    def note(self, anomalies: Sequence[Anomaly]) -> None:
        """Deliver these to the master, once each, as soon as it can be reached. From any thread."""
        self._notes.put(anomalies)

    def contact_again(self, reason: str) -> None:
        """Make first contact again, as the same life of this agent."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._contact_again, reason)

    def close(self, timeout_s: float = 3.0) -> None:
        """Send what is unsent, leave the bus, end the thread; wait for its end `timeout_s` at most."""
        self._closing.set()
        self._wake_loop()
        if self._thread.is_alive() and timeout_s > 0:
            self._thread.join(timeout_s)

    def _wake_loop(self) -> None:
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            try:
                loop.call_soon_threadsafe(wake.set)
            except RuntimeError:
                return  # The loop has ended with the link.

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:  # the thread's last resort: the agent must know, and train on
            logger.exception("the link to the control plane broke")
            self._mailbox.put(NotJoined(f"our link to the control plane broke: {error}"))

    async def _main(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        while True:
            place = await self._first_contact()
            if place is None:
                return
            try:
                await self._join_bus(place)
                break
            except BusError as error:
                # Its port may be blocked although first contact works: that is no way to join either.
                where = place.bus_url(self._address.host)
                self._report_late(f"cannot reach the bus at {where}: {error}")
                await self._pause(RETRY_S_MAX)
        self._generation, self._place = place.welcome.generation, place
        self._address.certificate = place.certificate_pem
        if place.welcome.parked:
            self._park(place.welcome.parked)
        else:
            self._mailbox.put(Joined(place.welcome, place.proven))
        delivering = asyncio.create_task(self._notes.deliver(self._place_and_jwt), name="aegis notes")
        delivering.add_done_callback(_log_failure)
        try:
            await self._heartbeats()
        finally:
            delivering.cancel()
            if self._bus is not None:
                await self._bus.close()

    def _place_and_jwt(self) -> tuple[Place, str]:
        assert self._place is not None
        return self._place, self._jwt

    async def _first_contact(self) -> Place | None:
        """Try until it succeeds. None when there is no use in it, or when the agent ends."""
        attempt = 0
        while not self._closing.is_set():
            try:
                return await asyncio.to_thread(self._address.make_contact, self._attempt_s())
            except ContactError as error:
                if not error.retry:
                    self._mailbox.put(Refused(str(error), usage=not isinstance(error, Dismissed)))
                    return None
                self._report_late(str(error))
            attempt += 1
            await self._pause(min(RETRY_S_MIN * 2**attempt, RETRY_S_MAX) * random.uniform(0.5, 1.0))
        return None

    def _attempt_s(self) -> float:
        """How long an attempt may take: one ends with the join timeout, so all nodes give up together."""
        left_s = self._started_s + self._join_timeout_s - time.monotonic()
        return CONTACT_TIMEOUT_S if left_s <= 0 else min(CONTACT_TIMEOUT_S, max(left_s, RETRY_S_MAX))

    def _report_late(self, reason: str) -> None:
        """Put NotJoined into the mailbox, once, when joining takes longer than the timeout."""
        if not self._late and time.monotonic() - self._started_s >= self._join_timeout_s:
            self._late = True
            self._mailbox.put(NotJoined(reason))

    def _hello(self) -> Hello:
        me = self._identity
        return Hello(
            namespace=me.namespace,
            job=me.job,
            worker=me.worker,
            uid=me.uid,
            node_name=me.node_name,
            node_ip=me.node_ip,
            nproc=me.nproc,
            ordinal=me.ordinal,
            user_public_key=self._key.public,
            nonce=first_contact.new_nonce(),
            parks=self._parks,
            attempt=me.attempt,
        )

    async def _join_bus(self, place: Place) -> None:
        me = self._identity
        self._bus = await BusConnection.connect(
            [place.bus_url(self._address.host)],
            Credentials(self._key, place.welcome.jwt),
            name=me.uid,
            ca_pem=place.bus_ca,
            on_disconnect=self._on_bus_gone,
            on_reconnect=lambda: self._mailbox.put(BusChanged(True)),
            on_violation=lambda text: logger.error("the bus refused us something: %s", text),
            on_refused=lambda text: self._contact_again(f"the bus refuses our credentials: {text}"),
            timeout_s=self._attempt_s(),
        )
        self._set_jwt(place.welcome.jwt)
        await self._bus.subscribe(subjects.order_all(me.namespace, me.job), self._on_order)
        await self._bus.subscribe(subjects.order(me.namespace, me.job, me.worker), self._on_directive)

    def _on_bus_gone(self, reason: str) -> None:
        self._mailbox.put(BusChanged(False, reason))
        if self._seeking is None or self._seeking.done():
            self._seeking = asyncio.create_task(self._seek(), name="aegis plane lookup")
            self._seeking.add_done_callback(_log_failure)

    async def _seek(self) -> None:
        """The bus reconnects where it was. Meanwhile see whether the plane's name leads elsewhere by now."""
        while not self._closing.is_set():
            await asyncio.sleep(SEEK_S * random.uniform(0.8, 1.2))
            if self.connected:
                return
            if await asyncio.to_thread(self._address.moved):
                self._contact_again("the control plane is at another address")

    async def _heartbeats(self) -> None:
        assert self._wake is not None and self._bus is not None
        subject = subjects.report(self._identity.namespace, self._identity.job, self._identity.worker)
        while True:
            if self._report is not None and not self._parked:
                await self._bus.publish(subject, self._report)
            if self._closing.is_set():
                return
            if time.time() >= self._renew_at_s:
                self._contact_again("our JWT runs out")
            await self._pause(HEARTBEAT_S)

    async def _pause(self, seconds: float) -> None:
        assert self._wake is not None
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except asyncio.TimeoutError:
            return
        self._wake.clear()

    async def _on_order(self, raw: BusMessage) -> None:
        received_s = time.time()
        try:
            message = messages.decode(raw.data)
        except BadMessage as error:
            logger.warning("ignored a malformed order: %s", error)
            return
        if isinstance(message.data, Order):
            self._order_times = (message.time_stamp, received_s)
            self._mailbox.put(message.data)

    async def _on_directive(self, raw: BusMessage) -> None:
        try:
            directive = directives.decode(raw.data)
        except BadMessage as error:
            logger.warning("ignored a malformed directive: %s", error)
            return
        if directive.uid != self._identity.uid:
            return
        if isinstance(directive, directives.JwtRenewal):
            await self._use_jwt(directive.jwt)
        elif isinstance(directive, directives.Dismissal):
            if self._parks:
                self._park(directive.reason)
            else:
                self._mailbox.put(Refused(directive.reason, usage=False))
        elif self._parked:
            return  # To those who have no part only the end matters.
        elif isinstance(directive, directives.OperatorCheck):
            self._mailbox.put(directive)
        elif isinstance(directive, directives.Rejoin):
            self._contact_again(directive.reason)
        elif isinstance(directive, directives.Reexec):
            self._mailbox.put(ReexecRequested(directive.reason))
        else:
            self._mailbox.put(FinalReportArrived(directive.report))

    def _park(self, reason: str) -> None:
        """From now on only listen for the end of the job."""
        self._parked = True
        self._mailbox.put(Refused(reason, usage=False, parked=True))

    def _contact_again(self, reason: str) -> None:
        """Start first contact anew: the plane doesn't know us any more, or our JWT runs out."""
        assert self._loop is not None
        if self._contacting is not None and not self._contacting.done():
            return  # One attempt at a time: the reason for it may come with every heartbeat.
        logger.info("first contact again: %s", reason)
        self._contacting = self._loop.create_task(self._repeat_contact(), name="aegis first contact again")
        self._contacting.add_done_callback(_log_failure)

    async def _repeat_contact(self) -> None:
        self._late = True  # It was joined once: no NotJoined any more.
        place = await self._first_contact()
        if place is not None:
            assert self._bus is not None
            self._place = place
            self._bus.move([place.bus_url(self._address.host)])
            await self._use_jwt(place.welcome.jwt)
            if place.welcome.parked:
                self._park(place.welcome.parked)
            elif self._parked or place.welcome.generation != self._generation:
                self._parked = False
                self._generation = place.welcome.generation
                self._mailbox.put(Joined(place.welcome, place.proven))

    async def _use_jwt(self, jwt: str) -> None:
        assert self._bus is not None
        await self._bus.renew(jwt)
        self._set_jwt(jwt)

    def _set_jwt(self, jwt: str) -> None:
        self._jwt = jwt
        now_s, until_s = time.time(), expires_at_s(jwt) or math.inf
        self._renew_at_s = until_s - OWN_RENEWAL_SHARE * (until_s - now_s) if until_s < math.inf else math.inf


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s failed: %s", task.get_name(), task.exception())
