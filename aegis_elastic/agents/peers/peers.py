"""What the agents of one incarnation say to each other in its store, with or without a control plane.

They share three things there, under keys of our own:

* `end`: how this incarnation ended, written once by compare-and-set. Either the plane ended it, or a failure
  that the plane could not be told of. Whoever comes second follows the first: no incarnation ends in two
  ways.
* `next`: where the first agent holds the store of the following incarnation, when they go on without the
  plane.
* `alive/<group rank>`: counters by which agents are seen over the training network when the bus is silent.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

from torch.distributed import TCPStore

from aegis_elastic.agents.peers.stores import CALL_TIMEOUT_S, JOIN_S, StoreGone, connect, first_line

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

END_KEY = "aegis/end"
NEXT_KEY = "aegis/next"
DONE_KEY = "aegis/done"
ALL_KEY = "aegis/done/all"
ALIVE_KEY = "aegis/alive/"
ENDED_BY_PLANE = "plane"
POLL_S = 1.0
POLLS_MISSED_MAX = 3
NEXT_TIMEOUT_S = 60.0
# How many agents count who is there: more than one, since the one that counts may be the one that is cut off.
OBSERVERS = 3
# What our threads that wait in torch's C++ are called.
THREADS = _POLLING, _MEETING, _CALLING = "aegis-peers", "aegis-meeting", "aegis-asking"


class Peers:
    """One incarnation's agents, seen through its store. Owns a thread and two client connections."""

    def __init__(
        self,
        address: str,
        group_rank: int,
        workers: tuple[str, ...],
        on_end: Callable[[Peers], None],
        on_next: Callable[[Peers, str], None],
        on_alive: Callable[[], None],
    ) -> None:
        """Connect; StoreGone if the store can't be reached. The callbacks come from the thread of our own."""
        self.address = address
        self._group_rank = group_rank
        self._workers = workers
        self._on_end, self._on_next, self._on_alive = on_end, on_next, on_alive
        self._calls = connect(address)
        self._polling = connect(address)
        self._silent = False
        self._closed = threading.Event()
        self._ended = ""
        self._alive: frozenset[str] = frozenset()
        self._counts = [0] * len(workers)
        self._polled_s = time.monotonic()
        self._meeting: threading.Thread | None = None
        self._thread = threading.Thread(target=self._poll, name=_POLLING, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> str:
        """How the incarnation ended, as far as we have seen: "" while it runs."""
        return self._ended

    @property
    def alive(self) -> frozenset[str]:
        """The workers that were alive between the last two counts; only the first few agents count. Nobody if
        the last count was long ago, because the store doesn't answer.
        """
        late = time.monotonic() - self._polled_s > POLLS_MISSED_MAX * POLL_S
        return frozenset() if late else self._alive

    def claim(self, how: str) -> str:
        """Write how this incarnation ends, unless it is written already: returns what is. StoreGone."""
        answer = self._call(lambda store: store.compare_set(END_KEY, "", how))
        return bytes(answer).decode()

    def publish_next(self, address: str) -> None:
        """Publish where the next incarnation's store is. StoreGone."""
        self._call(lambda store: store.set(NEXT_KEY, address))

    def meet_at_end(self, patience_s: float, on_done: Callable[[Peers, bool], None]) -> None:
        """Our ranks are done: wait for the others', so that nobody takes the store away too early.

        `on_done(peers, True)` when everybody has come, however long that takes; False when those who are
        missing have not been seen for `patience_s`, or the store is gone. Called from a thread of our own,
        and not at all after `close`.
        """
        self._meeting = threading.Thread(
            target=self._meet, args=(patience_s, on_done), name=_MEETING, daemon=True
        )
        self._meeting.start()

    def close(self) -> None:
        """End the threads; they end within a second, which `join` waits for."""
        self._closed.set()

    def join(self) -> None:
        """Wait for the threads' end: an interpreter that exits while torch's C++ waits in one is aborted."""
        self._thread.join(JOIN_S)
        if self._meeting is not None:
            self._meeting.join(JOIN_S)

    def _call(self, request: Callable[[TCPStore], _T]) -> _T:
        """Call the store in a thread: torch's client waits for ever on a host that has fallen silent (a
        pulled cable, a stopped process), whatever its timeout, and the caller is the agent's only loop.
        """
        if self._silent:
            raise StoreGone(f"the store at {self.address} has not answered before")
        answers: queue.SimpleQueue[tuple[_T, None] | tuple[None, RuntimeError]] = queue.SimpleQueue()

        def call() -> None:
            try:
                answers.put((request(self._calls), None))
            except RuntimeError as error:
                answers.put((None, error))

        threading.Thread(target=call, name=_CALLING, daemon=True).start()
        try:
            answer, error = answers.get(timeout=CALL_TIMEOUT_S)
        except queue.Empty:
            self._silent = True
            raise StoreGone(f"the store at {self.address} doesn't answer in {CALL_TIMEOUT_S:.0f} s") from None
        if error is not None:
            raise StoreGone(f"the store at {self.address} doesn't answer: {first_line(error)}")
        return cast(_T, answer)

    def _poll(self) -> None:
        try:
            self._poll_until_end()
        finally:
            self._forget_alive()

    def _poll_until_end(self) -> None:
        while not self._closed.is_set():
            try:
                self._count_alive()
                if not self._await(self._polling, END_KEY):
                    continue
            except RuntimeError as error:
                if "timeout" in str(error):
                    continue
                return  # The store is gone; who needs it learns that by `claim`.
            if not self._closed.is_set():
                self._ended = bytes(self._polling.get(END_KEY)).decode()
                self._forget_alive()
                self._on_end(self)
                if self._ended != ENDED_BY_PLANE:
                    self._wait_next()
            return

    def _await(self, store: TCPStore, key: str) -> bool:
        """Wait `POLL_S` for the key to be written; whether it is. RuntimeError as torch says."""
        if _waits_are_silent():
            store.wait([key], timedelta(seconds=POLL_S))
            return True
        self._closed.wait(POLL_S)
        return not self._closed.is_set() and bool(store.check([key]))

    def _meet(self, patience_s: float, on_done: Callable[[Peers, bool], None]) -> None:
        try:
            store = connect(self.address)
            store.set(f"{DONE_KEY}/{self._group_rank}", "")
            met = self._await_all(store, patience_s)
        except (StoreGone, RuntimeError) as error:
            logger.info("the store went before the end of the job: %s", first_line(error))
            met = False
        if not self._closed.is_set():
            on_done(self, met)

    def _await_all(self, store: TCPStore, patience_s: float) -> bool:
        """Whether everybody came. The first few agents decide that, the others wait for what they write."""
        missing, counts = list(range(len(self._workers))), [0]
        seen_s = time.monotonic()
        while not self._closed.is_set():
            if self._group_rank < OBSERVERS:
                missing = [peer for peer in missing if not store.check([f"{DONE_KEY}/{peer}"])]
                now = [store.add(f"{ALIVE_KEY}{peer}", 0) for peer in missing]
                if now != counts:
                    counts, seen_s = now, time.monotonic()
                if not missing or time.monotonic() - seen_s >= patience_s:
                    store.set(ALL_KEY, "given up" if missing else "met")
            try:
                if self._await(store, ALL_KEY):
                    return bytes(store.get(ALL_KEY)) == b"met"
            except RuntimeError as error:
                if "timeout" not in str(error):
                    raise
        return False

    def _forget_alive(self) -> None:
        """What was seen once must not be reported for ever."""
        self._alive = frozenset()
        if not self._closed.is_set():
            self._on_alive()

    def _wait_next(self) -> None:
        """Wait for the first agent to publish the next store; "" if it doesn't."""
        until_s, address = time.monotonic() + NEXT_TIMEOUT_S, ""
        while not self._closed.is_set() and time.monotonic() < until_s:
            try:
                self._polling.wait([NEXT_KEY], timedelta(seconds=POLL_S))
                address = bytes(self._polling.get(NEXT_KEY)).decode()
            except RuntimeError as error:
                if "timeout" in str(error):
                    continue
            break
        if not self._closed.is_set():
            self._on_next(self, address)

    def _count_alive(self) -> None:
        self._polling.add(f"{ALIVE_KEY}{self._group_rank}", 1)
        if self._group_rank >= OBSERVERS:
            return
        counts = [self._polling.add(f"{ALIVE_KEY}{peer}", 0) for peer in range(len(self._workers))]
        moved = (now > before for now, before in zip(counts, self._counts, strict=True))
        self._alive = frozenset(worker for worker, here in zip(self._workers, moved, strict=True) if here)
        self._counts = counts
        self._polled_s = time.monotonic()
        self._on_alive()


def _waits_are_silent() -> bool:
    """Whether torch's C++ keeps quiet about waits that end in vain. Our launcher tells it to, torchrun
    doesn't, and then we poll instead.
    """
    return os.environ.get("TORCH_CPP_LOG_LEVEL", "").upper() in ("ERROR", "FATAL", "2", "3")
