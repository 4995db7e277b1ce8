"""Actions of an operator on a running job, by `aegisctl`: restart a worker, mark a node, evict a node.

Each is an event of `step` as a detector's or the guard's would be, so it is in the journal, counts alike and
is refused alike. What would change nothing is refused with the machine's own reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from aegis_elastic.control.controllers.contract import AdminHandler
from aegis_elastic.core.events import Act, Event, Evict, Mark, Unmark
from aegis_elastic.core.machine import step
from aegis_elastic.core.model import Status, Verdict, Worker

_BY = "asked by aegisctl"


class OperatorActions:
    """The admin handlers of one job. `feed` puts an event in line, `status` gives the newest status."""

    def __init__(self, feed: Callable[[Event], None], status: Callable[[], Status]) -> None:
        self._feed = feed
        self._status = status

    @property
    def admin_handlers(self) -> dict[str, AdminHandler]:
        """The operations, by name."""
        return {"restart": self._restart, "mark": self._mark, "unmark": self._unmark, "evict": self._evict}

    async def _restart(self, args: dict[str, Any]) -> dict[str, str]:
        status = self._status()
        worker = self._worker(args) if args.get("worker") else next(iter(status.workers), None)
        if worker is None:
            raise ValueError("no worker has ranks yet: there is nothing to restart")
        if status.recover_count >= status.spec.max_retry:
            raise ValueError(
                f"a restart counts like a failure, and all {status.spec.max_retry} retries are used up: "
                "the job would end"
            )
        return self._feed_if_it_changes(Act(worker.name, "manual", _reason(args)))

    async def _mark(self, args: dict[str, Any]) -> dict[str, str]:
        worker = self._worker(args)
        return self._feed_if_it_changes(Mark(worker.node_name, worker.name, _verdict(args), _reason(args)))

    async def _unmark(self, args: dict[str, Any]) -> dict[str, str]:
        return self._feed_if_it_changes(Unmark(self._worker(args).node_name, _verdict(args), _reason(args)))

    async def _evict(self, args: dict[str, Any]) -> dict[str, str]:
        """Marked slow if it isn't marked: so it leaves at a checkpoint, and only if it can be spared."""
        worker = self._worker(args)
        if not any(mark.node_name == worker.node_name for mark in self._status().marks):
            mark = Mark(worker.node_name, worker.name, Verdict.SLOW, _reason(args))
            marked = step(self._status(), mark, time.time())
            if marked.status is self._status():
                raise ValueError(marked.reason)
            self._feed(mark)
            self._feed(Evict(worker.node_name, _reason(args)))
            return {"said": f"{worker.node_name} leaves after the next checkpoint, if it can be spared"}
        return self._feed_if_it_changes(Evict(worker.node_name, _reason(args)))

    def _worker(self, args: dict[str, Any]) -> Worker:
        name = str(args.get("worker", ""))
        worker = self._status().worker(name)
        if worker is None:
            known = ", ".join(worker.name for worker in self._status().workers) or "nobody"
            raise ValueError(f"no worker called {name!r} has ranks; there are {known}")
        return worker

    def _feed_if_it_changes(self, event: Event) -> dict[str, str]:
        transition = step(self._status(), event, time.time())
        if transition.status is self._status():
            raise ValueError(transition.reason)
        self._feed(event)
        return {"said": transition.reason}


def _reason(args: dict[str, Any]) -> str:
    return str(args.get("reason") or _BY)


def _verdict(args: dict[str, Any]) -> Verdict:
    try:
        return Verdict(str(args.get("verdict", Verdict.SLOW.value)))
    except ValueError:
        known = ", ".join(verdict.value for verdict in Verdict)
        raise ValueError(f"{args.get('verdict')!r} is no verdict; there are {known}") from None
