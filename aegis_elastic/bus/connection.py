"""A connection to the bus that outlives servers, networks and JWTs.

The bus is at-most-once and state on it is level-triggered: a message has the whole state, the newest one
replaces those before it. So the connection guarantees only this: the *newest* message of each subject reaches
the server, however often the connection broke meanwhile, perhaps twice; subscriptions are in force whenever
it is connected.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client as NatsClient
from nats.aio.subscription import Subscription as NatsSubscription

from aegis_elastic.bus import subjects, tls
from aegis_elastic.bus.client import PING_INTERVAL_S, BusClient, retry_s
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
    credentials themselves on a reconnect: attempts go on, but only `renew` with a good JWT will end them.
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
        self._attached: dict[BusClient, dict[Subscription, NatsSubscription]] = {}
        self._listeners: list[Callable[[], None]] = []
        self._outbox = Outbox()
        self._client: BusClient | None = None
        self._connected = asyncio.Event()
        self._switching = asyncio.Lock()
        self._retry_now = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._supervisor: asyncio.Task[None] | None = None
        self._client_lost = asyncio.Event()
        # Clear while a renewal changes clients: publishers wait, so that no message overtakes an earlier one.
        self._publishing = asyncio.Event()
        self._publishing.set()
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
        """Connect for the first time, trying for `timeout_s`; `name` is the worker's uid, which advisories
        show.

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
        """Whether it is connected now, as far as we know (a hung server is noticed after 3 s)."""
        return self._client is not None and not self._client.lost.done()

    async def wait_connected(self, timeout_s: float) -> None:
        """Return when connected; BusUnavailable after `timeout_s`, BusClosed after `close`."""
        await self._wait_client(timeout_s)

    async def publish(self, subject: str, data: bytes) -> None:
        """Send `data`, now or at the reconnect; never raises for a broken connection.

        While disconnected only the newest message of each subject is kept, and what was sent just before a
        loss is sent again. So it is for state, which the newest message has in full, not for streams of
        events. BusUsage for a malformed subject or too large a message, BusClosed after `close`.
        """
        self._check(subject, data)
        await self._publishing.wait()
        client = self._client
        if client is None or client.lost.done():
            self._outbox.put(subject, data)
            return
        self._outbox.sent(subject, data)
        try:
            await client.nats.publish(subject, data)
        except (nats.errors.Error, OSError) as error:
            client.lose(str(error) or type(error).__name__)  # the outbox has it

    async def request(self, subject: str, data: bytes, timeout_s: float) -> Message:
        """Publish and return the first answer. BusUnavailable if none comes in time, or the connection
        breaks.
        """
        self._check(subject, data)
        try:
            answer = await self.call(
                lambda nats_client: nats_client.request(subject, data, timeout=timeout_s), timeout_s
            )
        except nats.errors.NoRespondersError:
            raise BusUnavailable(f"cannot get an answer on {subject}: nobody listens there") from None
        return Message(answer.subject, answer.data, answer.reply)

    async def respond(self, message: Message, data: bytes) -> bool:
        """Answer a request; False if it has no reply subject, or one that is no user's inbox.

        The sender chooses the reply subject: without this check a worker could make the master publish to
        another job.
        """
        if not subjects.is_inbox(message.reply):
            if message.reply:
                logger.warning("no answer to %s on %s: not an inbox", message.subject, message.reply)
            return False
        await self.publish(message.reply, data)
        return True

    async def subscribe(self, subject: str, callback: Callback) -> Subscription:
        """Receive `subject` (wildcards allowed) from now on, over every reconnect.

        When connected, the server knows of it on return; a subject that is not allowed to us shows in
        `on_violation`.
        """
        if self._closed:
            raise BusClosed(f"cannot subscribe to {subject}: the connection is closed")
        subscription = Subscription(subject, callback, self._detach)
        self._subscriptions[subscription] = None
        client = self._client
        if client is not None:
            try:
                await self._attach(client, subscription)
                await client.ping()
            except (BusUnavailable, nats.errors.Error, OSError) as error:
                logger.debug("subscription to %s waits for the reconnect: %r", subject, error)
        return subscription

    async def call(self, operation: Callable[[NatsClient], Awaitable[T]], timeout_s: float) -> T:
        """Return the result of `operation` on nats-py's client, after waiting for a connection if there is
        none.

        For JetStream, which needs that client. BusUnavailable on a timeout or if the connection breaks before
        an answer: whether the server has done it is then unknown. nats-py's other errors pass.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        client = await self._wait_client(timeout_s)
        with client as nats_client:
            task: asyncio.Future[T] = asyncio.ensure_future(operation(nats_client))
            try:
                left = deadline - asyncio.get_running_loop().time()
                either: set[asyncio.Future[Any]] = {task, client.lost}
                await asyncio.wait(either, timeout=left, return_when="FIRST_COMPLETED")
                if task.done():
                    return task.result()
            except (nats.errors.TimeoutError, nats.errors.ConnectionClosedError, OSError) as error:
                raise BusUnavailable(f"cannot get an answer from the bus: {error}") from error
            finally:
                task.cancel()
        why = client.lost.result() if client.lost.done() else f"no answer in {timeout_s} s"
        raise BusUnavailable(f"cannot get an answer from the bus: {why}")

    def on_new_client(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever nats-py's client is a new one (reconnect, renewal); returns how to stop
        that.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    async def renew(self, jwt: str) -> None:
        """Change to a newer JWT without losing messages: the next client is connected before the old one
        closes.

        A message that arrives in between may come twice. While disconnected the JWT is kept for the next
        attempt. BusRefused if the server refuses it: the old one stays. BusUnavailable: kept for the next
        reconnect.
        """
        if self._closed:
            raise BusClosed("cannot renew a JWT: the connection is closed")
        async with self._switching:
            before, self._credentials = self._credentials, self._credentials.renewed(jwt)
            old = self._client
            if old is None:
                self._retry_now.set()
                return
            try:
                await self._establish()
            except BusRefused:
                self._credentials = before
                raise
        self._spawn(self._retire(old), "bus retire")

    def move(self, urls: Sequence[str]) -> None:
        """Use these servers from now on, by `renew` or at the next reconnect."""
        self._urls = list(urls)

    async def close(self) -> None:
        """Send pending messages, deliver what has arrived (2 s at most), and end every task."""
        if self._closed:
            return
        self._closed = True
        self._connected.set()  # wakes those that wait for a connection: they raise
        if self._supervisor is not None:
            # nats-py swallows a cancellation that reaches it in a flush, so the loops check `_closed`, too.
            self._client_lost.set()
            self._retry_now.set()
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        client, self._client = self._client, None
        if client is not None:
            await client.retire(CLOSE_TIMEOUT_S)
            self._attached.pop(client, None)
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
            await self._client_lost.wait()
            self._client_lost.clear()
            client = self._client
            if client is not None and client.lost.done():  # else a renewal has replaced it
                self._drop_lost(client)
                await self._reopen()

    def _drop_lost(self, client: BusClient) -> None:
        self._client = None
        self._connected.clear()
        self._outbox.lost()
        self._attached.pop(client, None)
        self._spawn(client.discard(), "bus discard")
        logger.info("bus connection lost: %s", client.lost.result())
        self._notify(self._on_disconnect, client.lost.result())

    async def _reopen(self) -> None:
        """Try for ever: at once, then after 0.1 s growing to 2 s, with jitter; a renewal ends the wait."""
        attempt, refused = 0, ""
        while self._client is None and not self._closed:
            try:
                async with self._switching:
                    if self._client is None:  # a renewal may have been quicker
                        await self._establish()
            except BusRefused as error:
                if str(error) != refused:
                    refused = str(error)
                    self._notify(self._on_refused, refused)
            except BusUnavailable as error:
                logger.debug("bus reconnect: %s", error)
            else:
                break
            try:
                await asyncio.wait_for(self._retry_now.wait(), retry_s(attempt))
                self._retry_now.clear()
            except asyncio.TimeoutError:
                attempt += 1
        if not self._closed:
            self._notify(self._on_reconnect)

    async def _establish(self) -> None:
        """Open a client to any of the servers, with all subscriptions and unsent messages, and use it."""
        problem: BusError | None = None
        for url in random.sample(self._urls, len(self._urls)):
            try:
                client = await BusClient.open(
                    url,
                    self._credentials,
                    context=self._context,
                    name=self._name,
                    on_violation=lambda text: self._notify(self._on_violation, text),
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
            await self._prepare(client)
        except (BusUnavailable, nats.errors.Error, OSError) as error:
            self._attached.pop(client, None)
            await client.discard()
            if self._client is None:
                self._outbox.lost()
            raise BusUnavailable(f"cannot use the new connection: {error}") from error
        finally:
            self._publishing.set()
        self._client = client
        client.lost.add_done_callback(lambda _: self._client_lost.set())
        self._connected.set()
        self._spawn(self._keep_alive(client), "bus pings")
        for listener in tuple(self._listeners):
            self._notify(listener)

    async def _prepare(self, client: BusClient) -> None:
        """Make all subscriptions, then send all pending messages; on return the client can take over."""
        self._attached[client] = {}
        while True:
            for subscription in [*self._subscriptions]:
                await self._attach(client, subscription)
            await client.ping()
            if self._client is not None and self._publishing.is_set():
                self._publishing.clear()
                await self._flush_replaced(self._client)
            while (pending := self._outbox.take()) is not None:
                self._outbox.sent(*pending)
                await client.nats.publish(*pending)
            if self._closed:
                raise BusUnavailable("closed meanwhile")
            # No await between this check and the caller's switch, so no subscription is missed.
            if all(subscription in self._attached[client] for subscription in self._subscriptions):
                return

    async def _flush_replaced(self, client: BusClient) -> None:
        """Wait until the server has all that was published by the client that is to be replaced."""
        self._outbox.mark()
        try:
            await client.ping()
            self._outbox.confirm()
        except BusUnavailable:
            self._outbox.lost()

    async def _attach(self, client: BusClient, subscription: Subscription) -> None:
        attached = self._attached.get(client)
        if attached is not None and subscription not in attached:
            attached[subscription] = await client.nats.subscribe(
                subscription.subject, cb=subscription.deliver
            )

    async def _detach(self, subscription: Subscription) -> None:
        self._subscriptions.pop(subscription, None)
        for client, attached in self._attached.items():
            attachment = attached.pop(subscription, None)
            if attachment is not None and not client.lost.done():
                try:
                    await attachment.unsubscribe()
                except nats.errors.Error as error:  # the connection has just broken
                    logger.debug("unsubscribe from %s: %r", subscription.subject, error)

    async def _keep_alive(self, client: BusClient) -> None:
        """Ping until the client is lost: a hung server closes nothing. An answer confirms what was sent
        before.
        """
        while True:
            if self._client is client:
                self._outbox.mark()
            try:
                await client.ping()
            except BusUnavailable:
                return
            if self._client is client:
                self._outbox.confirm()
            await asyncio.wait({client.lost}, timeout=PING_INTERVAL_S)

    async def _retire(self, client: BusClient) -> None:
        await client.retire(RETIRE_TIMEOUT_S)
        self._attached.pop(client, None)

    async def _wait_client(self, timeout_s: float) -> BusClient:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self._closed:
            if self._client is not None:
                return self._client
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

    def _notify(self, callback: Callable[..., None], *arguments: str) -> None:
        try:
            callback(*arguments)
        except Exception:
            logger.exception("a callback of the bus connection failed")
