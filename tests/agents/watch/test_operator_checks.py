"""Operator checks of one node: every request is answered, and only the newest runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from aegis_elastic.agents.checks.requests import CheckSettings
from aegis_elastic.agents.plane.link import Identity
from aegis_elastic.agents.watch.operator_checks import OperatorCheckWatcher
from aegis_elastic.core.protocol.directives import OperatorCheck

ME = Identity("default", "job", "w", "uid", "node", "127.0.0.1", 1)
WAIT_S = 60.0


class Node:
    """A node, and its answer when it wakes the agent."""

    def __init__(self, settings: CheckSettings) -> None:
        self._woken = threading.Event()
        self.watcher = OperatorCheckWatcher(ME, settings, self._woken.set)

    def run(self, look: str, *checks: str, **more: Any) -> Mapping[str, Any]:
        """The complete answer to this check."""
        self.watcher.start(OperatorCheck(ME.uid, look, checks, **more))
        while True:
            answer = self.watcher.facts()
            if answer is not None and answer.get("done"):
                assert answer["look"] == look
                return answer
            assert self._woken.wait(WAIT_S), answer
            self._woken.clear()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(CheckSettings({"checkpoint": str(tmp_path)}, {"io": 20.0}))
    yield made
    made.watcher.close()


def test_checks_use_the_paths_of_this_node(node: Node, tmp_path: Path) -> None:
    assert node.watcher.facts() is None
    answer = node.run("1", "io", "rdma")
    found = {result["checkType"]: result for result in answer["results"]}
    assert found["io"]["details"]["checkpoint_path"] == str(tmp_path)
    assert found["rdma"]["pass"] and "why" not in answer
    assert node.run("1", "gpu") == answer, "the same check is not run again"


@pytest.mark.parametrize(
    ("checks", "more", "why"),
    [
        (("warp",), {}, "no check is called warp"),
        (("health",), {"world": {"groupRank": "x"}}, "Expected `int`"),
        (("io",), {"budgets_s": {"io": -1.0}}, "budgets must be above 0 s"),
        ((), {"burn_s": -3.0}, "duration must be above 0 s"),
    ],
)
def test_what_cannot_be_done_is_answered_with_the_reason(
    node: Node, checks: tuple[str, ...], more: dict[str, Any], why: str
) -> None:
    answer = node.run("1", *checks, **more)
    assert answer["why"].startswith("cannot check this node: ") and why in answer["why"]


def test_a_newer_check_ends_an_older_one_and_so_does_the_end_of_the_agent(node: Node) -> None:
    node.watcher.start(OperatorCheck(ME.uid, "long", burn_s=600.0))
    assert [result["checkType"] for result in node.run("short", "rdma")["results"]] == ["rdma"]
    node.watcher.start(OperatorCheck(ME.uid, "again", burn_s=600.0))
    node.watcher.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "aegis-operator-check"]
