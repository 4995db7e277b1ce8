"""The ways in which an agent fails to join, each reported to it once and rightly."""

from __future__ import annotations

import http.server
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aegis_elastic.agents.mailbox.events import NotJoined, Refused
from aegis_elastic.agents.mailbox.mailbox import Mailbox
from aegis_elastic.agents.plane.link import Identity, PlaneLink
from aegis_elastic.core.model import Failure
from aegis_elastic.core.protocol import messages
from aegis_elastic.core.protocol.messages import MessageType, ReportData, WirePhase

WAIT_S = 30.0
ME = Identity("ns", "job", "w", "uid", "node", "127.0.0.1", 1)
Join = Callable[[int], Mailbox]


@pytest.fixture
def join() -> Iterator[Join]:
    """`join(port)`: the mailbox of an agent that joins there, with a join timeout of half a second."""
    links: list[tuple[PlaneLink, Mailbox]] = []

    def begin(port: int) -> Mailbox:
        mailbox = Mailbox()
        link = PlaneLink(ME, ("127.0.0.1", port), None, mailbox)
        links.append((link, mailbox))
        link.start(0.5)
        return mailbox

    yield begin
    for link, mailbox in links:
        link.close(WAIT_S)
        mailbox.close()


def _next(mailbox: Mailbox) -> object:
    assert select.select([mailbox], [], [], WAIT_S)[0], "no event came"
    (event,) = mailbox.drain()
    return event


def _nothing_more(mailbox: Mailbox, seconds: float) -> bool:
    return select.select([mailbox], [], [], seconds)[0] == []


def test_that_nobody_is_there_is_reported_once_after_the_join_timeout(join: Join) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began_s = time.monotonic()
    mailbox = join(port)
    event = _next(mailbox)
    assert isinstance(event, NotJoined)
    assert event.reason == f"cannot reach the control plane at 127.0.0.1:{port}: Connection refused"
    assert time.monotonic() - began_s >= 0.5
    assert _nothing_more(mailbox, 3.0), "it goes on trying, but quietly"


def test_a_port_that_accepts_and_says_nothing_is_nobody_there(join: Join) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        event = _next(join(mute.getsockname()[1]))
    assert isinstance(event, NotJoined)
    assert "timed out" in event.reason


def test_a_connection_that_is_cut_may_be_a_plane_that_ends(join: Join) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def cut() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)

        cutter = threading.Thread(target=cut)
        cutter.start()
        event = _next(join(listener.getsockname()[1]))
        listener.shutdown(socket.SHUT_RDWR)
        cutter.join()
    assert isinstance(event, NotJoined)


class _Web(http.server.BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def test_another_program_on_the_port_is_the_users_to_mend(join: Join) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Web) as web:
        serving = threading.Thread(target=web.serve_forever, args=(0.05,))
        serving.start()
        event = _next(join(web.server_port))
        web.shutdown()
        serving.join()
    assert isinstance(event, Refused)
    assert event.usage
    assert "another program answers there" in event.reason


@pytest.mark.parametrize("output", ["x" * 500_000, "caf\udce9"])
def test_whatever_ranks_print_their_failure_is_reported(output: str) -> None:
    link = PlaneLink(ME, ("127.0.0.1", 1), None, Mailbox())
    failures = tuple(Failure(rank, rank, 1.0, exit_code=1, exception=output) for rank in range(4))
    data = ReportData(failures=failures, reason=output, clues=("hang",))
    link.report(MessageType.ERROR, WirePhase.COMMAND, 7, 1, data)
    assert link._report is not None
    sent = messages.decode(link._report).data
    assert isinstance(sent, ReportData)
    assert [failure.rank for failure in sent.failures] == [0, 1, 2, 3]
    assert sent.clues == ("hang",) and len(sent.reason) <= 500
