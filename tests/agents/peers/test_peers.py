"""What the agents of one incarnation say to each other in its store."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from aegis_elastic.agents.peers.peers import ENDED_BY_PLANE, Peers
from aegis_elastic.agents.peers.stores import StoreGone, serve

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _silent_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # as our launcher has it


class _World:
    """One incarnation's agents in one process; what they are called back with lands in queues."""

    def __init__(self, workers: int) -> None:
        self.store = serve("127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.store.port}"
        self.ends: queue.Queue[tuple[Peers, str]] = queue.Queue()
        self.nexts: queue.Queue[tuple[Peers, str]] = queue.Queue()
        self.met: queue.Queue[tuple[Peers, bool]] = queue.Queue()
        self.counted: queue.Queue[None] = queue.Queue()
        self.names = tuple(f"w{rank}" for rank in range(workers))
        self.peers = [self.join(rank) for rank in range(workers)]

    def join(self, rank: int) -> Peers:
        return Peers(
            self.address,
            rank,
            self.names,
            lambda peers: self.ends.put((peers, peers.ended)),
            lambda peers, address: self.nexts.put((peers, address)),
            lambda: self.counted.put(None),
        )

    def leave(self) -> None:
        for peers in self.peers:
            peers.close()
        for peers in self.peers:
            peers.join()

    def saw_the_end(self, peers: Peers, met: bool) -> None:
        self.met.put((peers, met))


@pytest.fixture
def world() -> Iterator[Callable[[int], _World]]:
    with ExitStack() as stack:

        def make(workers: int) -> _World:
            made = _World(workers)
            stack.callback(made.leave)
            return made

        yield make


def test_an_incarnation_ends_in_one_way_and_everybody_sees_it(world: Callable[[int], _World]) -> None:
    three = world(3)
    assert three.peers[1].claim("rank 1 died") == "rank 1 died"
    assert three.peers[2].claim("rank 2 died") == "rank 1 died"
    assert three.peers[0].claim(ENDED_BY_PLANE) == "rank 1 died"
    seen = [three.ends.get(timeout=WAIT_S) for _ in range(3)]
    assert {peers for peers, _ in seen} == set(three.peers)
    assert {how for _, how in seen} == {"rank 1 died"}


def test_the_first_agent_publishes_where_the_next_store_is(world: Callable[[int], _World]) -> None:
    two = world(2)
    two.peers[1].claim("rank 1 died")
    two.peers[0].publish_next("10.0.0.1:4711")
    published = [two.nexts.get(timeout=WAIT_S) for _ in range(2)]
    assert {address for _, address in published} == {"10.0.0.1:4711"}


def test_agents_are_seen_while_they_live(world: Callable[[int], _World]) -> None:
    two = world(2)
    while two.peers[0].alive != {"w0", "w1"}:
        two.counted.get(timeout=WAIT_S)
    two.peers[1].close()
    two.peers[1].join()
    while two.peers[0].alive != {"w0"}:
        two.counted.get(timeout=WAIT_S)


def test_those_who_are_done_wait_for_all_who_are_not(world: Callable[[int], _World]) -> None:
    """Longer than their patience: who is seen is waited for."""
    three = world(3)
    for peers in three.peers[:2]:
        peers.meet_at_end(2.0, three.saw_the_end)
    with pytest.raises(queue.Empty):
        three.met.get(timeout=3.5)
    three.peers[2].meet_at_end(2.0, three.saw_the_end)
    assert {three.met.get(timeout=WAIT_S) for _ in range(3)} == {(peers, True) for peers in three.peers}


def test_the_dead_are_not_waited_for_at_the_end(world: Callable[[int], _World]) -> None:
    three = world(3)
    three.peers[2].close()
    three.peers[2].join()
    for peers in three.peers[:2]:
        peers.meet_at_end(1.5, three.saw_the_end)
    assert {three.met.get(timeout=WAIT_S) for _ in range(2)} == {(peers, False) for peers in three.peers[:2]}


def test_a_store_that_is_gone_is_reported_as_gone(world: Callable[[int], _World]) -> None:
    one = world(1)
    peers = one.peers[0]
    del one.store
    with pytest.raises(StoreGone, match="doesn't answer"):
        peers.claim("too late")
    peers.meet_at_end(30.0, one.saw_the_end)
    assert one.met.get(timeout=WAIT_S) == (peers, False)
