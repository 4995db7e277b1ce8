"""Controllers: what watches one matter beside the master, and puts events in line for `step`.

The master decides nothing but what `core.machine` decides. Whoever watches for something (progress, a
checkpoint, the cluster's bad nodes, the guard over it all) is a controller: it gets every accepted report,
sees every transition once it is durable, and puts events in line. A controller that raises is put aside,
closed, and reported; the job goes on without it, since no watcher may become a reason why training doesn't
run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from aegis_elastic.core.events import Event
from aegis_elastic.core.machine import Transition
from aegis_elastic.core.model import Status
from aegis_elastic.core.protocol.messages import Message

logger = logging.getLogger(__name__)

_BROKE = "the controller %s broke and is put aside; the job goes on without it"

_Result = TypeVar("_Result")

# Takes a node's name before its agent's Join is decided on; returns how risky the node is
# (`core.policy.node_records.score`).
AdmissionCheck = Callable[[str], Awaitable[float]]
# Answers one operation of `aegisctl`. ValueError says why it can't.
AdminHandler = Callable[[dict[str, Any]], Awaitable[Any]]


class Applied(NamedTuple):
    """An event and what `step` made of it."""

    event: Event
    transition: Transition


class Controller(Protocol):
    """One controller. All calls come from the master's loop and return at once; what waits for IO is a task
    of the controller's own, which gives its events to the `feed` that the controller got when it was made.
    """

    def on_report(self, report: Message, now_s: float) -> None:
        """A report of a member was accepted (monotonic seconds). Before its events are decided on."""

    def on_transitions(self, status: Status, transitions: Sequence[Applied]) -> None:
        """These are durable, and `status` is what they led to. First with none, at the start."""

    def due_s(self) -> float:
        """The monotonic moment at which `events_due` is to be called next; infinite for none."""

    def events_due(self, now_s: float) -> Sequence[Event]:
        """Its time has come: events that go to `step` together with those that have arrived."""

    async def close(self) -> None:
        """The master ends: end every task and give everything back."""


class Controllers:
    """All controllers of one master."""

    def __init__(self) -> None:
        self._controllers: dict[str, Controller] = {}
        self._broken: dict[str, str] = {}
        self._admission_checks: dict[str, AdmissionCheck] = {}
        # Those put aside whose tasks are being ended, or will be as soon as there is a loop.
        self._aside: dict[str, Controller] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._on_close: list[Callable[[], Awaitable[None]]] = []
        self.admin_handlers: dict[str, AdminHandler] = {}

    def add(self, controller: Controller) -> None:
        """Add a controller under its class's name."""
        self._controllers[type(controller).__name__] = controller

    def on_close(self, give_back: Callable[[], Awaitable[None]]) -> None:
        """Have this called when all controllers are closed: it gives back what several of them use."""
        self._on_close.append(give_back)

    def add_admission_check(self, controller: Controller, check: AdmissionCheck) -> None:
        """Have this controller check every node before its agent takes part."""
        self._admission_checks[type(controller).__name__] = check

    async def admit(self, node_name: str) -> float:
        """Run all admission checks on a node; returns the highest risk that any of them sees."""
        risk = 0.0
        for name, check in [*self._admission_checks.items()]:
            risk = max(risk, await self._await(name, check(node_name), 0.0))
        return risk

    @property
    def broken(self) -> dict[str, str]:
        """Controllers that were put aside, by class name, and why."""
        return self._broken

    def on_report(self, report: Message, now_s: float) -> None:
        """Hand a report to all."""
        for name, controller in [*self._controllers.items()]:
            self._call(name, lambda each=controller: each.on_report(report, now_s), None)  # type: ignore[misc]

    def on_transitions(self, status: Status, transitions: Sequence[Applied]) -> None:
        """Hand what has been decided to all."""
        for name, controller in [*self._controllers.items()]:
            self._call(name, lambda each=controller: each.on_transitions(status, transitions), None)  # type: ignore[misc]

    def due_s(self) -> float:
        """When the next one is due."""
        dues = [
            self._call(name, controller.due_s, math.inf) for name, controller in [*self._controllers.items()]
        ]
        return min(dues, default=math.inf)

    def events_due(self, now_s: float) -> list[Event]:
        """The events of all whose time has come."""
        events: list[Event] = []
        for name, controller in [*self._controllers.items()]:
            if self._call(name, controller.due_s, math.inf) <= now_s:
                events += self._call(name, lambda each=controller: each.events_due(now_s), ())  # type: ignore[misc]
        return events

    async def close(self) -> None:
        """Close them all, then what they share."""
        for name, controller in [*self._controllers.items()]:
            await self._await(name, controller.close(), None, breaks=False)
        self._controllers.clear()
        for name in [*self._aside]:
            self._end(name)
        await asyncio.gather(*self._ending.values(), return_exceptions=True)
        for give_back in self._on_close:
            try:
                await give_back()
            except Exception:
                logger.exception("what controllers shared could not be given back")

    def _call(self, name: str, method: Callable[[], _Result], otherwise: _Result) -> _Result:
        try:
            return method()
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
        """Nobody calls it any more; its tasks would go on acting on what it knew when it broke."""
        controller = self._controllers.pop(name, None)
        self._admission_checks.pop(name, None)
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
