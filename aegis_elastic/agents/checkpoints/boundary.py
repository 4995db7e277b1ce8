"""The checkpoint boundary, seen without a change to the training: a watcher of the folders that it saves to.

The kernel tells of writes that this node makes, and the markers are written by rank 0; a network file system
tells of nothing that others write, so everything is looked at again from time to time, too. Only the node of
rank 0 looks: one agent's word is enough, and a thousand that list a shared folder are a load of their own.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aegis_elastic.agents.checkpoints.inotify import Inotify
from aegis_elastic.agents.checkpoints.lister import Lister
from aegis_elastic.agents.watch.contract import WatchedRanks
from aegis_elastic.core.checkpoints import (
    AUTO,
    Checkpoint,
    Listing,
    SeenCheckpoints,
    complete,
    megatron_trackers,
)
from aegis_elastic.core.checkpoints.arguments import WatchedFolder

logger = logging.getLogger(__name__)

RELIST_S = 10.0
# A save makes many events; looking costs a walk, and takes at most a fifth of our time.
REST_S = 0.02
REST_FACTOR = 4.0
WATCHES_MAX = 512
KEPT = 8  # checkpoints in a report: what was completed while a few reports were lost
CLOSE_S = 5.0
PATH_CHARS = 512
UNREAD_S = 1.0  # a tracker is empty for a moment whenever it is written


class _Folder:
    """One place: what is seen there, and what of it is known."""

    def __init__(self, place: WatchedFolder) -> None:
        self.place = place
        self.lister = Lister(place.path)
        self.memory = SeenCheckpoints()
        self.said_too_many = False

    def unread(self, listing: Listing) -> list[str]:
        """Megatron's tracker files that mean nothing to it."""
        if self.place.kind not in (AUTO, "megatron"):
            return []
        empty = [tracker.path for tracker in megatron_trackers(listing) if not tracker.folder]
        return [os.path.join(self.lister.top, path) for path in empty]


class CheckpointWatcher:
    """Tells of every checkpoint that completes while the ranks of this node run, if rank 0 is here."""

    name = "boundary"

    def __init__(
        self, wake: Callable[[], None], places: Sequence[WatchedFolder], *, relist_s: float = RELIST_S
    ) -> None:
        self._wake = wake
        self._folders = [_Folder(place) for place in places]
        self._relist_s = relist_s
        self._lock = threading.Lock()
        self._saved: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._count = 0
        self._unread = ""
        self._commands: deque[WatchedRanks | None] = deque()
        self._world_size = 0
        self._incarnation = 0
        # Folders that the kernel won't tell of: asked once, so that looking comes to rest.
        self._silent: set[str] = set()
        # Trackers that mean nothing, and since when.
        self._bad: dict[str, float] = {}
        self._closing = self._broke = False
        self._read_fd, self._wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread: threading.Thread | None = None

    @property
    def incarnation(self) -> int:
        """Whose checkpoints are looked for by now; 0: nobody's."""
        return self._incarnation

    # ------------------------------------------------------------ from the agent's loop

    def environment(self) -> Mapping[str, str]:
        """Nothing: the ranks know nothing of us."""
        return {}

    def on_started(self, ranks: WatchedRanks) -> None:
        """Look at what is there now; what completes from here on is news, if rank 0 is ours."""
        if not self._folders:
            return
        if self._thread is None:
            if ranks.assignment.group_rank != 0:
                return
            self._thread = threading.Thread(target=self._run, name="aegis-boundary", daemon=True)
            self._thread.start()
        self._tell(ranks)

    def on_ended(self) -> None:
        """A last look: what is complete by now was completed by these ranks."""
        if self._thread is not None:
            self._tell(None)

    def facts(self) -> Mapping[str, Any] | None:
        """The last checkpoints, numbered; `unread`: a tracker that makes the training end for nothing."""
        with self._lock:
            if not self._saved and not self._unread:
                return None
            return {"saved": list(self._saved), "unread": _printable(self._unread)}

    def close(self) -> None:
        """End the thread. It may hang on a dead network file system: then it is left behind, as a daemon."""
        self._closing = True
        os.write(self._wake_fd, b"\0")
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                logger.warning("the folders of checkpoints don't answer: their watcher is left behind")
                return
        os.close(self._read_fd)
        os.close(self._wake_fd)

    def _tell(self, command: WatchedRanks | None) -> None:
        self._commands.append(command)
        os.write(self._wake_fd, b"\0")

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            inotify: Inotify | None = Inotify()
        except OSError as error:
            logger.warning("checkpoints are looked for every %g s only: %s", self._relist_s, error)
            inotify = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._read_fd, selectors.EVENT_READ)
            if inotify is not None:
                selector.register(inotify, selectors.EVENT_READ)
            try:
                self._watch(selector, inotify)
            finally:
                if inotify is not None:
                    inotify.close()

    def _watch(self, selector: selectors.BaseSelector, inotify: Inotify | None) -> None:
        due_s, rested_s = time.monotonic(), 0.0
        wanted = True
        while not self._closing:
            now_s = time.monotonic()
            at_s = max(now_s, rested_s) if wanted else max(due_s, rested_s)
            ready = selector.select(max(at_s - now_s, 0.0))
            for key, _ in ready:
                if inotify is not None and key.fileobj is inotify:
                    changed = inotify.read()
                    wanted = wanted or bool(changed)
                    for folder in self._folders:
                        for path in changed:
                            folder.lister.changed(path)
                else:
                    os.read(self._read_fd, 4096)
            if self._obey():
                wanted, rested_s = True, 0.0
            now_s = time.monotonic()
            if self._closing or now_s < rested_s or not (wanted or now_s >= due_s):
                continue
            if now_s >= due_s:
                self._silent.clear()
            try:
                wanted = self._look(inotify)
            except Exception:  # somebody's file is stranger than we thought: the next look may go
                if not self._broke:
                    logger.exception("cannot look for checkpoints; trying again")
                wanted, self._broke = False, True
            took_s = time.monotonic() - now_s
            rested_s = time.monotonic() + max(REST_S, REST_FACTOR * took_s)
            due_s = time.monotonic() + (UNREAD_S if self._bad and not self._unread else self._relist_s)

    def _obey(self) -> bool:
        """Carry out what the loop has told; says whether there was anything."""
        obeyed = False
        while self._commands:
            ranks = self._commands.popleft()
            obeyed = True
            # What the ranks before have completed is told first; then whatever is there is old.
            if self._incarnation:
                self._look(None)
            self._incarnation = 0
            if ranks is not None and ranks.assignment.group_rank == 0:
                self._world_size = ranks.world_size
                for folder in self._folders:
                    folder.memory.rebase(folder.lister.begin())
                # Nobody is writing yet: a tracker that means nothing now will mean nothing when it is read.
                self._bad = dict.fromkeys(self._unread_trackers(), -math.inf)
                self._incarnation = ranks.incarnation
        return obeyed

    def _look(self, inotify: Inotify | None) -> bool:
        """Tell of what is new; says whether to look again, since something may have come unnoticed."""
        found: list[tuple[str, Checkpoint]] = []
        bad: list[str] = []
        if not self._incarnation:
            return False  # what was told of ranks that have ended stays as it is
        for folder in self._folders:
            listing = folder.lister.look(self._world_size)
            if folder.lister.too_many and not folder.said_too_many:
                folder.said_too_many = True
                logger.warning(
                    "%s holds too many files to look for checkpoints in all of them; name the folder with "
                    "--aegis-ckpt-watch KIND:PATH",
                    folder.lister.top,
                )
            for checkpoint in folder.memory.new(complete(folder.place.kind, listing)):
                folder.lister.done_with(checkpoint.path)
                found.append((os.path.join(folder.lister.top, checkpoint.path), checkpoint))
            bad += folder.unread(listing)
        again = inotify is not None and self._follow(inotify)
        unread = self._long_unread(bad)
        if found or unread != self._unread:
            self._note(found, unread)
        return again

    def _unread_trackers(self) -> list[str]:
        return [path for folder in self._folders for path in folder.unread(folder.lister.look())]

    def _long_unread(self, bad: Sequence[str]) -> str:
        """One of the trackers that mean nothing, and not only because they are just being written."""
        now_s = time.monotonic()
        self._bad = {path: self._bad.get(path, now_s) for path in bad}
        return next((path for path in bad if now_s - self._bad[path] >= UNREAD_S), "")

    def _note(self, found: Sequence[tuple[str, Checkpoint]], unread: str) -> None:
        with self._lock:
            self._unread = unread
            for path, checkpoint in found:
                self._count += 1
                self._saved.append(
                    {
                        "number": self._count,
                        "step": checkpoint.step,
                        "path": _printable(path),
                        "kind": checkpoint.kind,
                        "time": time.time(),
                    }
                )
        self._wake()

    def _follow(self, inotify: Inotify) -> bool:
        """Wait for news in the folders that there are now, and above those that are to come.

        Says whether some are new: what happened there before the kernel was asked, it doesn't tell.
        """
        wanted: dict[str, None] = {}
        for folder in self._folders:
            wanted |= dict.fromkeys(folder.lister.folders or (_nearest(folder.lister.top),))
        kept = set([*wanted][:WATCHES_MAX])
        for path in inotify.folders - kept:
            inotify.remove(path)
        added = False
        for path in kept - inotify.folders - self._silent:
            try:
                inotify.add(path)
                added = True
            except OSError as error:
                # It may be gone again already; and the list is looked through from time to time in any case.
                self._silent.add(path)
                logger.debug("no news from %s: %s", path, error)
        return added


def _printable(path: str) -> str:
    """A path for people and the wire: names need be neither text nor short."""
    text = os.fsencode(path).decode("utf-8", "replace")
    return "".join(sign if sign.isprintable() else "?" for sign in text[-PATH_CHARS:])


def _nearest(path: str) -> str:
    """The folder nearest to this one that exists."""
    while path != "/" and not os.path.isdir(path):
        path = os.path.dirname(path)
    return path
