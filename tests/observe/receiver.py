"""A real HTTP server for pages."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """What has arrived. `codes` are the next answers' status codes; 200 when there is none."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/hook"
        self.pages: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.codes: list[int] = []
        self.came = threading.Condition()

    def wait(self, count: int, timeout_s: float = 20) -> list[dict[str, Any]]:
        """All pages, as soon as there are that many."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.pages) >= count, timeout_s), self.pages
            return [*self.pages]


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Serve on a free port of the loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with received.came:
                code = received.codes.pop(0) if received.codes else 200
                if code < 300:
                    received.pages.append(json.loads(body))
                    received.headers.append(dict(self.headers))
                received.came.notify_all()
            self.send_response(code)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received = Receiver(server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()
