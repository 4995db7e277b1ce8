"""A fresh store for every start of training, made ahead."""

from __future__ import annotations

import queue

import pytest

from aegis_elastic.agents.peers.stores import StoreGone, StorePool, connect, split

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _silent_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # as our launcher has it


def test_the_pool_has_a_store_ready_and_makes_the_next_when_it_is_used() -> None:
    made: queue.Queue[None] = queue.Queue()
    pool = StorePool("127.0.0.1", lambda: made.put(None))
    try:
        made.get(timeout=WAIT_S)
        used = []
        for _ in range(4):
            address = pool.ready
            connect(address).set("key", "of this incarnation")
            assert pool.use(address)
            assert pool.use(address), "once more: it is in use already"
            used.append(address)
            made.get(timeout=WAIT_S)
        assert len({*used, pool.ready}) == 5
        assert not pool.use("127.0.0.1:1"), "not ours"
        connect(used[-2])
        connect(used[-1])
        with pytest.raises(StoreGone):
            connect(used[0], timeout_s=1)
    finally:
        pool.close()


def test_addresses_come_apart() -> None:
    assert split("10.0.0.1:29500") == ("10.0.0.1", 29500)
    assert split("[::1]:80") == ("::1", 80)
