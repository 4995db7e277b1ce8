"""A waiting spare is checked while it waits, by real checks; and the controller that gets its report."""

from __future__ import annotations

import dataclasses
import selectors
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aegis_elastic.agents.checks.requests import CheckSettings
from aegis_elastic.agents.checks.spare_fitness import SPARE_CHECKS, SpareFitness
from aegis_elastic.agents.plane.link import Identity
from aegis_elastic.control.controllers.spares import SpareController
from aegis_elastic.core.events import Event, Fit, Join, Noted
from aegis_elastic.core.machine import create, step
from aegis_elastic.core.model import JobSpec
from aegis_elastic.core.protocol.messages import Message, MessageType, ReportData, WirePhase

PATIENCE_S = 60.0
ME = Identity("default", "job", "c", "uid-c", "node-c", "127.0.0.1", 2, -1)


class Spare:
    """An agent's loop, as far as a spare needs one."""

    def __init__(self, checks: tuple[str, ...], paths: dict[str, str]) -> None:
        self.selector = selectors.DefaultSelector()
        self.wakes = 0
        self.fitness = SpareFitness(ME, CheckSettings(paths=paths), checks, 0, self.selector, self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def wait(self) -> dict[str, Any]:
        until_s = time.monotonic() + PATIENCE_S
        while not self.fitness.facts():
            assert time.monotonic() < until_s
            for key, _ in self.selector.select(1.0):
                key.data()
        facts: dict[str, Any] = msgspec.json.decode(self.fitness.facts()["fitness"])
        return facts


@pytest.fixture
def spare_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made: list[Spare] = []

    def make(checks: tuple[str, ...], **paths: str) -> Spare:
        made.append(Spare(checks, paths))
        return made[-1]

    yield make
    for spare in made:
        spare.fitness.cancel()
        assert not spare.selector.get_map()
        spare.selector.close()


@pytest.mark.full
def test_a_sound_node_is_fit_and_its_ranks_form_a_group_of_their_own(tmp_path: Path, spare_of: Any) -> None:
    spare = spare_of(SPARE_CHECKS["full"], checkpoint=str(tmp_path))
    spare.fitness.start()
    spare.fitness.start()  # the next order finds it waiting still
    assert spare.wait()["fit"] is True
    assert spare.wakes == 1
    spare.fitness.start()
    assert spare.wakes == 1, "once is enough"


def test_a_node_without_its_storage_is_not_fit_and_gives_the_reason(tmp_path: Path, spare_of: Any) -> None:
    (tmp_path / "mount").write_text("where a folder should be")
    spare = spare_of(("io", "runtime"), checkpoint=str(tmp_path / "mount" / "checkpoints"))
    spare.fitness.start()
    facts = spare.wait()
    assert facts["fit"] is False
    assert "mount/checkpoints" in facts["reason"]


def test_a_node_whose_address_is_not_its_own_is_not_fit(
    spare_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = spare_of(("health",))
    monkeypatch.setattr(spare.fitness, "_me", dataclasses.replace(ME, node_ip="192.0.2.1"))
    spare.fitness.start()
    facts = spare.wait()
    assert facts["fit"] is False
    assert "cannot run its checks" in facts["reason"]


def test_a_spare_that_gets_ranks_meanwhile_ends_its_checks(spare_of: Any) -> None:
    spare = spare_of(SPARE_CHECKS["full"])
    spare.fitness.start()
    spare.fitness.cancel()
    assert spare.fitness.facts() == {}
    assert not spare.selector.get_map()


def test_a_job_that_asks_for_no_checks_has_fit_spares(spare_of: Any) -> None:
    spare = spare_of(SPARE_CHECKS["off"])
    spare.fitness.start()
    assert spare.wait()["fit"] is True


def test_the_controller_makes_one_event_for_each_waiting_spare() -> None:
    fed: list[Event] = []
    controller = SpareController(fed.append)
    status = create(JobSpec("job", "default", 1, 1, 3), time.time())
    controller.on_transitions(status, ())

    def report(worker: str, facts: object, uid: str = "") -> None:
        watched = {"fitness": msgspec.Raw(msgspec.json.encode(facts))}
        message = Message(
            aegis_name="job", aegis_namespace="default", worker=worker, type=MessageType.ACK,
            phase=WirePhase.BOOTCHECK, time_stamp=1.0, seq_num=1, uid=uid or f"uid-{worker}", incarnation=0,
            data=ReportData(state="spare", watched=watched),
        )  # fmt: skip
        controller.on_report(message, 0.0)

    report("c", {"fit": True})
    assert fed == [], "the status doesn't have it yet"
    status = step(status, Join("c", "uid-c", "node-c", "127.0.0.1", 1), time.time()).status
    controller.on_transitions(status, ())
    for _ in range(3):
        report("c", {"fit": True})
    report("c", {"fit": "certainly"})
    report("c", {"fit": True}, uid="another life")
    assert fed == [Fit("c", "uid-c", True)]
    report("c", {"fit": False, "reason": "its disk is full"})
    assert fed[1] == Fit("c", "uid-c", False, "its disk is full")
    assert isinstance(fed[2], Noted)
    assert (fed[2].code, fed[2].node_name, fed[2].detail) == ("spare.unfit", "node-c", "its disk is full")
