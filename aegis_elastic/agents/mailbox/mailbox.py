"""The agent's one queue: other threads put things in, the agent's loop is woken by a descriptor and takes
them out.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any


class Mailbox:
    """Items for a selector loop. `put` from any thread (and from signal handlers), `drain` from the
    loop's.
    """

    def __init__(self) -> None:
        self._items: deque[object] = deque()
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Readable when there may be items."""
        return self._read

    def put(self, item: object) -> None:
        """Append an item and wake the loop."""
        self._items.append(item)
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            return  # The pipe is full of wake-ups: one more changes nothing.

    def drain(self) -> list[object]:
        """All items, oldest first; never waits."""
        try:
            while os.read(self._read, 4096):
                pass
        except BlockingIOError:
            pass  # Emptied: that is how a non-blocking read says so.
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self._read)
        os.close(self._write)


class SignalReceived:
    """A signal that reached the launcher."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


class SignalsToMailbox:
    """While active, these signals become items of the inbox instead of what they would do. Main thread
    only.
    """

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
