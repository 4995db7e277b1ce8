"""What a listener gets, and the wish to hear a subject that outlives any one connection."""

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
    """A message as it came. `reply` is "" or where the sender, unproven, says that it wants an answer."""

    subject: str
    data: bytes
    reply: str


Callback = Callable[[Message], Awaitable[None] | None]


class Subscription:
    """A wish to hear a subject. Callbacks run one at a time, in order of arrival; what they raise is logged.

    A plain function is called right where the message arrives. A coroutine function runs in a task of ours:
    nats-py would cancel it in the middle when its connection breaks.
    """

    def __init__(
        self, subject: str, callback: Callback, forget: Callable[["Subscription"], Awaitable[None]]
    ) -> None:
        self.subject = subject
        self._callback = callback
        self._forget = forget
        self._stopped = False
        self._queue: asyncio.Queue[Message] | None = None
        self._worker: asyncio.Task[None] | None = None
        if inspect.iscoroutinefunction(callback):
            self._queue = asyncio.Queue(QUEUE_MAX)
            self._worker = asyncio.create_task(self._work(self._queue), name=f"bus {subject}")

    async def unsubscribe(self) -> None:
        """Stop hearing; messages that wait for the callback are dropped."""
        await self._forget(self)
        await self.stop(0)

    async def deliver(self, arrived: Msg) -> None:
        """Take a message from nats-py; waits while a slow coroutine has 1024 before it."""
        message = Message(arrived.subject, arrived.data, arrived.reply)
        if self._queue is not None:
            await self._queue.put(message)
        elif not self._stopped:
            try:
                self._callback(message)
            except Exception:
                logger.exception("the callback for %s failed", self.subject)

    async def stop(self, drain_s: float) -> None:
        """End the callbacks, after those that wait if they are done within `drain_s`."""
        worker, inside = self._worker, self._worker is asyncio.current_task()
        if drain_s and self._queue is not None and not inside:
            try:
                await asyncio.wait_for(self._queue.join(), drain_s)
            except asyncio.TimeoutError:
                logger.warning("closed with %d messages on %s unheard", self._queue.qsize(), self.subject)
        self._stopped = True
        if worker is not None and not inside:
            worker.cancel()
            await asyncio.wait({worker})

    async def _work(self, queue: "asyncio.Queue[Message]") -> None:
        while not self._stopped:
            message = await queue.get()
            try:
                outcome = self._callback(message)
                assert outcome is not None
                await outcome
            except Exception:
                logger.exception("the callback for %s failed", self.subject)
            finally:
                queue.task_done()


def check_message(subject: str, data: bytes) -> None:
    """Raise BusUsage for a subject with wildcards, white space or empty tokens, or more data than the server
    takes.
    """
    if not _SUBJECT.fullmatch(subject):
        raise BusUsage(f"cannot publish on {subject!r}: want dot-separated tokens without wildcards or space")
    if len(data) > PAYLOAD_BYTES_MAX:
        raise BusUsage(f"cannot publish {len(data)} bytes on {subject}: the limit is {PAYLOAD_BYTES_MAX}")
