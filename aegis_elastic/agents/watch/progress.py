"""The watcher "progress": how far the ranks of this node are, and where they stand when nothing moves.

Memory cannot be waited for, so once a second each slot is read, and the state of each process: microseconds
for a rank. Only when there is no step for longer than this job's pauses are known to be
(`core.detection.progress`) are stacks read, by the hang check in a process of its own, with a time budget:
py-spy never pauses a rank, but it may itself be held by one that hangs in the kernel. What it all means is
for the master (`control.controllers.progress`), which knows the ranks of all nodes.
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
from aegis_elastic.agents.watch.contract import Watched
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

LOOK_S = 1.0
# How often the master hears of it while all is well.
TELL_S = 2.0
# Looks at stacks: close together until it is clear who stands still, then rarely.
STACKS_S, STACKS_LATER_S, STACKS_CLOSE = 0.5, 15.0, 8
STACKS_TIMEOUT_S = 15.0
# Snapshots a look of those who don't wait in a collective: a loop of a few calls is seen in one of them
# mostly.
SAMPLES = 7
# The process that reads them takes a second to start: it stands ready when the first look is near.
AHEAD_S = 2.0
CLOSE_S = 2.0
# In a report: enough for any file system, and bounded.
PATH_CHARS = 2048


class ProgressWatcher:
    """One thread, one folder with the ranks' slots. `floor_s`: shorter pauses than this mean nothing."""

    name = "progress"

    def __init__(self, wake: Callable[[], None], floor_s: float = FLOOR_S, node: str = "") -> None:
        """OSError if there is no place for slots."""
        self._wake = wake
        self._floor_s = floor_s
        self._node = node
        self._folder = SharedFolder()
        self._lock = threading.Lock()
        self._signal = threading.Event()
        self._closing = False
        self._ranks: Watched | None = None
        self._new = False
        self._facts: Facts | None = None
        self._over: Watched | None = None
        self._reading: subprocess.Popen[bytes] | None = None
        self._ready: subprocess.Popen[bytes] | None = None  # the thread's own
        self._longest_s: dict[int, float] = {}
        # Steps said and steps counted when the ranks of the last two incarnations ended.
        self._reached_last: tuple[int, int] = (-1, -1)
        self._reached_before: tuple[int, int] = (-1, -1)
        self._thread = threading.Thread(target=self._live, name="aegis-pace", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called from the agent's loop

    def environment(self) -> Mapping[str, str]:
        """Where the ranks find their slots."""
        with self._lock:
            if self._ranks is None:
                self._folder.empty()
        return {VARIABLE: str(self._folder.path)}

    def started(self, ranks: Watched) -> None:
        """Look at these from now on."""
        with self._lock:
            self._ranks, self._new, self._facts, self._over = ranks, True, None, None
        self._signal.set()

    def ended(self) -> None:
        """Look at nobody. What they left in their slots stays there until the next start."""
        with self._lock:
            if self._ranks is not None:
                self._reached_before, self._reached_last = self._reached_last, self._reached(self._ranks)
            self._over = self._ranks or self._over
            self._ranks, self._facts = None, None
        self._signal.set()

    def news(self) -> Mapping[str, Any] | None:
        """The facts of the last look; of ranks that have ended, how far they came."""
        with self._lock:
            facts, over = self._facts, self._over
        if facts is None and over is not None:
            reached, counted = self._reached(over)
            facts = Facts(0, over.incarnation, reached=reached, counted=counted)
        return msgspec.to_builtins(packed(facts)) if facts is not None else None

    def clues(self) -> tuple[str, ...]:
        """Steps that are merely counted begin anew with each start, wherever training resumes: then only a
        failure at the very same count is known to be at the same place.
        """
        said, counted = self._reached_last
        _, before = self._reached_before
        with self._lock:
            first = self._over is None or self._over.incarnation <= 1
        known = said >= 0 or counted <= 0 or first or counted == before
        return () if known else (POSITION_CLUE,)

    def _reached(self, over: Watched) -> tuple[int, int]:
        reached, counted = -1, -1
        for rank in over.pids:
            try:
                reader = SlotReader(self._folder.path / str(rank))
            except (OSError, ValueError):
                continue  # a rank without our hooks, or one that didn't come so far
            beat, call = reader.beat(), reader.call()
            counted = max(counted, beat.step if beat is not None else -1)
            reached = max(reached, call.step if call is not None else -1)
            reader.close()
        return reached, counted

    def close(self) -> None:
        """End the thread, and what it reads with; remove the slots."""
        with self._lock:
            self._closing, self._ranks = True, None
            if self._reading is not None:
                self._reading.kill()
        self._signal.set()
        self._thread.join(CLOSE_S)
        self._folder.close()

    # ------------------------------------------------------------ the thread

    def _live(self) -> None:
        look = 0
        views: dict[int, RankView] = {}
        node = _Node()
        while True:
            with self._lock:
                closing, ranks, new, self._new = self._closing, self._ranks, self._new, False
            if (new or ranks is None) and views:
                for view in views.values():
                    view.close()
                views = {}
                self._send_away()
            if closing:
                self._send_away()
                return
            if ranks is None:
                self._signal.wait()
            else:
                if new:
                    folder = self._folder.path
                    views = {
                        rank: RankView(rank, pid, folder / str(rank)) for rank, pid in ranks.pids.items()
                    }
                    node = _Node()
                look += 1
                try:
                    self._look(look, ranks, views, node)
                except Exception:  # the thread's last resort; the ranks are looked at again
                    if not node.broke:
                        logger.exception("cannot look at the ranks' progress")
                    node.broke = True
                self._signal.wait(min(LOOK_S, STACKS_S) if 0 < node.looks < STACKS_CLOSE else LOOK_S)
            self._signal.clear()

    def _look(self, look: int, ranks: Watched, views: dict[int, RankView], node: _Node) -> None:
        now_s = time.monotonic()
        for view in views.values():
            view.look(now_s)
        known = [self._remembered(view.facts(now_s)) for view in views.values()]
        patience = patience_s([facts for facts in known if facts.beats], self._floor_s)
        idle_s = min((view.idle_s(now_s) for view in views.values() if not view.ended), default=0.0)
        suspected = idle_s >= patience and any(view.beats for view in views.values())
        if suspected and now_s >= node.stacks_s:
            node.looks += 1
            later = node.looks >= STACKS_CLOSE
            self._read_stacks(ranks, views)
            if not later:
                self._make_ready()
            now_s = time.monotonic()
            node.stacks_s = now_s + (STACKS_LATER_S if later else STACKS_S)
            known = [self._remembered(view.facts(now_s)) for view in views.values()]
            if node.looks == 1:
                _say(idle_s, patience, views)
        elif not suspected:
            if node.looks:
                logger.warning("training moves again")
            node.looks, node.stacks_s = 0, 0.0
            if idle_s >= patience - AHEAD_S and any(view.beats for view in views.values()):
                self._make_ready()
            else:
                self._send_away()
        held = frozenset(view.rank for view in views.values() if view.stopped(now_s))
        urgent = suspected or held != node.held
        node.held = held
        facts = Facts(look, ranks.incarnation, tuple(known), _saving(views))
        windows = tuple(rank.own.serial for rank in known if rank.own is not None)
        urgent = urgent or facts.saved != node.saved or windows != node.windows
        node.saved, node.windows = facts.saved, windows
        with self._lock:
            if self._ranks is not ranks:
                return
            self._facts = facts
        if urgent or now_s >= node.tell_s:
            node.tell_s = now_s + TELL_S
            self._wake()

    def _remembered(self, facts: Any) -> Any:
        """With the pauses of earlier incarnations: a restart forgets nothing of how this job goes."""
        longest_s = max(facts.longest_s, self._longest_s.get(facts.rank, 0.0))
        self._longest_s[facts.rank] = longest_s
        return msgspec.structs.replace(facts, longest_s=longest_s)

    def _make_ready(self) -> None:
        if self._ready is None:
            try:
                self._ready = start_checks(without_secrets(os.environ))
            except OSError as error:  # no room for one more process: then stacks stay unknown
                logger.warning("cannot start what reads the ranks' stacks: %s", error)

    def _send_away(self) -> None:
        if self._ready is not None:
            end_checks(self._ready)
            self._ready = None

    def _read_stacks(self, ranks: Watched, views: dict[int, RankView]) -> None:
        """Ask the hang check, which ends with this thread at the latest."""
        pids = {rank: view.pid for rank, view in views.items() if not view.ended}
        request = CheckRequest(checks=("hang",), node=self._node, rank_pids=pids, samples=SAMPLES)
        self._make_ready()
        process, self._ready = self._ready, None
        if process is None:
            return
        with self._lock:
            if self._ranks is not ranks:
                process.kill()  # before it was asked anything: there will be no results
            self._reading = process
        try:
            output, _ = process.communicate(msgspec.json.encode(request), STACKS_TIMEOUT_S)
            results = [msgspec.json.decode(line, type=CheckResult) for line in output.splitlines()]
        except (subprocess.TimeoutExpired, msgspec.DecodeError, OSError) as error:
            logger.warning("cannot read the ranks' stacks: %s", error)
            results = []
        finally:
            with self._lock:
                self._reading = None
            process.kill()
            process.communicate()
        details = results[0].details if results else {}
        for rank, view in views.items():
            told = details.get(f"rank{rank}_stack", "")
            stack = stacks.unpack(told) if isinstance(told, str) else ()
            view.stands(stack, moves=details.get(f"rank{rank}_moves") is True)


class _Node:
    """What the thread remembers of an incarnation beside its ranks: when it looked at stacks, what it
    told.
    """

    def __init__(self) -> None:
        self.broke = False
        self.looks = 0
        self.stacks_s = 0.0
        self.tell_s = 0.0
        self.held: frozenset[int] = frozenset()
        self.saved: Saving | None = None
        self.windows: tuple[int, ...] = ()


def _saving(views: Mapping[int, RankView]) -> Saving | None:
    """The newest checkpoint that a rank's own code told of."""
    said = [(save.wall_ns, view.rank, save) for view in views.values() if (save := view.save) is not None]
    if not said:
        return None
    _, rank, save = max(said)
    return Saving(rank, save.calls, max(save.step, 0), save.path[:PATH_CHARS], save.wall_ns / 1e9)


def _say(idle_s: float, patience: float, views: Mapping[int, RankView]) -> None:
    where = {view.rank: view.stack for view in views.values() if view.stack}
    if where:
        clusters = stacks.compare(where).clusters
        standing = ", ".join(
            f"{len(each.ranks)} at {stacks.own_frame(each.stack).describe()}" for each in clusters[:4]
        )
    else:
        standing = "at unknown lines"
    logger.warning(
        "no step for %.0f s (more than %.0f s): ranks of this node: %s", idle_s, patience, standing
    )
