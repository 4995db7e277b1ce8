"""GET /metrics, and nothing else: a few lines of HTTP in the loop of whoever has the metrics.

prometheus-client's own server is a thread that nobody ends.
"""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

logger = logging.getLogger(__name__)

PATH = "/metrics"
REQUEST_BYTES_MAX = 8192
REQUEST_TIMEOUT_S = 5.0
CLIENTS_MAX = 16

_NOT_FOUND = "404 Not Found", "text/plain; charset=utf-8", b"see /metrics\n"
_NOT_ALLOWED = "405 Method Not Allowed", "text/plain; charset=utf-8", b"GET only\n"


class Endpoint:
    """Made by `open`; `close` it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> str:
        """Listen; returns the URL. OSError if that address can't be listened on."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=REQUEST_BYTES_MAX)
        bound = self._server.sockets[0].getsockname()[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{bound}{PATH}"

    def stop(self) -> None:
        """Stop listening at once."""
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Stop listening, and hang up on whoever asks."""
        self.stop()
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._clients) >= CLIENTS_MAX:
            writer.close()
            return
        self._clients.add(task)
        try:
            await asyncio.wait_for(self._talk(reader, writer), REQUEST_TIMEOUT_S)
        except (
            asyncio.TimeoutError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            OSError,
        ) as error:
            logger.debug("a reader of the metrics went away: %s", error)
        finally:
            self._clients.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            status, kind, body = _NOT_ALLOWED
        elif path != PATH:
            status, kind, body = _NOT_FOUND
        else:
            status, kind, body = "200 OK", CONTENT_TYPE_LATEST, generate_latest(self._registry)
        lines = (
            f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close"
        )  # fmt: skip
        writer.write("\r\n".join((*lines, "", "")).encode() + (b"" if method == "HEAD" else body))
        await writer.drain()
