"""Watchers beside an agent: what they report, and one that fails harms no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from aegis_elastic.agents.watch.contract import WatchedRanks, Watchers
from aegis_elastic.core.protocol.messages import WATCHED_BYTES_MAX
from aegis_elastic.core.rank_assignment import RankAssignment

ASSIGNMENT = RankAssignment("node-0", "uid", 0, 0, 2)


class Counting:
    """Records its calls, and fails where it is asked to."""

    def __init__(self, name: str, wake: Callable[[], None], fails_at: str = "") -> None:
        self.name = name
        self.wake = wake
        self.calls: list[str] = []
        self.current: Mapping[str, Any] | None = {"n": 1}
        self._fails_at = fails_at

    def _record(self, call: str) -> None:
        self.calls.append(call)
        if call == self._fails_at:
            raise RuntimeError(f"{self.name} can't")

    def environment(self) -> Mapping[str, str]:
        self._record("environment")
        return {f"AEGIS_{self.name.upper()}": "1"}

    def on_started(self, ranks: WatchedRanks) -> None:
        self._record("on_started")

    def on_ended(self) -> None:
        self._record("on_ended")

    def facts(self) -> Mapping[str, Any] | None:
        self._record("facts")
        return self.current

    def close(self) -> None:
        self._record("close")


def pair(fails_at: str = "") -> tuple[Watchers, list[Counting], list[str]]:
    made: list[Counting] = []
    woken: list[str] = []

    def make(name: str, fails: str) -> Callable[[Callable[[], None]], Counting]:
        def maker(wake: Callable[[], None]) -> Counting:
            made.append(Counting(name, wake, fails))
            return made[-1]

        return maker

    return Watchers((make("good", ""), make("bad", fails_at)), lambda: woken.append("wake")), made, woken


def test_their_environments_and_facts_are_merged_and_none_adds_nothing() -> None:
    watchers, (good, bad), _ = pair()
    bad.current = None
    assert watchers.environment() == {"AEGIS_GOOD": "1", "AEGIS_BAD": "1"}
    watchers.on_started(WatchedRanks(1, ASSIGNMENT, {0: 11, 1: 12}))
    assert {name: bytes(facts) for name, facts in watchers.facts().items()} == {"good": b'{"n":1}'}
    watchers.on_ended()
    watchers.close()
    assert good.calls == bad.calls == ["environment", "on_started", "facts", "on_ended", "close"]


@pytest.mark.parametrize("call", ["environment", "on_started", "on_ended", "facts"])
def test_one_that_fails_is_closed_and_not_called_again(call: str) -> None:
    watchers, (good, bad), _ = pair(fails_at=call)
    for _ in range(2):
        watchers.environment()
        watchers.on_started(WatchedRanks(1, ASSIGNMENT, {0: 11}))
        facts = watchers.facts()
        watchers.on_ended()
    assert "good" in facts and "bad" not in facts
    assert bad.calls[-2:] == [call, "close"] and bad.calls.count(call) == 1
    assert good.calls.count("on_ended") == 2


def test_facts_that_are_too_large_for_a_report_end_their_watcher_only() -> None:
    watchers, (_, bad), _ = pair()
    bad.current = {"text": "x" * WATCHED_BYTES_MAX}
    assert set(watchers.facts()) == {"good"}
    assert bad.calls[-1] == "close"


def test_one_that_cannot_be_made_leaves_the_others() -> None:
    def broken(wake: Callable[[], None]) -> Counting:
        raise OSError("no inotify left")

    watchers = Watchers((broken, lambda wake: Counting("good", wake)), lambda: None)
    assert set(watchers.facts()) == {"good"}


def test_many_wakes_make_one_report_and_none_is_lost() -> None:
    watchers, (good, bad), woken = pair()
    for _ in range(100):
        good.wake()
        bad.wake()
    assert len(woken) == 1
    watchers.facts()
    good.wake()
    assert len(woken) == 2
