"""The watcher "progress": the steps of this node's ranks, and their stacks when there are no steps.

Shared memory can't be polled by the kernel, so each slot and the state of each process are read once a
second: microseconds per rank. Only when there is no step for longer than this job's known pauses
(`core.detection.progress`) are stacks read, by the hang check in a process of its own, with a time budget:
py-spy never pauses a rank, but may itself block on one that hangs in the kernel. The conclusions are drawn by
the master (`control.controllers.progress`), which knows the ranks of all nodes.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from aegis_elastic.agents.checks.process import end_checks, start_checks
from aegis_elastic.agents.watch.contract import WatchedRanks
from aegis_elastic.agents.watch.rank_view import RankView
from aegis_elastic.agents.watch.shared_folder import SharedFolder
from aegis_elastic.agents.watch.slots import SlotReader
from aegis_elastic.checks.contract.request import CheckRequest
from aegis_elastic.core.detection import stacks
from aegis_elastic.core.detection.progress import FLOOR_S, Facts, Saving, packed, patience_s
from aegis_elastic.core.diagnosis.recovery import POSITION_CLUE
from aegis_elastic.core.model import CheckResult
from aegis_elastic.worker.environment import without_secrets
from aegis_elastic.worker.slot import VARIABLE

logger = logging.getLogger(__name__)

UPDATE_S = 1.0
# Between reports while all is well.
REPORT_S = 2.0
# Between readings of stacks: the first STACKS_OFTEN at STACKS_S, until it is clear which ranks don't move;
# later ones at STACKS_LATER_S.
STACKS_S, STACKS_LATER_S, STACKS_OFTEN = 0.5, 15.0, 8
STACKS_TIMEOUT_S = 15.0
# Snapshots per reading of ranks that don't wait in a collective: a loop of a few calls mostly shows in one.
SAMPLES = 7
# The process that reads them takes a second to start: it is started so long before the first reading.
PREPARE_AHEAD_S = 2.0
CLOSE_S = 2.0
# In a report: enough for any file system.
PATH_CHARS = 2048


class ProgressWatcher:
    """One thread, one folder with the ranks' slots. `floor_s`: shorter pauses than this are ignored."""

    name = "progress"

    def __init__(self, wake: Callable[[], None], floor_s: float = FLOOR_S, node: str = "") -> None:
        """OSError if no folder for slots can be made."""
        self._wake = wake
        self._floor_s = floor_s
        self._node = node
        self._folder = SharedFolder()
        self._lock = threading.Lock()
        self._signal = threading.Event()
        self._closing = False
        self._ranks: WatchedRanks | None = None
        self._ranks_changed = False
        self._facts: Facts | None = None
        self._ended_ranks: WatchedRanks | None = None
        self._running_check: subprocess.Popen[bytes] | None = None
        self._prepared_check: subprocess.Popen[bytes] | None = None  # the thread's own
        self._longest_s: dict[int, float] = {}
        # Step reported and steps counted when the ranks of the last two incarnations ended.
        self._reached_last: tuple[int, int] = (-1, -1)
        self._reached_before: tuple[int, int] = (-1, -1)
        self._thread = threading.Thread(target=self._run, name="aegis-progress", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called from the agent's loop

    def environment(self) -> Mapping[str, str]:
        """The folder of the ranks' slots."""
        with self._lock:
            if self._ranks is None:
                self._folder.empty()
        return {VARIABLE: str(self._folder.path)}

    def on_started(self, ranks: WatchedRanks) -> None:
        """Watch these from now on."""
        with self._lock:
            self._ranks, self._ranks_changed, self._facts, self._ended_ranks = ranks, True, None, None
        self._signal.set()

    def on_ended(self) -> None:
        """Watch none. Their slots stay as they are until the next start."""
        with self._lock:
            if self._ranks is not None:
                self._reached_before, self._reached_last = self._reached_last, self._reached(self._ranks)
            self._ended_ranks = self._ranks or self._ended_ranks
            self._ranks, self._facts = None, None
        self._signal.set()

    def facts(self) -> Mapping[str, Any] | None:
        """The facts of the last update; of ranks that have ended, the steps that they reached."""
        with self._lock:
            facts, ended_ranks = self._facts, self._ended_ranks
        if facts is None and ended_ranks is not None:
            reached, counted = self._reached(ended_ranks)
            facts = Facts(0, ended_ranks.incarnation, reached=reached, counted=counted)
        return msgspec.to_builtins(packed(facts)) if facts is not None else None

    def clues(self) -> tuple[str, ...]:
        """POSITION_CLUE if the place of the failure is unknown: steps that are only counted begin at 0 with
        each start, wherever training resumes, so only a failure at the very same count is at the same place.
        """
        reported, counted = self._reached_last
        _, before = self._reached_before
        with self._lock:
            first = self._ended_ranks is None or self._ended_ranks.incarnation <= 1
        known = reported >= 0 or counted <= 0 or first or counted == before
        return () if known else (POSITION_CLUE,)

    def _reached(self, ended_ranks: WatchedRanks) -> tuple[int, int]:
        reached, counted = -1, -1
        for rank in ended_ranks.pids:
            try:
                reader = SlotReader(self._folder.path / str(rank))
            except (OSError, ValueError):
                continue  # a rank without our hooks, or one that ended before it had a slot
            hooked, reported = reader.step(), reader.progress()
            counted = max(counted, hooked.step if hooked is not None else -1)
            reached = max(reached, reported.step if reported is not None else -1)
            reader.close()
        return reached, counted

    def close(self) -> None:
        """End the thread and its check process; remove the slots."""
        with self._lock:
            self._closing, self._ranks = True, None
            if self._running_check is not None:
                self._running_check.kill()
        self._signal.set()
        self._thread.join(CLOSE_S)
        self._folder.close()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        number = 0
        views: dict[int, RankView] = {}
        state = _IncarnationState()
        while True:
            with self._lock:
                closing, ranks = self._closing, self._ranks
                changed, self._ranks_changed = self._ranks_changed, False
            if (changed or ranks is None) and views:
                for view in views.values():
                    view.close()
                views = {}
                self._discard_check()
            if closing:
                self._discard_check()
                return
            if ranks is None:
                self._signal.wait()
            else:
                if changed:
                    folder = self._folder.path
                    views = {
                        rank: RankView(rank, pid, folder / str(rank)) for rank, pid in ranks.pids.items()
                    }
                    state = _IncarnationState()
                number += 1
                try:
                    self._update(number, ranks, views, state)
                except Exception:  # the thread's last resort; the next update is tried
                    if not state.failed:
                        logger.exception("cannot watch the ranks' progress")
                    state.failed = True
                self._signal.wait(
                    min(UPDATE_S, STACKS_S) if 0 < state.stack_readings < STACKS_OFTEN else UPDATE_S
                )
            self._signal.clear()

    def _update(
        self, number: int, ranks: WatchedRanks, views: dict[int, RankView], state: _IncarnationState
    ) -> None:
        now_s = time.monotonic()
        for view in views.values():
            view.update(now_s)
        known = [self._with_longest_pause(view.facts(now_s)) for view in views.values()]
        patience = patience_s([facts for facts in known if facts.beats], self._floor_s)
        idle_s = min((view.idle_s(now_s) for view in views.values() if not view.ended), default=0.0)
        suspected = idle_s >= patience and any(view.step_count for view in views.values())
        if suspected and now_s >= state.stacks_due_s:
            state.stack_readings += 1
            later = state.stack_readings >= STACKS_OFTEN
            self._read_stacks(ranks, views)
            if not later:
                self._prepare_check()
            now_s = time.monotonic()
            state.stacks_due_s = now_s + (STACKS_LATER_S if later else STACKS_S)
            known = [self._with_longest_pause(view.facts(now_s)) for view in views.values()]
            if state.stack_readings == 1:
                _log_no_progress(idle_s, patience, views)
        elif not suspected:
            if state.stack_readings:
                logger.warning("training moves again")
            state.stack_readings, state.stacks_due_s = 0, 0.0
            if idle_s >= patience - PREPARE_AHEAD_S and any(view.step_count for view in views.values()):
                self._prepare_check()
            else:
                self._discard_check()
        stopped = frozenset(view.rank for view in views.values() if view.stopped(now_s))
        urgent = suspected or stopped != state.stopped
        state.stopped = stopped
        facts = Facts(number, ranks.incarnation, tuple(known), _saving(views))
        work_windows = tuple(rank.own.serial for rank in known if rank.own is not None)
        urgent = urgent or facts.saved != state.saved or work_windows != state.work_windows
        state.saved, state.work_windows = facts.saved, work_windows
        with self._lock:
            if self._ranks is not ranks:
                return
            self._facts = facts
        if urgent or now_s >= state.report_due_s:
            state.report_due_s = now_s + REPORT_S
            self._wake()

    def _with_longest_pause(self, facts: Any) -> Any:
        """With the longest pause of earlier incarnations, too."""
        longest_s = max(facts.longest_s, self._longest_s.get(facts.rank, 0.0))
        self._longest_s[facts.rank] = longest_s
        return msgspec.structs.replace(facts, longest_s=longest_s)

    def _prepare_check(self) -> None:
        if self._prepared_check is None:
            try:
                self._prepared_check = start_checks(without_secrets(os.environ))
            except OSError as error:  # no more processes to be had: stacks stay unknown
                logger.warning("cannot start what reads the ranks' stacks: %s", error)

    def _discard_check(self) -> None:
        if self._prepared_check is not None:
            end_checks(self._prepared_check)
            self._prepared_check = None

    def _read_stacks(self, ranks: WatchedRanks, views: dict[int, RankView]) -> None:
        """Run the hang check, whose process ends with this thread at the latest."""
        pids = {rank: view.pid for rank, view in views.items() if not view.ended}
        request = CheckRequest(checks=("hang",), node=self._node, rank_pids=pids, samples=SAMPLES)
        self._prepare_check()
        process, self._prepared_check = self._prepared_check, None
        if process is None:
            return
        with self._lock:
            if self._ranks is not ranks:
                process.kill()  # before its request: there will be no results
            self._running_check = process
        try:
            output, _ = process.communicate(msgspec.json.encode(request), STACKS_TIMEOUT_S)
            results = [msgspec.json.decode(line, type=CheckResult) for line in output.splitlines()]
        except (subprocess.TimeoutExpired, msgspec.DecodeError, OSError) as error:
            logger.warning("cannot read the ranks' stacks: %s", error)
            results = []
        finally:
            with self._lock:
                self._running_check = None
            process.kill()
            process.communicate()
        details = results[0].details if results else {}
        for rank, view in views.items():
            packed_stack = details.get(f"rank{rank}_stack", "")
            stack = stacks.unpack(packed_stack) if isinstance(packed_stack, str) else ()
            view.on_stack(stack, moves=details.get(f"rank{rank}_moves") is True)


class _IncarnationState:
    """What the thread keeps of an incarnation beside its ranks: readings of stacks, what was reported."""

    def __init__(self) -> None:
        self.failed = False
        self.stack_readings = 0
        self.stacks_due_s = 0.0
        self.report_due_s = 0.0
        self.stopped: frozenset[int] = frozenset()
        self.saved: Saving | None = None
        self.work_windows: tuple[int, ...] = ()


def _saving(views: Mapping[int, RankView]) -> Saving | None:
    """The newest checkpoint that a rank's own code reported."""
    saved = [
        (last.wall_ns, view.rank, last) for view in views.values() if (last := view.checkpoint) is not None
    ]
    if not saved:
        return None
    _, rank, last = max(saved)
    return Saving(rank, last.total, max(last.step, 0), last.path[:PATH_CHARS], last.wall_ns / 1e9)


def _log_no_progress(idle_s: float, patience: float, views: Mapping[int, RankView]) -> None:
    known = {view.rank: view.stack for view in views.values() if view.stack}
    if known:
        clusters = stacks.compare(known).clusters
        places = ", ".join(
            f"{len(each.ranks)} at {stacks.own_frame(each.stack).describe()}" for each in clusters[:4]
        )
    else:
        places = "at unknown lines"
    logger.warning("no step for %.0f s (more than %.0f s): ranks of this node: %s", idle_s, patience, places)
