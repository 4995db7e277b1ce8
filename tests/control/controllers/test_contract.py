"""Desks beside a master: what they say goes to `step` in time, and one that breaks harms nobody."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from aegis_elastic.control.controllers.contract import Applied, Controllers
from aegis_elastic.core.events import Event, Noted
from aegis_elastic.core.machine import create
from aegis_elastic.core.model import JobSpec, Status
from aegis_elastic.core.protocol.messages import Message, MessageType, ReportData, WirePhase

STATUS = create(JobSpec("job", "default", 1, 1, 0), 0.0)
MESSAGE = Message(
    aegis_name="job", aegis_namespace="default", worker="w0", type=MessageType.ACK,
    phase=WirePhase.BOOTCHECK, data=ReportData(), time_stamp=0.0, seq_num=1, uid="u", incarnation=0,
)  # fmt: skip


class LogListener:
    """A desk that wants its turn at a moment and then says one thing."""

    def __init__(self, due_s: float = math.inf) -> None:
        self._due_s = due_s
        self.seen: list[str] = []

    def on_report(self, message: Message, now_s: float) -> None:
        self.seen.append(message.worker)

    def on_transitions(self, status: Status, done: Sequence[Applied]) -> None:
        self.seen.append(status.phase.value)

    def due_s(self) -> float:
        return self._due_s

    def events_due(self, now_s: float) -> Sequence[Event]:
        self._due_s = math.inf
        return (Noted("w0", "node", "desk.turn", "it is time", now_s),)

    async def close(self) -> None:
        self.seen.append("closed")


class Broken(LogListener):
    """A desk whose method of that name raises."""

    def __init__(self, where: str) -> None:
        super().__init__(0.0)
        self._where = where

    def _break(self, where: str) -> None:
        if self._where == where:
            raise RuntimeError(f"broken in {where}")

    def on_report(self, message: Message, now_s: float) -> None:
        self._break("heard")

    def on_transitions(self, status: Status, done: Sequence[Applied]) -> None:
        self._break("followed")

    def events_due(self, now_s: float) -> Sequence[Event]:
        self._break("turn")
        return ()

    async def close(self) -> None:
        self._break("close")


def test_a_desk_has_its_turn_when_it_is_due_and_not_before() -> None:
    controllers, controller = Controllers(), LogListener(5.0)
    controllers.add(controller)
    assert controllers.due_s() == 5.0
    assert controllers.events_due(4.9) == []
    (event,) = controllers.events_due(5.0)
    assert isinstance(event, Noted)
    assert controllers.due_s() == math.inf


def test_nobody_is_waited_for_without_desks() -> None:
    assert Controllers().due_s() == math.inf
    assert Controllers().events_due(0.0) == []


@pytest.mark.parametrize("where", ["heard", "followed", "turn", "close"])
def test_a_desk_that_breaks_is_put_aside_and_the_others_go_on(where: str) -> None:
    controllers, sound = Controllers(), LogListener()
    controllers.add(Broken(where))
    controllers.add(sound)
    for _ in range(2):  # the second time it is not asked any more
        controllers.on_report(MESSAGE, 1.0)
        controllers.on_transitions(STATUS, ())
        controllers.events_due(1.0)
    asyncio.run(controllers.close())
    assert sound.seen == ["w0", "Pending", "w0", "Pending", "closed"]
    assert controllers.broken == {"Broken": f"RuntimeError: broken in {where}"}


class Busy(Broken):
    """Breaks while a task of its own is at work."""

    def __init__(self) -> None:
        super().__init__("turn")
        self.work = asyncio.get_running_loop().create_task(asyncio.sleep(3600))

    async def close(self) -> None:
        self.seen.append("closed")
        self.work.cancel()


def test_the_tasks_of_a_desk_that_breaks_end_at_once_and_what_others_use_stays() -> None:
    async def story() -> None:
        controllers, busy, sound = Controllers(), Busy(), LogListener()
        order: list[str] = []

        async def give_back() -> None:
            order.append(f"after {sound.seen}")

        for controller in (busy, sound):
            controllers.add(controller)
        controllers.on_close(give_back)
        controllers.events_due(1.0)
        await asyncio.wait_for(asyncio.gather(busy.work, return_exceptions=True), 5)
        assert busy.work.cancelled() and not order
        await controllers.close()
        assert busy.seen == ["closed"], "once"
        assert order == ["after ['closed']"]

    asyncio.run(story())


def test_a_desk_that_can_not_even_be_closed_harms_nobody() -> None:
    class Hopeless(Broken):
        async def close(self) -> None:
            raise OSError("nor in close")

    async def story() -> Controllers:
        controllers = Controllers()
        controllers.add(Hopeless("turn"))
        controllers.events_due(1.0)
        await controllers.close()
        return controllers

    assert asyncio.run(story()).broken == {"Hopeless": "RuntimeError: broken in turn"}
