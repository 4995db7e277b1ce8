"""One world without any control plane: agents that meet by themselves beside the endpoint."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from aegis_elastic.agents.plane.link import Identity
from aegis_elastic.agents.standalone.fallback import Fallback, Meeting
from aegis_elastic.core.protocol.orders import Action, Order

WAIT_S = 20.0
Meet = Callable[..., None]


@pytest.fixture(autouse=True)
def _silent_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def met() -> queue.Queue[tuple[str, Order | None, str]]:
    return queue.Queue()


@pytest.fixture
def meet(port: int, met: queue.Queue[tuple[str, Order | None, str]]) -> Iterator[Meet]:
    """`meet(worker, ...)`: an agent that has given up on the plane; what came of it lands in `met`."""
    with ExitStack() as stack:

        def begin(
            worker: str,
            *,
            hosting: bool = False,
            nodes: tuple[int, int] = (2, 2),
            ordinal: int = -1,
            wait_s: float = WAIT_S,
        ) -> None:
            me = Identity("ns", "job", worker, f"uid-{worker}", "node", "127.0.0.1", 2, ordinal)
            meeting = Meeting("127.0.0.1", port, hosting, *nodes, 3, wait_s, 0.3)
            on_done = lambda order, reason: met.put((worker, order, reason))  # noqa: E731 - a callback
            stack.callback(Fallback(meeting, me, f"127.0.0.1:{len(worker)}", on_done).close)

        yield begin


def _orders(met: queue.Queue[tuple[str, Order | None, str]], count: int) -> list[Order]:
    orders = []
    for _ in range(count):
        worker, order, reason = met.get(timeout=WAIT_S)
        assert order is not None, f"{worker}: {reason}"
        orders.append(order)
    return orders


def test_all_who_come_follow_the_same_order(
    meet: Meet, met: queue.Queue[tuple[str, Order | None, str]]
) -> None:
    meet("guest", ordinal=0)
    meet("host", hosting=True, ordinal=1)
    first, second = _orders(met, 2)
    assert first == second
    assert (first.action, first.incarnation, first.restart_count, first.max_retry) == (Action.RUN, 1, 0, 3)
    assert [(assignment.worker, assignment.rank_offset) for assignment in first.assignments] == [
        ("guest", 0),
        ("host", 2),
    ]
    assert first.store == "127.0.0.1:5", "the store of the one with group rank 0"


def test_two_launchers_of_the_endpoints_host(
    meet: Meet, met: queue.Queue[tuple[str, Order | None, str]]
) -> None:
    """Both would serve the meeting place; the second finds it there."""
    meet("first", hosting=True)
    meet("second", hosting=True)
    orders = _orders(met, 2)
    assert {assignment.worker for assignment in orders[0].assignments} == {"first", "second"}
    assert orders[0] == orders[1]


def test_when_enough_came_the_others_are_waited_for_no_longer_than_the_last_call(
    meet: Meet, met: queue.Queue[tuple[str, Order | None, str]]
) -> None:
    meet("host", hosting=True, nodes=(1, 3))
    (order,) = _orders(met, 1)
    assert [assignment.worker for assignment in order.assignments] == ["host"]


def test_one_node_needs_nobody(meet: Meet, met: queue.Queue[tuple[str, Order | None, str]]) -> None:
    meet("only", nodes=(1, 1))
    (order,) = _orders(met, 1)
    assert [assignment.nproc for assignment in order.assignments] == [2]


def test_too_few_learn_how_many_came(meet: Meet, met: queue.Queue[tuple[str, Order | None, str]]) -> None:
    meet("host", hosting=True, wait_s=0.5)
    assert met.get(timeout=WAIT_S) == ("host", None, "1 of 2 nodes came")


def test_nobody_serves_the_place(meet: Meet, met: queue.Queue[tuple[str, Order | None, str]]) -> None:
    meet("guest", wait_s=0.5)
    worker, order, reason = met.get(timeout=WAIT_S)
    assert (worker, order) == ("guest", None)
    assert "cannot reach the store at 127.0.0.1" in reason
