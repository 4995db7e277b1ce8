"""A connection to the bus that outlives servers, networks and JWTs.

The bus is at-most-once and state on it is level-triggered: a message says how things are, the newest one
replaces those before it. So the connection promises no more than this: the *newest* message of each subject
reaches the server, however often the connection broke meanwhile, perhaps twice; subscriptions are in force
whenever it is connected.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription as NatsSubscription

from aegis_elastic.bus import subjects, tls
from aegis_elastic.bus.client import PING_INTERVAL_S, Link, retry_s
from aegis_elastic.bus.credentials import Credentials
from aegis_elastic.bus.errors import BusClosed, BusError, BusRefused, BusUnavailable, BusUsage
from aegis_elastic.bus.outbox import Outbox
from aegis_elastic.bus.subscription import Callback, Message, Subscription, check_message

logger = logging.getLogger(__name__)

ATTEMPT_TIMEOUT_S = 5.0
RETIRE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0

T = TypeVar("T")


def _ignore(_: str = "") -> None:
    return None


class BusConnection:
    """Our end of the bus. Make it with `connect`; use it from one event loop; end it with `close`.

    The callbacks are plain functions, called in the event loop: `on_disconnect(reason)`, `on_reconnect()`,
    `on_violation(text)` when the server refuses a subject to us, and `on_refused(text)` when it refuses the
    credentials themselves on a reconnect: tries go on, but only `renew` with a good JWT will end them.
    """

    def __init__(
        self,
        urls: Sequence[str],
        credentials: Credentials,
        context: ssl.SSLContext | None,
        name: str,
        on_disconnect: Callable[[str], None],
        on_reconnect: Callable[[], None],
        on_violation: Callable[[str], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._urls = list(urls)
        self._credentials = credentials
        self._context = context
        self._name = name
        self._on_disconnect, self._on_reconnect = on_disconnect, on_reconnect
        self._on_violation, self._on_refused = on_violation, on_refused
        self._subscriptions: dict[Subscription, None] = {}
        self._attached: dict[Link, dict[Subscription, NatsSubscription]] = {}
        self._listeners: list[Callable[[], None]] = []
        self._outbox = Outbox()
        self._link: Link | None = None
        self._connected = asyncio.Event()
        self._switch = asyncio.Lock()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._supervisor: asyncio.Task[None] | None = None
        self._attention = asyncio.Event()
        # Clear while a renewal changes links: publishers wait, so that nothing overtakes what went before.
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._closed = False

    @classmethod
    async def connect(
        cls,
        urls: Sequence[str],
        credentials: Credentials,
        *,
        name: str,
        ca_pem: str | None = None,
        on_disconnect: Callable[[str], None] = _ignore,
        on_reconnect: Callable[[], None] = _ignore,
        on_violation: Callable[[str], None] = _ignore,
        on_refused: Callable[[str], None] = _ignore,
        timeout_s: float = 10.0,
    ) -> "BusConnection":
        """Connect for the first time, trying for `timeout_s`; `name` is the worker's uid, which the server
        tells.

        With `ca_pem` the connection is TLS and trusts that certificate only. Raises BusRefused at once when
        the server refuses the credentials, BusUnavailable when none of `urls` can be reached in time.
        """
        if not urls:
            raise BusUsage("cannot connect to the bus: give at least one URL")
        context = tls.client_context(ca_pem) if ca_pem is not None else None
        callbacks = (on_disconnect, on_reconnect, on_violation, on_refused)
        bus = cls(urls, credentials, context, name, *callbacks)
        try:
            await asyncio.wait_for(bus._connect_first(timeout_s), timeout_s + ATTEMPT_TIMEOUT_S)
        except BaseException:
            await bus.close()
            raise
        bus._supervisor = asyncio.create_task(bus._supervise(), name="bus supervisor")
        return bus

    @property
    def connected(self) -> bool:
        """Whether there is a link at this moment, as far as we know (a hung server is noticed after 3 s)."""
        return self._link is not None and not self._link.lost.done()

    async def wait_connected(self, timeout_s: float) -> None:
        """Return when connected; BusUnavailable after `timeout_s`, BusClosed after `close`."""
        await self._wait_link(timeout_s)

    async def publish(self, subject: str, data: bytes) -> None:
        """Send `data`, now or at the reconnect; never raises for a broken connection.

        While disconnected only the newest message of each subject is kept, and what was sent in the last
        moments before a loss is sent again: for state, which the newest message tells in full, not for
        streams of facts. BusUsage for a malformed subject or too large a message, BusClosed after `close`.
        """
        self._check(subject, data)
        await self._flowing.wait()
        link = self._link
        if link is None or link.lost.done():
            self._outbox.put(subject, data)
            return
        self._outbox.sent(subject, data)
        try:
            await link.client.publish(subject, data)
        except (nats.errors.Error, OSError) as error:
            link.lose(str(error) or type(error).__name__)  # the outbox has it

    async def request(self, subject: str, data: bytes, timeout_s: float) -> Message:
        """Publish and return the first answer. BusUnavailable if none comes in time, or the link breaks."""
        self._check(subject, data)
        try:
            answer = await self.call(
                lambda client: client.request(subject, data, timeout=timeout_s), timeout_s
            )
        except nats.errors.NoRespondersError:
            raise BusUnavailable(f"cannot get an answer on {subject}: nobody listens there") from None
        return Message(answer.subject, answer.data, answer.reply)

    async def respond(self, message: Message, data: bytes) -> bool:
        """Answer a request; False if it asks for none, or for one anywhere but in a user's inbox.

        Whoever sends a message chooses the reply subject: without the look at it, a worker could have the
        master publish to another job.
        """
        if not subjects.is_inbox(message.reply):
            if message.reply:
                logger.warning("no answer to %s on %s: not an inbox", message.subject, message.reply)
            return False
        await self.publish(message.reply, data)
        return True

    async def subscribe(self, subject: str, callback: Callback) -> Subscription:
        """Hear `subject` (wildcards allowed) from now on, over every reconnect.

        When connected, the server knows of it on return; a subject that we may not hear shows in
        `on_violation`.
        """
        if self._closed:
            raise BusClosed(f"cannot subscribe to {subject}: the connection is closed")
        subscription = Subscription(subject, callback, self._forget)
        self._subscriptions[subscription] = None
        link = self._link
        if link is not None:
            try:
                await self._attach(link, subscription)
                await link.ping()
            except (BusUnavailable, nats.errors.Error, OSError) as error:
                logger.debug("subscription to %s waits for the reconnect: %r", subject, error)
        return subscription

    async def call(self, do: Callable[[Client], Awaitable[T]], timeout_s: float) -> T:
        """Return what `do` does with nats-py's client, waiting for a link first if there is none.

        For JetStream, which needs the client itself. BusUnavailable when the time is over or the link breaks
        before an answer: whether the server did what was asked is then unknown. nats-py's other errors pass.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        link = await self._wait_link(timeout_s)
        with link as client:
            task: asyncio.Future[T] = asyncio.ensure_future(do(client))
            try:
                left = deadline - asyncio.get_running_loop().time()
                either: set[asyncio.Future[Any]] = {task, link.lost}
                await asyncio.wait(either, timeout=left, return_when="FIRST_COMPLETED")
                if task.done():
                    return task.result()
            except (nats.errors.TimeoutError, nats.errors.ConnectionClosedError, OSError) as error:
                raise BusUnavailable(f"cannot get an answer from the bus: {error}") from error
            finally:
                task.cancel()
        why = link.lost.result() if link.lost.done() else f"no answer in {timeout_s} s"
        raise BusUnavailable(f"cannot get an answer from the bus: {why}")

    def on_new_link(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever nats-py's client is a new one (reconnect, renewal); returns the undo."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    async def renew(self, jwt: str) -> None:
        """Go over to a newer JWT, losing nothing: the next link stands before the old one is let go.

        A message that arrives in between may come twice. While disconnected the JWT is just kept for the next
        try. BusRefused if the server does not take it: the old one stays. BusUnavailable: kept for the next
        reconnect.
        """
        if self._closed:
            raise BusClosed("cannot renew a JWT: the connection is closed")
        async with self._switch:
            before, self._credentials = self._credentials, self._credentials.renewed(jwt)
            old = self._link
            if old is None:
                self._wake.set()
                return
            try:
                await self._establish()
            except BusRefused:
                self._credentials = before
                raise
        self._spawn(self._retire(old), "bus retire")

    def move(self, urls: Sequence[str]) -> None:
        """The servers are elsewhere from now on; `renew` or the next reconnect goes there."""
        self._urls = list(urls)

    async def close(self) -> None:
        """Send what is to be sent, hand on what has arrived (2 s at most), and end every task."""
        if self._closed:
            return
        self._closed = True
        self._connected.set()  # wakes those who wait for a link, to hear that there will be none
        if self._supervisor is not None:
            # nats-py swallows a cancellation that reaches it in a flush, so the loops look at `_closed` too.
            self._attention.set()
            self._wake.set()
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        link, self._link = self._link, None
        if link is not None:
            await link.retire(CLOSE_TIMEOUT_S)
            self._attached.pop(link, None)
        for subscription in self._subscriptions:
            await subscription.stop(CLOSE_TIMEOUT_S)
        self._subscriptions.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _connect_first(self, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        attempt = 0
        while True:
            try:
                return await self._establish()
            except BusUnavailable:
                delay_s = retry_s(attempt)
                if asyncio.get_running_loop().time() + delay_s > deadline:
                    raise
            await asyncio.sleep(delay_s)
            attempt += 1

    async def _supervise(self) -> None:
        while not self._closed:
            await self._attention.wait()
            self._attention.clear()
            link = self._link
            if link is not None and link.lost.done():  # else it was one that a renewal has replaced
                self._let_go(link)
                await self._reopen()

    def _let_go(self, link: Link) -> None:
        self._link = None
        self._connected.clear()
        self._outbox.lost()
        self._attached.pop(link, None)
        self._spawn(link.discard(), "bus discard")
        logger.info("bus connection lost: %s", link.lost.result())
        self._tell(self._on_disconnect, link.lost.result())

    async def _reopen(self) -> None:
        """Try for ever: at once, then after 0.1 s growing to 2 s, with jitter; a renewal cuts the wait."""
        attempt, refused = 0, ""
        while self._link is None and not self._closed:
            try:
                async with self._switch:
                    if self._link is None:  # a renewal may have been quicker
                        await self._establish()
            except BusRefused as error:
                if str(error) != refused:
                    refused = str(error)
                    self._tell(self._on_refused, refused)
            except BusUnavailable as error:
                logger.debug("bus reconnect: %s", error)
            else:
                break
            try:
                await asyncio.wait_for(self._wake.wait(), retry_s(attempt))
                self._wake.clear()
            except asyncio.TimeoutError:
                attempt += 1
        if not self._closed:
            self._tell(self._on_reconnect)

    async def _establish(self) -> None:
        """Open a link to any of the servers, with all subscriptions and unsent messages, and make it ours."""
        problem: BusError | None = None
        for url in random.sample(self._urls, len(self._urls)):
            try:
                link = await Link.open(
                    url,
                    self._credentials,
                    context=self._context,
                    name=self._name,
                    on_violation=lambda text: self._tell(self._on_violation, text),
                    timeout_s=ATTEMPT_TIMEOUT_S,
                )
                break
            except BusRefused as error:
                problem = error
            except BusUnavailable as error:
                problem = problem or error
        else:
            assert problem is not None
            raise problem
        try:
            await self._furnish(link)
        except (BusUnavailable, nats.errors.Error, OSError) as error:
            self._attached.pop(link, None)
            await link.discard()
            if self._link is None:
                self._outbox.lost()
            raise BusUnavailable(f"cannot use the new connection: {error}") from error
        finally:
            self._flowing.set()
        self._link = link
        link.lost.add_done_callback(lambda _: self._attention.set())
        self._connected.set()
        self._spawn(self._keep_alive(link), "bus pings")
        for listener in tuple(self._listeners):
            self._tell(listener)

    async def _furnish(self, link: Link) -> None:
        """Subscribe to all that is wished for, then send all that waits; on return the link can take over."""
        self._attached[link] = {}
        while True:
            for wish in [*self._subscriptions]:
                await self._attach(link, wish)
            await link.ping()
            if self._link is not None and self._flowing.is_set():
                self._flowing.clear()
                await self._settle(self._link)
            while (waiting := self._outbox.take()) is not None:
                self._outbox.sent(*waiting)
                await link.client.publish(*waiting)
            if self._closed:
                raise BusUnavailable("closed meanwhile")
            # No await between this look and the caller's switch: nothing can slip between.
            if all(wish in self._attached[link] for wish in self._subscriptions):
                return

    async def _settle(self, link: Link) -> None:
        """Wait until the server has what was published on the link that is about to be replaced."""
        self._outbox.mark()
        try:
            await link.ping()
            self._outbox.confirm()
        except BusUnavailable:
            self._outbox.lost()

    async def _attach(self, link: Link, wish: Subscription) -> None:
        attached = self._attached.get(link)
        if attached is not None and wish not in attached:
            attached[wish] = await link.client.subscribe(wish.subject, cb=wish.deliver)

    async def _forget(self, wish: Subscription) -> None:
        self._subscriptions.pop(wish, None)
        for link, attached in self._attached.items():
            subscription = attached.pop(wish, None)
            if subscription is not None and not link.lost.done():
                try:
                    await subscription.unsubscribe()
                except nats.errors.Error as error:  # the link broke just now: it is gone with it
                    logger.debug("unsubscribe from %s: %r", wish.subject, error)

    async def _keep_alive(self, link: Link) -> None:
        """Ping until the link is lost: a hung server closes nothing. An answer confirms what went before."""
        while True:
            if self._link is link:
                self._outbox.mark()
            try:
                await link.ping()
            except BusUnavailable:
                return
            if self._link is link:
                self._outbox.confirm()
            await asyncio.wait({link.lost}, timeout=PING_INTERVAL_S)

    async def _retire(self, link: Link) -> None:
        await link.retire(RETIRE_TIMEOUT_S)
        self._attached.pop(link, None)

    async def _wait_link(self, timeout_s: float) -> Link:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self._closed:
            if self._link is not None:
                return self._link
            left = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._connected.wait(), left)
            except asyncio.TimeoutError:
                raise BusUnavailable(f"cannot reach the bus: not connected for {timeout_s} s") from None
        raise BusClosed("cannot use the bus: the connection is closed")

    def _check(self, subject: str, data: bytes) -> None:
        if self._closed:
            raise BusClosed(f"cannot publish on {subject}: the connection is closed")
        check_message(subject, data)

    def _spawn(self, work: Awaitable[None], name: str) -> None:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell(self, callback: Callable[..., None], *arguments: str) -> None:
        try:
            callback(*arguments)
        except Exception:
            logger.exception("a callback of the bus connection failed")
