"""TCPStores of our own: a fresh one for every start of training, made ahead.

torch doesn't prefix a store's keys by attempt any more, so a restart on the store of the last incarnation
finds its stale keys and fails or hangs: every incarnation gets its own. Making one takes a millisecond or
two, but now and then a reverse look-up stalls it for seconds; so `StorePool` always holds one ready, made
beside the agent's loop.
"""

from __future__ import annotations

import concurrent.futures
import logging
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3.0
JOIN_S = 5.0
BACKLOG = 4096


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
        raise StoreGone(f"cannot reach the store at {address}: {first_line(error)}") from None


def split(address: str) -> tuple[str, int]:
    """`host:port` apart; IPv6 addresses may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class StorePool:
    """Keeps one store ready, and holds those in use. `on_ready` is called from the pool's own thread."""

    def __init__(self, host: str, on_ready: Callable[[], None]) -> None:
        self._host = host
        self._on_ready = on_ready
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="aegis-stores")
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
        """The ready store is in use from now on: prepare another. False if that address isn't ours.

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
        self._executor.shutdown(wait=True)
        with self._lock:
            self._ready = None
            self._used.clear()

    def _prepare(self) -> None:
        self._executor.submit(self._make).add_done_callback(_log_failure)

    def _make(self) -> None:
        store = serve(self._host, 0)
        host = f"[{self._host}]" if ":" in self._host else self._host
        with self._lock:
            self._ready = (f"{host}:{store.port}", store)
        self._on_ready()


def _log_failure(future: concurrent.futures.Future[None]) -> None:
    if not future.cancelled() and future.exception() is not None:
        logger.error("cannot make a store ready: %s", future.exception())


def first_line(error: Exception) -> str:
    """What torch's C++ says, without its stack."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
