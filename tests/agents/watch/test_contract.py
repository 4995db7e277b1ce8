"""Watchers beside an agent: what they tell, and that one which fails harms nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from aegis_elastic.agents.watch.contract import Watched, Watchers
from aegis_elastic.core.protocol.messages import WATCHED_BYTES_MAX
from aegis_elastic.core.rank_assignment import RankAssignment

SEAT = RankAssignment("node-0", "uid", 0, 0, 2)


class Counting:
    """Counts what it is told, and fails where it is asked to."""

    def __init__(self, name: str, wake: Callable[[], None], fails_at: str = "") -> None:
        self.name = name
        self.wake = wake
        self.calls: list[str] = []
        self.facts: Mapping[str, Any] | None = {"n": 1}
        self._fails_at = fails_at

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self._fails_at:
            raise RuntimeError(f"{self.name} can't")

    def environment(self) -> Mapping[str, str]:
        self._note("environment")
        return {f"AEGIS_{self.name.upper()}": "1"}

    def started(self, ranks: Watched) -> None:
        self._note("started")

    def ended(self) -> None:
        self._note("ended")

    def news(self) -> Mapping[str, Any] | None:
        self._note("news")
        return self.facts

    def close(self) -> None:
        self._note("close")


def pair(fails_at: str = "") -> tuple[Watchers, list[Counting], list[str]]:
    made: list[Counting] = []
    woken: list[str] = []

    def make(name: str, fails: str) -> Callable[[Callable[[], None]], Counting]:
        def maker(wake: Callable[[], None]) -> Counting:
            made.append(Counting(name, wake, fails))
            return made[-1]

        return maker

    return Watchers((make("good", ""), make("bad", fails_at)), lambda: woken.append("wake")), made, woken


def test_their_environment_and_their_news_are_merged_and_silence_is_nothing() -> None:
    watchers, (good, bad), _ = pair()
    bad.facts = None
    assert watchers.environment() == {"AEGIS_GOOD": "1", "AEGIS_BAD": "1"}
    watchers.started(Watched(1, SEAT, {0: 11, 1: 12}))
    assert {name: bytes(facts) for name, facts in watchers.news().items()} == {"good": b'{"n":1}'}
    watchers.ended()
    watchers.close()
    assert good.calls == bad.calls == ["environment", "started", "news", "ended", "close"]


@pytest.mark.parametrize("call", ["environment", "started", "ended", "news"])
def test_one_that_fails_is_closed_and_looked_after_no_more(call: str) -> None:
    watchers, (good, bad), _ = pair(fails_at=call)
    for _ in range(2):
        watchers.environment()
        watchers.started(Watched(1, SEAT, {0: 11}))
        told = watchers.news()
        watchers.ended()
    assert "good" in told and "bad" not in told
    assert bad.calls[-2:] == [call, "close"] and bad.calls.count(call) == 1
    assert good.calls.count("ended") == 2


def test_news_that_are_too_large_for_a_report_cost_their_watcher_only() -> None:
    watchers, (_, bad), _ = pair()
    bad.facts = {"text": "x" * WATCHED_BYTES_MAX}
    assert set(watchers.news()) == {"good"}
    assert bad.calls[-1] == "close"


def test_one_that_cannot_be_made_is_not_missed() -> None:
    def broken(wake: Callable[[], None]) -> Counting:
        raise OSError("no inotify left")

    watchers = Watchers((broken, lambda wake: Counting("good", wake)), lambda: None)
    assert set(watchers.news()) == {"good"}


def test_many_wakes_ask_for_one_report_and_none_is_lost() -> None:
    watchers, (good, bad), woken = pair()
    for _ in range(100):
        good.wake()
        bad.wake()
    assert len(woken) == 1
    watchers.news()
    good.wake()
    assert len(woken) == 2
