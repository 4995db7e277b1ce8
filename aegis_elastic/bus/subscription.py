"""Messages, and subscriptions that outlive any one connection."""

import asyncio
import inspect
import logging
import re
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from nats.aio.msg import Msg

from aegis_elastic.bus.errors import BusUsage

logger = logging.getLogger(__name__)

QUEUE_MAX = 1024
PAYLOAD_BYTES_MAX = 1024 * 1024
_SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")


class Message(NamedTuple):
    """A message as received. `reply` is "" or the subject at which the sender, unauthenticated, wants an
    answer.
    """

    subject: str
    data: bytes
    reply: str


Callback = Callable[[Message], Awaitable[None] | None]


class Subscription:
    """A subscription to a subject. Callbacks run one at a time, in order of arrival; exceptions are logged.

    A plain function is called where the message arrives. A coroutine function runs in a task of ours, since
    nats-py would cancel it when its connection breaks.
    """

    def __init__(
        self, subject: str, callback: Callback, detach: Callable[["Subscription"], Awaitable[None]]
    ) -> None:
        self.subject = subject
        self._callback = callback
        self._detach = detach
        self._stopped = False
        self._queue: asyncio.Queue[Message] | None = None
        self._worker: asyncio.Task[None] | None = None
        if inspect.iscoroutinefunction(callback):
            self._queue = asyncio.Queue(QUEUE_MAX)
            self._worker = asyncio.create_task(self._work(self._queue), name=f"bus {subject}")

    async def unsubscribe(self) -> None:
        """End the subscription; messages that wait for the callback are dropped."""
        await self._detach(self)
        await self.stop(0)

    async def deliver(self, received: Msg) -> None:
        """Accept a message from nats-py; waits while 1024 wait for a slow coroutine."""
        message = Message(received.subject, received.data, received.reply)
        if self._queue is not None:
            await self._queue.put(message)
        elif not self._stopped:
            try:
                self._callback(message)
            except Exception:
                logger.exception("the callback for %s failed", self.subject)

    async def stop(self, drain_s: float) -> None:
        """End the callbacks, after those that wait if they are done within `drain_s`."""
        worker, is_worker = self._worker, self._worker is asyncio.current_task()
        if drain_s and self._queue is not None and not is_worker:
            try:
                await asyncio.wait_for(self._queue.join(), drain_s)
            except asyncio.TimeoutError:
                logger.warning("closed with %d messages on %s undelivered", self._queue.qsize(), self.subject)
        self._stopped = True
        if worker is not None and not is_worker:
            worker.cancel()
            await asyncio.wait({worker})

    async def _work(self, queue: "asyncio.Queue[Message]") -> None:
        while not self._stopped:
            message = await queue.get()
            try:
                awaitable = self._callback(message)
                assert awaitable is not None
                await awaitable
            except Exception:
                logger.exception("the callback for %s failed", self.subject)
            finally:
                queue.task_done()


def check_message(subject: str, data: bytes) -> None:
    """Raise BusUsage for a subject with wildcards, white space or empty tokens, or for too much data."""
    if not _SUBJECT.fullmatch(subject):
        raise BusUsage(f"cannot publish on {subject!r}: want dot-separated tokens without wildcards or space")
    if len(data) > PAYLOAD_BYTES_MAX:
        raise BusUsage(f"cannot publish {len(data)} bytes on {subject}: the limit is {PAYLOAD_BYTES_MAX}")
