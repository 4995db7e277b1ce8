"""One nats-py client, from its connect to its loss.

nats-py can reconnect by itself, and we don't let it: it closes for good when a JWT expires or is revoked,
waits without a limit for a hung server to take what is in its buffers before it even says that it is
disconnected, and returns success from `flush()` when its reader has died. So a `BusClient` connects once, is
lost once, and `BusConnection` opens the next one. This is also the only module that touches nats-py's private
names; `tests/bus/test_client.py` pins them.
"""

import asyncio
import base64
import logging
import random
import ssl
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.client import Client as NatsClient

from aegis_elastic.bus import subjects
from aegis_elastic.bus.credentials import Credentials
from aegis_elastic.bus.errors import BusError, BusRefused, BusUnavailable

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
PING_INTERVAL_S = 1.0
DISCARD_TIMEOUT_S = 1.0
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
# We ping ourselves (see above); nats-py's own timer can't be switched off, so it is set to a day.
_NEVER_S = 24 * 3600
_REFUSALS = (
    "authorization violation",
    "authentication expired",
    "authentication revoked",
    "account authentication",
)


class _EofWarningFilter(logging.Filter):
    """Drops a warning of asyncio about nats-py's reader, logged at every end of a TLS connection."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("returning true from eof_received()")


logging.getLogger("asyncio").addFilter(_EofWarningFilter())


class BusClient:
    """One connection. `lost` resolves, with the reason, when it is gone."""

    def __init__(self, on_violation: Callable[[str], None]) -> None:
        self.nats = NatsClient()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._on_violation = on_violation
        self._connect_error: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._established = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def open(
        cls,
        url: str,
        credentials: Credentials,
        *,
        context: ssl.SSLContext | None,
        name: str,
        on_violation: Callable[[str], None],
        timeout_s: float,
    ) -> "BusClient":
        """Connect to one server, once.

        Raises BusRefused if the server refuses the credentials or isn't the trusted one, BusUnavailable if it
        isn't there or doesn't answer within `timeout_s`.
        """
        client = cls(on_violation)
        connecting = asyncio.create_task(client._connect(url, credentials, context, name))
        try:
            either: set[asyncio.Future[Any]] = {connecting, client._connect_error}
            await asyncio.wait(either, timeout=timeout_s, return_when="FIRST_COMPLETED")
            if client._connect_error.done():
                raise _failure(url, client._connect_error.result())
            if not connecting.done():
                raise BusUnavailable(f"cannot connect to {url}: no answer in {timeout_s} s")
            if (error := connecting.exception()) is not None:
                raise _failure(url, error)
            client._established = True
            for task in (client.nats._reading_task, client.nats._flusher_task):
                assert task is not None
                task.add_done_callback(client._ended)
        except BaseException:
            while not connecting.done():  # nats-py swallows a cancellation that reaches it while it flushes
                connecting.cancel()
                await asyncio.wait({connecting}, timeout=DISCARD_TIMEOUT_S)
            if not connecting.cancelled():
                connecting.exception()  # reported already by nats-py's callback
            await client.discard()
            raise
        return client

    async def _connect(
        self, url: str, credentials: Credentials, context: ssl.SSLContext | None, name: str
    ) -> None:
        await self.nats.connect(
            [url],
            name=name,
            error_cb=self._error,
            closed_cb=self._closed,
            allow_reconnect=False,
            user_jwt_cb=lambda: bytearray(credentials.jwt.encode()),
            signature_cb=lambda nonce: base64.b64encode(credentials.key.sign(nonce.encode())),
            inbox_prefix=subjects.inbox(credentials.key.public),
            ping_interval=_NEVER_S,
            flush_timeout=ANSWER_TIMEOUT_S,
            tls=context,
            tls_handshake_first=context is not None,
        )

    def lose(self, reason: str) -> None:
        """Declare the connection lost; only the first reason counts."""
        if not self.lost.done():
            self.lost.set_result(reason)

    async def ping(self) -> None:
        """Return when the server has handled all that was sent. Lost, and BusUnavailable, if it doesn't
        answer.
        """
        try:
            # nats-py writes its PING before pending data: without this flush the answer would prove nothing.
            await self.nats._flush_pending(force_flush=True)
            await self.nats.flush(timeout=ANSWER_TIMEOUT_S)  # type: ignore[arg-type]  # fractions work
        except nats.errors.FlushTimeoutError:
            self.lose(f"no answer in {ANSWER_TIMEOUT_S} s")
        except (nats.errors.Error, OSError) as error:
            self.lose(str(error) or type(error).__name__)
        if self.lost.done():
            raise BusUnavailable(f"cannot reach the bus: {self.lost.result()}")

    def __enter__(self) -> NatsClient:
        """Use the client for something that a renewal must wait for."""
        self._in_flight += 1
        self._idle.clear()
        return self.nats

    def __exit__(self, *_: object) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    async def retire(self, timeout_s: float) -> None:
        """Close gracefully, after the answers to requests in flight and the delivery of what has arrived."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            await asyncio.wait_for(self.nats.drain(), timeout_s)
        except (asyncio.TimeoutError, nats.errors.Error, OSError) as error:
            logger.debug("old connection did not drain: %r", error)
        await self.discard()

    async def discard(self) -> None:
        """Drop the socket at once and end nats-py's tasks. Never waits for the peer."""
        self.lose("closed")
        nats_client = self.nats
        transport = getattr(nats_client._transport, "_io_writer", None)
        if transport is not None:
            transport.transport.abort()
        # Else its close would wait for a drain that never happens on an aborted transport, and leak its
        # tasks.
        nats_client._pending_data_size = 0
        try:
            await asyncio.wait_for(nats_client.close(), DISCARD_TIMEOUT_S)
        except (asyncio.TimeoutError, nats.errors.Error, OSError) as error:
            logger.debug("old connection did not close: %r", error)

    async def _error(self, error: Exception) -> None:
        """nats-py's error callback: violations, a refused connect, the stream's end, a slow consumer."""
        text = str(error)
        if "permissions violation" in text.lower():
            self._on_violation(text.removeprefix("nats: "))
        elif isinstance(error, nats.errors.SlowConsumerError):
            logger.warning("messages on %s were dropped: their callback is too slow", error.subject)
        elif not self._established:
            if not self._connect_error.done():
                self._connect_error.set_result(error)
        elif isinstance(error, nats.errors.FlushTimeoutError):
            self.lose(f"takes no data for {ANSWER_TIMEOUT_S} s")
        elif isinstance(error, (OSError, nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError)):
            self.lose(text.removeprefix("nats: "))
        else:
            logger.warning("bus connection: %s", text or type(error).__name__)

    async def _closed(self) -> None:
        self.lose(self._reason("closed by the server"))

    def _ended(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        self.lose(self._reason("connection closed" if error is None else str(error) or type(error).__name__))

    def _reason(self, otherwise: str) -> str:
        error = self.nats.last_error
        return str(error).removeprefix("nats: ") if error is not None else otherwise


def _failure(url: str, error: BaseException) -> BusError:
    text = (str(error) or type(error).__name__).removeprefix("nats: ").strip("'")
    if isinstance(error, ssl.SSLCertVerificationError):
        return BusRefused(f"cannot trust {url}: its certificate is not the one that we were given")
    if any(refusal in text.lower() for refusal in _REFUSALS):
        return BusRefused(f"cannot connect to {url}: {text}")
    return BusUnavailable(f"cannot connect to {url}: {text}")


def retry_s(attempt: int) -> float:
    """Seconds to wait after failed attempt number `attempt` (from 0)."""
    return min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(attempt, 10)) * random.uniform(0.5, 1.0)
