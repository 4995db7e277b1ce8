"""The agent's one queue: other threads put events in, the loop takes them out, woken by a descriptor."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any


class Mailbox:
    """Events for a selector loop. `put` from any thread and from signal handlers, `drain` from the loop's."""

    def __init__(self) -> None:
        self._events: deque[object] = deque()
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Readable when there may be events."""
        return self._read

    def put(self, event: object) -> None:
        """Append an event and wake the loop."""
        self._events.append(event)
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            return  # The pipe is full of wake-ups: one more changes nothing.

    def drain(self) -> list[object]:
        """All events, oldest first; never waits."""
        try:
            while os.read(self._read, 4096):
                pass
        except BlockingIOError:
            pass  # Emptied: that is how a non-blocking read says so.
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._read)
        os.close(self._write)


class SignalReceived:
    """A signal that reached the launcher."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


class SignalsToMailbox:
    """While active, these signals become events instead of what they would do. Main thread only."""

    def __init__(self, mailbox: Mailbox, signals: Iterable[int]) -> None:
        self._mailbox = mailbox
        self._signals = tuple(signals)
        self._before: Mapping[int, Any] = {}

    def __enter__(self) -> SignalsToMailbox:
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._catch) for signum in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _catch(self, signum: int, frame: FrameType | None) -> None:
        self._mailbox.put(SignalReceived(signum))
