"""An operator's look at one node: whatever is asked is answered, and the newest look is the only one."""

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


class Looked:
    """A node, and what it says when it is woken."""

    def __init__(self, settings: CheckSettings) -> None:
        self._woken = threading.Event()
        self.looking = OperatorCheckWatcher(ME, settings, self._woken.set)

    def ask(self, look: str, *checks: str, **more: Any) -> Mapping[str, Any]:
        """The whole answer to this look."""
        self.looking.begin(OperatorCheck(ME.uid, look, checks, **more))
        while True:
            said = self.looking.news()
            if said is not None and said.get("done"):
                assert said["look"] == look
                return said
            assert self._woken.wait(WAIT_S), said
            self._woken.clear()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Looked]:
    made = Looked(CheckSettings({"checkpoint": str(tmp_path)}, {"io": 20.0}))
    yield made
    made.looking.close()


def test_checks_are_answered_with_this_node_s_own_paths(node: Looked, tmp_path: Path) -> None:
    assert node.looking.news() is None
    said = node.ask("1", "io", "rdma")
    found = {result["checkType"]: result for result in said["results"]}
    assert found["io"]["details"]["checkpoint_path"] == str(tmp_path)
    assert found["rdma"]["pass"] and "why" not in said
    assert node.ask("1", "gpu") == said, "the same look is not begun again"


@pytest.mark.parametrize(
    ("checks", "more", "why"),
    [
        (("warp",), {}, "no check is called warp"),
        (("health",), {"world": {"groupRank": "x"}}, "Expected `int`"),
        (("io",), {"budgets_s": {"io": -1.0}}, "budgets must be above 0 s"),
        ((), {"burn_s": -3.0}, "duration must be above 0 s"),
    ],
)
def test_what_can_t_be_done_is_answered_with_why(
    node: Looked, checks: tuple[str, ...], more: dict[str, Any], why: str
) -> None:
    said = node.ask("1", *checks, **more)
    assert said["why"].startswith("cannot look at this node: ") and why in said["why"]


def test_a_newer_look_ends_an_older_one_and_so_does_the_agent_s_end(node: Looked) -> None:
    node.looking.begin(OperatorCheck(ME.uid, "long", burn_s=600.0))
    assert [result["checkType"] for result in node.ask("short", "rdma")["results"]] == ["rdma"]
    node.looking.begin(OperatorCheck(ME.uid, "again", burn_s=600.0))
    node.looking.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "aegis-look"]
