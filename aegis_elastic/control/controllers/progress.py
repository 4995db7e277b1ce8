"""Progress of training: who hangs, who is slow, which step it has reached.

The controller takes what every agent reports of its ranks (`agents.watch.progress`) and puts verdicts in line
as marks. A mark kills nothing; whether something is done about it is for the guard. What it remembers is
memory only: a master that comes back gets everything again with the next reports, and takes over the marks
that stand in the record.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from aegis_elastic.control.controllers.contract import Applied
from aegis_elastic.core.detection import progress, straggler
from aegis_elastic.core.detection.hang import NO_STEPS_S, Hang, ObservedRank, judge
from aegis_elastic.core.detection.progress import Facts, RankFacts
from aegis_elastic.core.detection.straggler import Slow, WindowHistory
from aegis_elastic.core.events import Event, Mark, Noted, Progress, Saved, Started, Unmark
from aegis_elastic.core.model import Phase, Status, Verdict, Worker
from aegis_elastic.core.protocol.messages import Message, MessageType, ReportData

logger = logging.getLogger(__name__)

NAME = "progress"
JUDGE_EVERY_S = 1.0
# Older facts mean nothing. Reading stacks may take an agent this long.
FRESH_S = 20.0
# How often the step is recorded without another reason to.
RECORD_S = 60.0
# A report may be on its way while the one before it was the last.
REPORT_LAG_S = 2.0
# Others that are so many steps further show that a rank ended before its time.
EARLY_STEPS = 2
_HANGS = (Verdict.FROZEN, Verdict.DESYNC, Verdict.STALLED)


class _LatestFacts:
    """The last facts of one agent."""

    def __init__(self, facts: Facts, received_s: float) -> None:
        self.facts = facts
        self.received_s = received_s


class ProgressController:
    """One job's. `floor_s`: pauses shorter than this mean nothing. `silent_s`: when an agent counts as
    silent. `on_moved` is called (monotonic seconds) whenever the step counter has moved.
    """

    def __init__(
        self,
        feed: Callable[[Event], None],
        *,
        floor_s: float = progress.FLOOR_S,
        no_steps_s: float = NO_STEPS_S,
        silent_s: float = 30.0,
        on_moved: Callable[[float], None] = lambda now_s: None,
    ) -> None:
        self._feed = feed
        self._floor_s = floor_s
        self._no_steps_s = no_steps_s
        self._silent_s = silent_s
        self._on_moved = on_moved
        self._status: Status | None = None
        self._latest: dict[str, _LatestFacts] = {}
        self._reported_s: dict[str, float] = {}
        self._malformed: set[str] = set()
        self._moved_s = -math.inf
        self._began_s = math.inf
        self._step = -1
        self._recorded_s = -math.inf
        self._saves: dict[str, int] = {}
        self._next_s = -math.inf
        # what stands in the record because of us
        self._hang: tuple[str, Verdict] | None = None
        self._unreachable: set[str] = set()
        self._watch = WindowHistory()
        self._slow_marks: set[str] = set()
        self._judged: dict[int, int] = {}
        self._noted: set[tuple[int, str]] = set()

    # ------------------------------------------------------------ as a `Controller`

    def on_report(self, report: Message, now_s: float) -> None:
        """Keep what an agent reports of its ranks."""
        data, status, worker = report.data, self._status, report.worker
        if not isinstance(data, ReportData) or status is None:
            return
        self._reported_s[worker] = now_s
        raw = data.watched.get(NAME)
        if raw is not None and report.incarnation == status.incarnation:
            try:
                self._take_facts(worker, progress.decode(raw), now_s)
            except msgspec.MsgspecError as error:
                if worker not in self._malformed:
                    self._malformed.add(worker)
                    logger.warning("ignored what %s reports of its ranks' progress: %s", worker, error)
        if report.type is MessageType.ERROR and self._step > status.highest_step:
            # whether training has come further than at the last failure decides what is done about this one
            self._feed(Progress(self._step))

    def _take_facts(self, worker: str, facts: Facts, now_s: float) -> None:
        status = self._status
        before = self._latest.get(worker)
        if status is None or facts.incarnation != status.incarnation:
            return
        if not facts.ranks:
            # They have ended. Their last step may not have been reported: an error can be quicker than the
            # first sample.
            self._step = max(self._step, facts.reached if facts.reached >= 0 else facts.counted)
            return
        if before is not None and before.facts.look == facts.look:
            return
        self._latest[worker] = _LatestFacts(facts, now_s)
        if sum(rank.beats for rank in facts.ranks) > sum(
            rank.beats for rank in (before.facts.ranks if before is not None else ())
        ):
            self._moved_s = now_s
            self._on_moved(now_s)
        self._step = max((self._step, *(rank.step for rank in facts.ranks)))
        saved = facts.saved
        if saved is not None and self._saves.get(worker) != saved.calls:
            self._saves[worker] = saved.calls
            self._feed(Saved(saved.step, saved.path, "called", saved.time))

    def on_transitions(self, status: Status, transitions: Sequence[Applied]) -> None:
        """A new incarnation begins with nothing known; marks of hangs end with the old one."""
        before, self._status = self._status, status
        now_s = time.monotonic()
        if before is None:
            for mark in status.marks:
                if mark.verdict in _HANGS:
                    self._hang = mark.node_name, mark.verdict
                elif mark.verdict is Verdict.UNREACHABLE:
                    self._unreachable.add(mark.node_name)
                else:
                    self._slow_marks.add(mark.node_name)
            self._watch = WindowHistory(marked=frozenset(self._slow_marks))
        if before is None or before.incarnation != status.incarnation:
            self._latest.clear()
            self._judged.clear()
            self._saves.clear()
            self._watch = WindowHistory(marked=self._watch.marked)
            self._step = -1
            self._began_s = min(self._began_s, now_s)
            for worker in status.workers:
                self._reported_s[worker.name] = now_s
        if status.phase is not Phase.RUN_COMMAND and self._hang is not None:
            self._feed(Unmark(*self._hang, "its training was stopped"))
            self._hang = None
        self._next_s = min(self._next_s, now_s + JUDGE_EVERY_S)

    def due_s(self) -> float:
        """Once a second while training runs."""
        running = self._status is not None and self._status.phase is Phase.RUN_COMMAND
        return self._next_s if running else math.inf

    def events_due(self, now_s: float) -> Sequence[Event]:
        """Judge the latest facts of all."""
        self._next_s = now_s + JUDGE_EVERY_S
        status = self._status
        if status is None or status.phase is not Phase.RUN_COMMAND:
            return ()
        events = [*self._judge_silence(status, now_s), *self._ended_early(status), *self._first_step(status)]
        if self._step > status.highest_step and now_s >= self._recorded_s + RECORD_S:
            self._recorded_s = now_s
            events.append(Progress(self._step))
        latest = [
            (worker, self._latest[worker.name]) for worker in status.workers if worker.name in self._latest
        ]
        fresh = all(worker.finished or now_s - each.received_s <= FRESH_S for worker, each in latest)
        if len(latest) == len(status.workers) and fresh:
            ranks = [
                ObservedRank(rank, worker.name, worker.node_name)
                for worker, each in latest
                for rank in _ranks(worker, each)
            ]
            events += self._judge_hang(ranks)
            events += self._judge_speed(ranks, now_s)
        return events

    async def close(self) -> None:
        """Nothing is under way."""

    # ------------------------------------------------------------ verdicts

    def _judge_hang(self, ranks: list[ObservedRank]) -> Iterator[Event]:
        judgement = judge(ranks, self._floor_s, self._no_steps_s)
        hang, marked = judgement.hang, self._hang
        if hang is not None and marked is not None and not hang.sure:
            return
        if marked is not None and (judgement.moves or (hang is not None and _key(hang) != marked)):
            self._hang = None
            yield Unmark(*marked, "training moves" if judgement.moves else "it shows as something else now")
        if hang is not None and _key(hang) != self._hang:
            self._hang = _key(hang)
            yield Mark(hang.observed.node_name, hang.observed.worker, hang.verdict, hang.reason)

    def _judge_silence(self, status: Status, now_s: float) -> Iterator[Event]:
        """Silent while steps advance, which they couldn't without its ranks: unreachable."""
        for worker in status.workers:
            received_s = self._reported_s.setdefault(worker.name, now_s)
            silent_s = now_s - received_s
            marked = worker.node_name in self._unreachable
            if not marked and silent_s >= self._silent_s and self._moved_s > received_s + REPORT_LAG_S:
                self._unreachable.add(worker.node_name)
                reason = f"nothing heard of {worker.name} for {silent_s:.0f} s, while training moves on"
                yield Mark(worker.node_name, worker.name, Verdict.UNREACHABLE, reason)
            elif marked and silent_s < REPORT_LAG_S:
                self._unreachable.discard(worker.node_name)
                yield Unmark(worker.node_name, Verdict.UNREACHABLE, f"{worker.name} can be heard again")

    def _judge_speed(self, ranks: list[ObservedRank], now_s: float) -> Iterator[Event]:
        own = progress.own_of(seen.facts for seen in ranks)
        if len(own) < len(ranks) or any(self._judged.get(rank) == each.serial for rank, each in own.items()):
            return  # a window counts once, and for all of them
        self._judged = {rank: each.serial for rank, each in own.items()}
        node_of = {seen.facts.rank: seen for seen in ranks}
        slow = straggler.slow_ranks(own, {rank: seen.node_name for rank, seen in node_of.items()})
        worst: dict[str, Slow] = {}
        for rank, found in sorted(slow.items(), key=lambda item: item[1].share):
            worst[node_of[rank].node_name] = found
        nodes = frozenset(seen.node_name for seen in ranks)
        certainty = {node: found.certainty for node, found in worst.items()}
        self._watch = straggler.update(self._watch, certainty, nodes)
        for node in sorted(self._watch.marked & worst.keys() - self._slow_marks):
            yield from self._mark_slow(node_of[worst[node].rank], worst[node], now_s)
        for node in sorted(self._slow_marks & nodes - self._watch.marked):
            self._slow_marks.discard(node)
            yield Unmark(node, Verdict.SLOW, "it keeps up with its peers again")

    def _mark_slow(self, seen: ObservedRank, slow: Slow, now_s: float) -> Iterator[Event]:
        windows = self._watch.bad[seen.node_name]
        text = f"{slow.describe()}; {windows} windows in a row"
        if straggler.pays(slow.share, now_s - self._began_s):
            self._slow_marks.add(seen.node_name)
            yield Mark(seen.node_name, seen.worker, Verdict.SLOW, text)
        elif self._first_time(seen.facts.rank, "slow"):
            yield Noted(seen.worker, seen.node_name, "rank.slow", f"{text}; not worth a restart", time.time())

    def _ended_early(self, status: Status) -> Iterator[Event]:
        """A rank that ends well while others go on: training goes on without it, or stands still."""
        ranks = [
            (worker, rank)
            for worker in status.workers
            if worker.name in self._latest
            for rank in _ranks(worker, self._latest[worker.name])
        ]
        furthest = max((rank.step for _, rank in ranks), default=-1)
        for worker, rank in ranks:
            early = rank.ended and rank.beats and furthest >= rank.step + EARLY_STEPS
            if early and self._first_time(rank.rank, "ended"):
                yield _ended_early(worker, rank, furthest)

    def _first_step(self, status: Status) -> Iterator[Event]:
        """When all ranks have made their first step, a recovery is over."""
        latest = [
            rank
            for worker in status.workers
            if worker.name in self._latest
            for rank in self._latest[worker.name].facts.ranks
        ]
        if len(latest) < sum(worker.nproc for worker in status.workers) or not all(
            rank.beats for rank in latest
        ):
            return
        last = max(latest, key=lambda rank: rank.first_s)
        if self._first_time(-1, "first step"):
            worker = next(
                worker for worker in status.workers if last in self._latest[worker.name].facts.ranks
            )
            yield Started(worker.name, worker.uid, status.incarnation, {"first_step_s": last.first_s})

    def _first_time(self, rank: int, what: str) -> bool:
        assert self._status is not None
        key = self._status.incarnation, f"{rank} {what}"
        fresh = key not in self._noted
        self._noted.add(key)
        return fresh


def _key(hang: Hang) -> tuple[str, Verdict]:
    return hang.observed.node_name, hang.verdict


def _ranks(worker: Worker, latest: _LatestFacts) -> tuple[RankFacts, ...]:
    """Its ranks. An agent whose ranks are done reports nothing more of them."""
    if not worker.finished:
        return latest.facts.ranks
    return tuple(msgspec.structs.replace(rank, ended=True) for rank in latest.facts.ranks)


def _ended_early(worker: Worker, rank: RankFacts, furthest: int) -> Noted:
    detail = f"rank {rank.rank} ended without an error after step {rank.step}; others are at step {furthest}"
    return Noted(worker.name, worker.node_name, "rank.ended_early", detail, time.time())
