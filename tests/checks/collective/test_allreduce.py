"""The collective checks among four real hosts (in `make full` also among eight), with cables cut and
throttled: who is named, and who not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from aegis_elastic.core.diagnosis.recovery import judge
from aegis_elastic.core.events import Finding
from aegis_elastic.core.model import CheckResult
from aegis_elastic.testing.netns import Net, NetnsUnavailable
from tests.checks.support import COMMAND, ROOT

pytestmark = pytest.mark.netns

NODES = 4
CONNECTION, PERFORMANCE = "allreduce_connection", "allreduce_performance"
STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Nodes:
    """Some nodes, and one more host with the store: traffic between nodes can be cut without the store's."""

    def __init__(self, net: Net) -> None:
        *self.hosts, self._store_host = net.hosts
        self.count = len(self.hosts)
        argv = [sys.executable, "-c", STORE, self._store_host.address]
        self._store = self._store_host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._store.stdout is not None
        self._port = int(self._store.stdout.readline())

    def check(self, name: str, tag: str, seconds: float) -> list[CheckResult]:
        """One check on all nodes at once; the results by group rank."""
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(lambda rank: self._check(rank, name, tag, seconds), range(self.count)))

    def _check(self, rank: int, name: str, tag: str, seconds: float) -> CheckResult:
        world = {
            "groupRank": rank,
            "groupWorldSize": self.count,
            "rankOffset": rank,
            "worldSize": self.count,
            "localWorldSize": 1,
            "masterAddr": self._store_host.address,
            "masterPort": self._port,
            "tag": tag,
        }
        request: dict[str, Any] = {"checks": [name], "world": world, "budgetsS": {name: seconds}}
        argv = ["env", "GLOO_SOCKET_IFNAME=eth0", *COMMAND]
        process = self.hosts[rank].popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        output, _ = process.communicate(json.dumps(request))
        assert process.returncode == 0
        return msgspec.json.decode(output, type=CheckResult)

    def stop(self) -> None:
        self._store.communicate("")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Net(NODES + 1) as net:
        made = Nodes(net)
        yield made
        made.stop()


@pytest.fixture(autouse=True)
def _needs_namespaces(unmet: Callable[[str], None], request: pytest.FixtureRequest) -> None:
    try:
        request.getfixturevalue("nodes")
    except NetnsUnavailable as why:
        unmet(str(why))


def level(result: CheckResult) -> int:
    return judge((Finding(result.check_type, result.finding, result.scope),)).level


def test_a_node_cut_off_from_every_other_is_found_and_it_alone_must_leave(nodes: Nodes) -> None:
    cut = nodes.hosts[2]
    for other in nodes.hosts:
        if other is not cut:
            cut.block(dst=other.address)
    try:
        found = nodes.check(CONNECTION, "node", 20)
    finally:
        cut.unblock()
    assert [result.passed for result in found] == [True, True, False, True], [r.result for r in found]
    assert (found[2].finding, found[2].scope) == ("allreduce_connection.node", "hardware")
    assert level(found[2]) == 3
    for result in found:
        assert result.details["nodes"] == "2" and result.details["links"] == ""
    assert "this node, rank 0, is sound; broken is node rank 2" in found[0].result


def test_a_link_between_two_sound_nodes_is_found_and_nobody_must_leave(nodes: Nodes) -> None:
    nodes.hosts[1].block(dst=nodes.hosts[3].address)
    try:
        found = nodes.check(CONNECTION, "link", 20)
    finally:
        nodes.hosts[1].unblock()
    assert [result.passed for result in found] == [True, False, True, False], [r.result for r in found]
    for result in (found[1], found[3]):
        assert (result.finding, result.scope) == ("allreduce_connection.link", "network")
        assert level(result) == 1
        assert "the link 1-3 of 4 nodes is broken, its ends are sound" in result.result
    assert found[0].details["links"] == "1-3" and found[0].details["nodes"] == ""


def test_four_sound_nodes_are_through_after_one_all_reduce(nodes: Nodes) -> None:
    found = nodes.check(CONNECTION, "sound", 30)
    assert [result.result for result in found] == [
        "allreduce_connection: 4 nodes form a group, and its sum is right"
    ] * NODES


@pytest.mark.parametrize(
    ("megabits", "seconds", "factors"),
    [
        pytest.param(200, 50, (1.5, 2.5), marks=pytest.mark.full),
        pytest.param(320, 182, (1.1, 1.4), marks=pytest.mark.full),
    ],
)
def test_a_node_with_less_bandwidth_is_named_with_its_factor_and_nobody_else(
    nodes: Nodes, megabits: int, seconds: float, factors: tuple[float, float]
) -> None:
    # All are shaped, so that the figures are the network's and not those of shared cores.
    for rank, host in enumerate(nodes.hosts):
        host.throttle(megabits if rank == 1 else 400)
    try:
        found = nodes.check(PERFORMANCE, f"slow {megabits}", seconds)
    finally:
        for host in nodes.hosts:
            host.throttle(None)
    assert [result.passed for result in found] == [True, False, True, True], [r.result for r in found]
    assert (found[1].finding, found[1].scope) == ("allreduce_performance.slow", "slow")
    assert level(found[1]) == 1
    for result in found:
        named, _, factor = str(result.details["slow_bandwidth"]).partition(" x")
        assert named == "1"
        assert factors[0] <= float(factor) <= factors[1]
    assert "slow is node rank 1" in found[0].result


@pytest.mark.full
@pytest.mark.timeout(600)
def test_among_eight_nodes_the_one_that_is_blocked_and_the_one_that_is_slowed_are_named() -> None:
    with Net(8 + 1) as net:
        nodes = Nodes(net)
        try:
            cut = nodes.hosts[5]
            for other in nodes.hosts:
                if other is not cut:
                    cut.block(dst=other.address)
            found = nodes.check(CONNECTION, "node of eight", 100)
            cut.unblock()
            assert [rank for rank, result in enumerate(found) if not result.passed] == [5], found
            assert (found[5].finding, level(found[5])) == ("allreduce_connection.node", 3)
            print(found[5].result)

            for rank, host in enumerate(nodes.hosts):
                host.throttle(100 if rank == 3 else 200)
            found = nodes.check(PERFORMANCE, "slow of eight", 182)
            assert [rank for rank, result in enumerate(found) if not result.passed] == [3], found
            assert found[3].finding == "allreduce_performance.slow"
            print(found[3].result)
        finally:
            nodes.stop()
