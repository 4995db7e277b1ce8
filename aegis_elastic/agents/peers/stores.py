"""TCPStores: a fresh one for every start of training, made ahead; and what agents say to each other in it.

torch doesn't prefix a store's keys by attempt any more, so a restart on the store of the last incarnation
finds its stale keys and fails or hangs: every incarnation gets its own. Making one takes a millisecond or
two, but now and then a reverse look-up stalls it for seconds; so a shelf always holds one ready, made beside
the agent's loop.

In the store of a running incarnation the agents share three things, under keys of our own:

* `end`: how this incarnation ended, written once by compare-and-set. Either the plane ended it, or a failure
  that the plane could not be told of. Whoever comes second follows the first: no incarnation ends in two
  ways.
* `next`: where the first agent holds the store of the following incarnation, when they go on without the
  plane.
* `alive/<group rank>`: counters by which agents are seen over the training network when the bus is silent.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

END_KEY = "aegis/end"
NEXT_KEY = "aegis/next"
DONE_KEY = "aegis/done"
ALL_KEY = "aegis/done/all"
ALIVE_KEY = "aegis/alive/"
ENDED_BY_PLANE = "plane"
CALL_TIMEOUT_S = 3.0
LOOK_S = 1.0
LOOKS_MISSED_MAX = 3
NEXT_TIMEOUT_S = 60.0
JOIN_S = 5.0
BACKLOG = 4096
# How many agents look who is there: more than one, since the one that looks may be the one that is cut off.
LOOKERS = 3
# What our threads that wait in torch's C++ are called.
THREADS = _LOOKING, _MEETING, _ASKING = "aegis-peers", "aegis-meeting", "aegis-asking"


class StoreGone(Exception):
    """The incarnation's store can't be reached: the agent that hosts it is gone, or the network is."""


def serve(host: str, port: int, timeout_s: float = CALL_TIMEOUT_S) -> TCPStore:
    """Host a store at that address only (torch's own choice would be every interface). Port 0 takes a free
    one.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def connect(address: str, timeout_s: float = CALL_TIMEOUT_S) -> TCPStore:
    """Be a client of the store at `host:port`. StoreGone if it can't be reached in time."""
    host, port = split(address)
    try:
        return TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        raise StoreGone(f"cannot reach the store at {address}: {_first_line(error)}") from None


def split(address: str) -> tuple[str, int]:
    """`host:port` apart; IPv6 addresses may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class StorePool:
    """Keeps one store ready, and holds those in use. `on_ready(address)` is called from the shelf's own
    thread.
    """

    def __init__(self, host: str, on_ready: Callable[[], None]) -> None:
        self._host = host
        self._on_ready = on_ready
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="aegis-shelf")
        self._lock = threading.Lock()
        self._ready: tuple[str, TCPStore] | None = None
        self._used: list[tuple[str, TCPStore]] = []
        self._prepare()

    @property
    def ready(self) -> str:
        """Address of the store that waits for its use, or "" while it is being made."""
        with self._lock:
            return self._ready[0] if self._ready else ""

    def use(self, address: str) -> bool:
        """Note that the waiting store is in use now and prepare another. False if that address isn't ours.

        The last two in use are kept: agents that are late read the address of the next one from the last.
        """
        with self._lock:
            if self._ready is None or self._ready[0] != address:
                return any(address == used for used, _ in self._used)
            self._used.append(self._ready)
            self._ready = None
            freed, self._used = self._used[:-2], self._used[-2:]
        freed.clear()
        self._prepare()
        return True

    def close(self) -> None:
        """End all stores and the thread."""
        self._pool.shutdown(wait=True)
        with self._lock:
            self._ready = None
            self._used.clear()

    def _prepare(self) -> None:
        self._pool.submit(self._make).add_done_callback(_log_failure)

    def _make(self) -> None:
        store = serve(self._host, 0)
        host = f"[{self._host}]" if ":" in self._host else self._host
        with self._lock:
            self._ready = (f"{host}:{store.port}", store)
        self._on_ready()


class Peers:
    """One incarnation's agents, seen through its store. Owns a thread and two client connections."""

    def __init__(
        self,
        address: str,
        group_rank: int,
        workers: tuple[str, ...],
        on_end: Callable[[Peers], None],
        on_next: Callable[[Peers, str], None],
        on_look: Callable[[], None],
    ) -> None:
        """Connect; StoreGone if the store can't be reached. The callbacks come from the thread of our own."""
        self.address = address
        self._group_rank = group_rank
        self._workers = workers
        self._on_end, self._on_next, self._on_look = on_end, on_next, on_look
        self._asking = connect(address)
        self._looking = connect(address)
        self._deaf = False
        self._closed = threading.Event()
        self._ended = ""
        self._alive: frozenset[str] = frozenset()
        self._counts = [0] * len(workers)
        self._looked_s = time.monotonic()
        self._meeting: threading.Thread | None = None
        self._thread = threading.Thread(target=self._look, name=_LOOKING, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> str:
        """How the incarnation ended, as far as we have seen: "" while it runs."""
        return self._ended

    @property
    def alive(self) -> frozenset[str]:
        """The workers that showed themselves since the last look; only the first few agents look. Nobody if
        that look was long ago, because the store doesn't answer.
        """
        late = time.monotonic() - self._looked_s > LOOKS_MISSED_MAX * LOOK_S
        return frozenset() if late else self._alive

    def claim(self, how: str) -> str:
        """Say how this incarnation ends; returns how it does end (somebody may have been first).
        StoreGone.
        """
        answer = self._ask(lambda store: store.compare_set(END_KEY, "", how))
        return bytes(answer).decode()

    def publish_next(self, address: str) -> None:
        """Tell the others where the next incarnation's store is. StoreGone."""
        self._ask(lambda store: store.set(NEXT_KEY, address))

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

    def _ask(self, question: Callable[[TCPStore], _T]) -> _T:
        """Ask in a thread: torch's client waits for ever on a host that has fallen silent, whatever its
        timeout (a pulled cable, a stopped process), and who asks is the agent's only loop.
        """
        if self._deaf:
            raise StoreGone(f"the store at {self.address} has not answered before")
        answers: queue.SimpleQueue[tuple[_T, None] | tuple[None, RuntimeError]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put((question(self._asking), None))
            except RuntimeError as error:
                answers.put((None, error))

        threading.Thread(target=ask, name=_ASKING, daemon=True).start()
        try:
            answer, error = answers.get(timeout=CALL_TIMEOUT_S)
        except queue.Empty:
            self._deaf = True
            raise StoreGone(f"the store at {self.address} doesn't answer in {CALL_TIMEOUT_S:.0f} s") from None
        if error is not None:
            raise StoreGone(f"the store at {self.address} doesn't answer: {_first_line(error)}")
        return cast(_T, answer)

    def _look(self) -> None:
        try:
            self._look_until_end()
        finally:
            self._forget_alive()

    def _look_until_end(self) -> None:
        while not self._closed.is_set():
            try:
                self._show_and_count()
                if not self._await(self._looking, END_KEY):
                    continue
            except RuntimeError as error:
                if "timeout" in str(error):
                    continue
                return  # The store is gone; whoever needs it finds out by `claim`.
            if not self._closed.is_set():
                self._ended = bytes(self._looking.get(END_KEY)).decode()
                self._forget_alive()
                self._on_end(self)
                if self._ended != ENDED_BY_PLANE:
                    self._wait_next()
            return

    def _await(self, store: TCPStore, key: str) -> bool:
        """Wait a look's time for the key to be written; whether it is. RuntimeError as torch says."""
        if _waits_are_silent():
            store.wait([key], timedelta(seconds=LOOK_S))
            return True
        self._closed.wait(LOOK_S)
        return not self._closed.is_set() and bool(store.check([key]))

    def _meet(self, patience_s: float, on_done: Callable[[Peers, bool], None]) -> None:
        try:
            store = connect(self.address)
            store.set(f"{DONE_KEY}/{self._group_rank}", "")
            met = self._await_all(store, patience_s)
        except (StoreGone, RuntimeError) as error:
            logger.info("the store went before the end of the job: %s", _first_line(error))
            met = False
        if not self._closed.is_set():
            on_done(self, met)

    def _await_all(self, store: TCPStore, patience_s: float) -> bool:
        """Whether everybody came. The first few agents decide that, the others wait for their word."""
        missing, counts = list(range(len(self._workers))), [0]
        seen_s = time.monotonic()
        while not self._closed.is_set():
            if self._group_rank < LOOKERS:
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
        """What was seen once must not be told for ever."""
        self._alive = frozenset()
        if not self._closed.is_set():
            self._on_look()

    def _wait_next(self) -> None:
        """Wait for the first agent to say where the next store is; "" if it doesn't."""
        until_s, address = time.monotonic() + NEXT_TIMEOUT_S, ""
        while not self._closed.is_set() and time.monotonic() < until_s:
            try:
                self._looking.wait([NEXT_KEY], timedelta(seconds=LOOK_S))
                address = bytes(self._looking.get(NEXT_KEY)).decode()
            except RuntimeError as error:
                if "timeout" in str(error):
                    continue
            break
        if not self._closed.is_set():
            self._on_next(self, address)

    def _show_and_count(self) -> None:
        self._looking.add(f"{ALIVE_KEY}{self._group_rank}", 1)
        if self._group_rank >= LOOKERS:
            return
        counts = [self._looking.add(f"{ALIVE_KEY}{peer}", 0) for peer in range(len(self._workers))]
        moved = (now > before for now, before in zip(counts, self._counts, strict=True))
        self._alive = frozenset(worker for worker, here in zip(self._workers, moved, strict=True) if here)
        self._counts = counts
        self._looked_s = time.monotonic()
        self._on_look()


def _log_failure(future: concurrent.futures.Future[None]) -> None:
    if not future.cancelled() and future.exception() is not None:
        logger.error("cannot make a store ready: %s", future.exception())


def _waits_are_silent() -> bool:
    """Whether torch's C++ keeps quiet about waits that end in vain. Our launcher tells it to, torchrun
    doesn't, and then we look now and then instead.
    """
    return os.environ.get("TORCH_CPP_LOG_LEVEL", "").upper() in ("ERROR", "FATAL", "2", "3")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
