"""One world without any control plane: agents that no master brought together meet by themselves.

The place is a plain TCPStore beside the endpoint (the next port), hosted by the agent whose host owns the
endpoint. Each agent writes its identity there; the host decides who takes part, and everybody reads the same
decision. From then on it is an ordinary torchelastic job, with our restart in place and one count for all.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import msgspec
from torch.distributed import TCPStore

from aegis_elastic.agents.peers.stores import JOIN_S, StoreGone, connect, serve
from aegis_elastic.agents.plane.link import Identity
from aegis_elastic.core.model import Phase, Worker
from aegis_elastic.core.protocol.orders import Action, Order
from aegis_elastic.core.rank_assignment import assign_ranks, first_order

COUNT_KEY = "aegis/fallback/count"
MEMBER_KEY = "aegis/fallback/member/"
WORLD_KEY = "aegis/fallback/world"
CONNECT_TRY_S = 5.0
POLL_S = 0.5


@dataclass(frozen=True)
class Meeting:
    """Where and how long to meet: `hosting` agents serve the store at `host:port`."""

    host: str
    port: int
    hosting: bool
    min_nodes: int
    max_nodes: int
    max_restarts: int
    wait_s: float
    last_call_s: float


class Fallback:
    """One attempt to meet, in a thread of its own. `on_done(order | None, reason)` is called from it."""

    def __init__(
        self, meeting: Meeting, me: Identity, store: str, on_done: Callable[[Order | None, str], None]
    ) -> None:
        self._meeting = meeting
        self._me = me
        self._store = store
        self._on_done = on_done
        self._closed = threading.Event()
        self._served: TCPStore | None = None
        self._thread = threading.Thread(target=self._run, name="aegis-fallback", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the meeting place away and end the attempt, within about `POLL_S`."""
        self._closed.set()
        self._served = None
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            order, reason = self._meet(), ""
        except (StoreGone, RuntimeError, OSError) as error:
            order, reason = None, str(error).splitlines()[0]
        if not self._closed.is_set():
            self._on_done(order, reason)

    def _meet(self) -> Order:
        meeting, until_s = self._meeting, time.monotonic() + self._meeting.wait_s
        if meeting.max_nodes == 1:
            return _order((_worker(self._me, self._store),), meeting.max_restarts)
        if meeting.hosting:
            self._served = _serve_first(meeting)
        store = self._reach(until_s)
        number = store.add(COUNT_KEY, 1)
        store.set(f"{MEMBER_KEY}{number}", msgspec.json.encode(_worker(self._me, self._store)).decode())
        if meeting.hosting and self._served is not None:
            workers = self._gather(store, until_s)
            store.set(WORLD_KEY, msgspec.json.encode(_order(workers, meeting.max_restarts)).decode())
        self._wait_world(store, max(until_s, time.monotonic() + POLL_S) + meeting.last_call_s)
        return msgspec.json.decode(bytes(store.get(WORLD_KEY)), type=Order)

    def _reach(self, until_s: float) -> TCPStore:
        where = f"{self._meeting.host}:{self._meeting.port}"
        while not self._closed.is_set():
            left_s = until_s - time.monotonic()
            try:
                return connect(where, min(CONNECT_TRY_S, max(left_s, POLL_S)))
            except StoreGone:
                if left_s <= 0:
                    raise
                self._closed.wait(POLL_S)
        raise StoreGone("the agent ends")

    def _wait_world(self, store: TCPStore, until_s: float) -> None:
        # In short waits: a thread that waits in torch's C++ can't be called back.
        while not self._closed.is_set():
            try:
                store.wait([WORLD_KEY], timedelta(seconds=POLL_S))
                return
            except RuntimeError as error:
                if "timeout" not in str(error) or time.monotonic() >= until_s:
                    raise StoreGone(f"nobody said who takes part: {str(error).splitlines()[0]}") from None
        raise StoreGone("the agent ends")

    def _gather(self, store: TCPStore, until_s: float) -> tuple[Worker, ...]:
        """Wait for the world to be full, or big enough for long enough. StoreGone if too few come."""
        meeting = self._meeting
        last_call_at_s: float | None = None
        while not self._closed.is_set():
            count, now = store.add(COUNT_KEY, 0), time.monotonic()
            if count >= meeting.min_nodes and last_call_at_s is None:
                last_call_at_s = now + meeting.last_call_s
            if count >= meeting.max_nodes or (last_call_at_s is not None and now >= last_call_at_s):
                numbers = range(1, min(count, meeting.max_nodes) + 1)
                members = (bytes(store.get(f"{MEMBER_KEY}{number}")) for number in numbers)
                return first_order(tuple(msgspec.json.decode(member, type=Worker) for member in members))
            if now >= until_s:
                raise StoreGone(f"{count} of {meeting.min_nodes} nodes came")
            self._closed.wait(POLL_S / 10)
        raise StoreGone("the agent ends")


def _serve_first(meeting: Meeting) -> TCPStore | None:
    """The meeting place, unless another launcher of this host serves it already. OSError otherwise."""
    try:
        return serve(meeting.host, meeting.port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def _worker(me: Identity, store: str) -> Worker:
    return Worker(
        name=me.worker,
        uid=me.uid,
        node_name=me.node_name,
        node_ip=me.node_ip,
        nproc=me.nproc,
        inner_phase=Phase.PENDING,
        ordinal=me.ordinal,
        store=store,
    )


def _order(workers: tuple[Worker, ...], max_restarts: int) -> Order:
    return Order(
        seq_num=0,
        incarnation=1,
        action=Action.RUN,
        assignments=assign_ranks(workers),
        store=workers[0].store,
        checks=(),
        restart_count=0,
        recover_count=0,
        max_retry=max_restarts,
    )
