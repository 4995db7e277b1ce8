"""Desks: what sits beside the master and knows something that `step` should hear of.

The master decides nothing but what `core.machine` decides. Whoever watches for something (a pace, a
checkpoint, the cluster's bad nodes, the guard over it all) is a desk: it hears every accepted report, sees
every decision once it is durable, and puts events in line. A desk that breaks is put aside, closed, and
said so; the job goes on without it, since no watcher may become a reason why training doesn't run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from aegis_elastic.core.events import Event
from aegis_elastic.core.machine import Transition
from aegis_elastic.core.model import Status
from aegis_elastic.core.protocol.messages import Message

logger = logging.getLogger(__name__)

_BROKE = "the desk %s broke and is put aside; the job goes on without it"

CANCEL_AGAIN_S = 0.5

_Result = TypeVar("_Result")

# Looks at a node before its agent's Join is decided on; returns how risky it is
# (`core.policy.node_records.score`).
AdmissionCheck = Callable[[str], Awaitable[float]]
# Answers one operation of `aegisctl`. ValueError says why it can't.
AdminHandler = Callable[[dict[str, Any]], Awaitable[Any]]


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all have ended. Once is not enough: before Python 3.12 `wait_for` swallows a
    cancellation that comes together with what it waits for.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)


class Decided(NamedTuple):
    """An event and what `step` made of it."""

    event: Event
    made: Transition


class Controller(Protocol):
    """One watcher. All calls come from the master's loop and return at once; what waits for IO is a task of
    the desk's own, which gives its events to the `feed` that the desk got when it was made.
    """

    def heard(self, message: Message, now_s: float) -> None:
        """A report of a current agent was accepted (monotonic seconds). Before its events are decided on."""

    def followed(self, status: Status, done: Sequence[Decided]) -> None:
        """These decisions are durable, and `status` is what they led to. First with none, at the start."""

    def due_s(self) -> float:
        """The monotonic moment at which `turn` is wanted next; infinite for none."""

    def turn(self, now_s: float) -> Sequence[Event]:
        """Its time has come: events that go to `step` together with the facts that have arrived."""

    async def close(self) -> None:
        """The master ends: end every task and give everything back."""


class Controllers:
    """All desks of one master."""

    def __init__(self) -> None:
        self._desks: dict[str, Controller] = {}
        self._broken: dict[str, str] = {}
        self._porters: dict[str, AdmissionCheck] = {}
        # Those put aside whose tasks are being ended, or will be as soon as there is a loop.
        self._aside: dict[str, Controller] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._shared: list[Callable[[], Awaitable[None]]] = []
        self.admin_handlers: dict[str, AdminHandler] = {}

    def add(self, controller: Controller) -> None:
        """Take this desk in, under its class's name."""
        self._desks[type(controller).__name__] = controller

    def at_the_end(self, give_back: Callable[[], Awaitable[None]]) -> None:
        """Have this called when all desks are closed: it gives back what several of them use."""
        self._shared.append(give_back)

    def watch_the_door(self, controller: Controller, porter: AdmissionCheck) -> None:
        """Have this desk look at every node before its agent takes part."""
        self._porters[type(controller).__name__] = porter

    async def before_join(self, node_name: str) -> float:
        """Have everybody look at a node; returns the highest risk that anybody sees."""
        risk = 0.0
        for name, porter in [*self._porters.items()]:
            risk = max(risk, await self._await(name, porter(node_name), 0.0))
        return risk

    @property
    def broken(self) -> dict[str, str]:
        """Desks that were put aside, by name, and why."""
        return self._broken

    def heard(self, message: Message, now_s: float) -> None:
        """Tell everybody of a report."""
        for name, controller in [*self._desks.items()]:
            self._ask(name, lambda controller=controller: controller.heard(message, now_s), None)  # type: ignore[misc]

    def followed(self, status: Status, done: Sequence[Decided]) -> None:
        """Tell everybody what has been decided."""
        for name, controller in [*self._desks.items()]:
            self._ask(name, lambda controller=controller: controller.followed(status, done), None)  # type: ignore[misc]

    def due_s(self) -> float:
        """When the next one wants its turn."""
        dues = [self._ask(name, controller.due_s, math.inf) for name, controller in [*self._desks.items()]]
        return min(dues, default=math.inf)

    def turn(self, now_s: float) -> list[Event]:
        """The events of all whose time has come."""
        events: list[Event] = []
        for name, controller in [*self._desks.items()]:
            if self._ask(name, controller.due_s, math.inf) <= now_s:
                events += self._ask(name, lambda controller=controller: controller.turn(now_s), ())  # type: ignore[misc]
        return events

    async def close(self) -> None:
        """End them all."""
        for name, controller in [*self._desks.items()]:
            await self._await(name, controller.close(), None, breaks=False)
        self._desks.clear()
        for name in [*self._aside]:
            self._end(name)
        await asyncio.gather(*self._ending.values(), return_exceptions=True)
        for give_back in self._shared:
            try:
                await give_back()
            except Exception:
                logger.exception("what desks shared could not be given back")

    def _ask(self, name: str, question: Callable[[], _Result], otherwise: _Result) -> _Result:
        try:
            return question()
        except Exception as error:  # a watcher's fault is never the training's
            logger.exception(_BROKE, name)
            self._put_aside(name, error)
            return otherwise

    async def _await(
        self, name: str, work: Awaitable[_Result], otherwise: _Result, *, breaks: bool = True
    ) -> _Result:
        try:
            return await work
        except Exception as error:  # a watcher's fault is never the training's
            logger.exception(_BROKE, name)
            if breaks:
                self._put_aside(name, error)
            else:
                self._broken.setdefault(name, f"{type(error).__name__}: {error}")
            return otherwise

    def _put_aside(self, name: str, error: Exception) -> None:
        """Nobody asks it any more; its tasks would go on acting on what it knew when it broke."""
        controller = self._desks.pop(name, None)
        self._porters.pop(name, None)
        self._broken.setdefault(name, f"{type(error).__name__}: {error}")
        if controller is not None:
            self._aside[name] = controller
            self._end(name)

    def _end(self, name: str) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # nothing can run without one; `close` ends it
        work = self._await(name, self._aside.pop(name).close(), None, breaks=False)
        self._ending[name] = loop.create_task(work, name=f"end of {name}")
