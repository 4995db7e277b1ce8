"""Checkpoint boundaries: agents see a checkpoint complete, `step` gets that once.

The controller also notes what only a watcher of checkpoints can know: that one which an eviction waits for
doesn't come, and that a training which ended with code 0 did so because it couldn't read its checkpoint.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from aegis_elastic.control.controllers.contract import Applied
from aegis_elastic.core.accounts.report import FALSE_SUCCESS
from aegis_elastic.core.checkpoints.save_intervals import LATE_FACTOR, SaveIntervals
from aegis_elastic.core.detection import progress
from aegis_elastic.core.events import Event, Noted, Saved
from aegis_elastic.core.model import Phase, Status, Verdict
from aegis_elastic.core.protocol.messages import COUNTER_MAX, TIME_MAX, Message, MessageType, ReportData

logger = logging.getLogger(__name__)

LATE = "checkpoint.late"
STEPS = "evict.steps"
UNREAD = "checkpoint.unread"
SAVER = "saver.ended"

_Number = Annotated[int, msgspec.Meta(ge=0, le=COUNTER_MAX)]
_Path = Annotated[str, msgspec.Meta(max_length=2048)]


class SeenCheckpoint(msgspec.Struct, frozen=True):
    """What an agent says of one: `number` counts those of one agent's life, `step` -1 if nothing tells it."""

    number: _Number
    step: Annotated[int, msgspec.Meta(ge=-1, le=COUNTER_MAX)]
    path: _Path
    kind: Annotated[str, msgspec.Meta(max_length=32)]
    time: Annotated[float, msgspec.Meta(ge=0.0, le=TIME_MAX)]


class BoundaryFacts(msgspec.Struct, frozen=True):
    """The facts of the watcher `boundary`. `unread`: a tracker whose content means nothing ("" if none)."""

    saved: Annotated[tuple[SeenCheckpoint, ...], msgspec.Meta(max_length=64)] = ()
    unread: _Path = ""


class SaverFacts(msgspec.Struct, frozen=True):
    """The facts of the watcher `saver`: how often it was started, its pid (0: it waits to start)."""

    starts: _Number
    pid: _Number
    last_end: Annotated[str, msgspec.Meta(max_length=1000)] = ""


_decoder = msgspec.json.Decoder(BoundaryFacts)
_saver_decoder = msgspec.json.Decoder(SaverFacts)


class CheckpointController:
    """One job's."""

    def __init__(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed
        self._status: Status | None = None
        self._resumed = False
        self._save_intervals = SaveIntervals()
        self._incarnation = -1
        self._steps: set[int] = set()
        # Agent's uid -> the number of the last checkpoint that it has reported.
        self._last_numbers: dict[str, int] = {}
        self._malformed: set[str] = set()
        self._unread = self._doubted = ""
        self._saver_ends: dict[str, int] = {}
        # Node -> since when its eviction waits for a checkpoint; and those whose waiting was noted.
        self._waiting: dict[str, float] = {}
        self._paged: set[str] = set()
        # The highest step of this incarnation's ranks, as they report it, or counted from where they began.
        self._reached = self._counted = -1
        self._base = 0
        # Where an eviction goes back to: step, and the node that left.
        self._back_to: tuple[int, str] | None = None

    def on_report(self, report: Message, now_s: float) -> None:
        """Take the checkpoints out of a report, each once, whoever reports it and how often."""
        data = report.data
        if not isinstance(data, ReportData):
            return
        if "progress" in data.watched:
            self._note_reached(data.watched["progress"])
        if "saver" in data.watched:
            self._note_saver(report, data.watched["saver"])
        if "boundary" not in data.watched:
            return
        try:
            facts = _decoder.decode(data.watched["boundary"])
        except msgspec.MsgspecError as error:
            if report.uid not in self._malformed:
                self._malformed.add(report.uid)
                logger.warning("cannot read what %s reports of its checkpoints: %s", report.worker, error)
            return
        # A master before us may have taken these already, which only a step can tell.
        first = self._resumed and report.uid not in self._last_numbers
        for checkpoint in sorted(facts.saved, key=lambda checkpoint: checkpoint.number):
            if checkpoint.number > self._last_numbers.get(report.uid, 0):
                self._last_numbers[report.uid] = checkpoint.number
                if checkpoint.step >= 0 or not first:
                    self._complete(checkpoint.step, checkpoint.path, checkpoint.kind, checkpoint.time, now_s)
        if facts.unread:
            self._doubt(report, facts.unread, data.state == "finished")

    def _note_reached(self, raw: msgspec.Raw) -> None:
        try:
            facts = progress.decode(raw)
        except msgspec.MsgspecError:
            return  # `ProgressController` logs that
        if facts.incarnation == self._incarnation:
            self._reached = max(self._reached, facts.reached)
            self._counted = max(self._counted, facts.counted)

    def _note_saver(self, report: Message, raw: msgspec.Raw) -> None:
        try:
            facts = _saver_decoder.decode(raw)
        except msgspec.MsgspecError:
            return  # nothing hangs on it
        if facts.last_end and self._saver_ends.get(report.uid) != facts.starts and not facts.pid:
            self._saver_ends[report.uid] = facts.starts
            worker = self._status.worker(report.worker) if self._status is not None else None
            text = f"the saver ended after start number {facts.starts}: {facts.last_end}; it is started again"
            node = worker.node_name if worker is not None else ""
            self._feed(Noted(report.worker, node, SAVER, text, time.time()))

    def _complete(self, step: int, path: str, kind: str, at: float, now_s: float) -> None:
        status = self._status
        if status is None or status.phase in (Phase.SUCCEED, Phase.FAILED):
            return
        if step < 0:
            # Its name has no step. It is newer than the last, and not older than what is known of training.
            step = max(status.highest_step, status.saved_step + 1, *self._steps, 0)
        if step in self._steps:
            return  # another agent has reported it, or the training itself
        self._steps.add(step)
        self._save_intervals.saved(now_s)
        self._feed(Saved(step, path, kind, at))

    def _doubt(self, report: Message, tracker: str, finished: bool) -> None:
        """Note it when it is seen, and again as a doubt when the ranks have ended with code 0 anyway."""
        status = self._status
        worker = status.worker(report.worker) if status is not None else None
        if status is None or worker is None or worker.finished or status.phase is not Phase.RUN_COMMAND:
            return
        if not finished and self._unread != tracker:
            self._unread = tracker
            text = f"{tracker} says nothing that could be read: Megatron will exit with code 0 if it loads it"
            self._feed(Noted(worker.name, worker.node_name, UNREAD, text, time.time()))
        elif finished and report.type is MessageType.FINISH and self._doubted != report.uid:
            self._doubted = report.uid
            text = (
                f"its ranks ended with code 0, but {tracker} says nothing that could be read: Megatron exits "
                "with 0 when it can't load, so this may be no success"
            )
            self._feed(Noted(worker.name, worker.node_name, FALSE_SUCCESS, text, time.time()))

    def on_transitions(self, status: Status, transitions: Sequence[Applied]) -> None:
        """Keep which nodes wait for a checkpoint, and begin anew with every incarnation."""
        if self._status is None:
            self._resumed = status.incarnation > 0
        for event, transition in transitions:
            if isinstance(event, Saved) and transition.name == "saved":
                self._paged.clear()
                if event.step not in self._steps:  # the training reported it, to another controller
                    self._steps.add(event.step)
                    self._save_intervals.saved(time.monotonic())
            if (
                transition.name == "evict"
                and transition.status.phase is Phase.RESTARTING
                and transition.status.saved_step >= 0
            ):
                self._back_to = transition.status.saved_step, transition.status.error_nodes[-1].node_name
        if status.incarnation != self._incarnation:
            self._note_steps()
            self._incarnation = status.incarnation
            self._reached = self._counted = -1
            self._base = max(status.saved_step, 0)
            self._steps = set()
            self._unread = self._doubted = ""
            self._save_intervals.started()
        self._status = status
        now_s = time.monotonic()
        running = status.phase is Phase.RUN_COMMAND
        # A mark that is safe may wait, too: the guard wants a checkpoint that comes after its own waiting.
        waiting = {mark.node_name for mark in status.marks if mark.verdict is Verdict.SLOW}
        self._waiting = {node: self._waiting.get(node, now_s) for node in waiting if running}
        self._paged &= waiting

    def _note_steps(self) -> None:
        """What an eviction has cost: the steps that were run after the checkpoint, and are run again."""
        if self._back_to is None:
            return
        (step, node), self._back_to = self._back_to, None
        counted = self._base + self._counted if self._counted >= 0 else -1
        reached = self._reached if self._reached >= 0 else counted
        lost = f"{reached - step} steps" if reached >= step else "an unknown number of steps"
        text = f"{lost} after the checkpoint of step {step} had been run at the stop, and are run again"
        self._feed(Noted("", node, STEPS, text, time.time()))

    def due_s(self) -> float:
        """When a checkpoint that somebody waits for is late."""
        late = [self._save_intervals.late_s(since_s) for node, since_s in self._unpaged()]
        return min(late, default=math.inf)

    def events_due(self, now_s: float) -> Sequence[Event]:
        """Note which nodes have waited in vain; a human decides."""
        events: list[Event] = []
        for node, since_s in self._unpaged():
            if self._save_intervals.late_s(since_s) <= now_s:
                self._paged.add(node)
                text = (
                    f"{node} is marked slow and waits to be evicted at a checkpoint, but none has completed "
                    f"for {LATE_FACTOR:g} times the usual {self._save_intervals.usual_s:.0f} s: it stays "
                    "until somebody acts"
                )
                events.append(Noted("", node, LATE, text, time.time()))
        return events

    def _unpaged(self) -> list[tuple[str, float]]:
        return [(node, since_s) for node, since_s in self._waiting.items() if node not in self._paged]

    async def close(self) -> None:
        """It holds nothing."""
