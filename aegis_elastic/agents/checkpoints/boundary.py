"""The watcher "boundary": finds complete checkpoints in the folders that a training saves to, without changes
to it.

inotify reports the writes of this node, and the markers are written by rank 0; on a network file system it
reports nothing that others write, so the folders are also listed again every RELIST_S. Only the node of rank
0 does this: one report is enough, and a thousand agents that list a shared folder would be a load of their
own.
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
# A save makes many events, and listing costs time: rest so long after it, at least REST_FACTOR times as long.
REST_S = 0.02
REST_FACTOR = 4.0
WATCHES_MAX = 512
KEPT_CHECKPOINTS = 8  # in a report: those that were completed while a few reports were lost
CLOSE_S = 5.0
PATH_CHARS = 512
UNREAD_S = 1.0  # a tracker is empty for a moment while it is written


class _Folder:
    """One folder: its lister, and the checkpoints that are known."""

    def __init__(self, watched: WatchedFolder) -> None:
        self.watched = watched
        self.lister = Lister(watched.path)
        self.memory = SeenCheckpoints()
        self.warned_too_many = False

    def unread(self, listing: Listing) -> list[str]:
        """Megatron's tracker files that Megatron can't read."""
        if self.watched.kind not in (AUTO, "megatron"):
            return []
        empty = [tracker.path for tracker in megatron_trackers(listing) if not tracker.folder]
        return [os.path.join(self.lister.top, path) for path in empty]


class CheckpointWatcher:
    """Reports every checkpoint that completes while the ranks of this node run, if rank 0 is one of them."""

    name = "boundary"

    def __init__(
        self,
        wake: Callable[[], None],
        watched_folders: Sequence[WatchedFolder],
        *,
        relist_s: float = RELIST_S,
    ) -> None:
        self._wake = wake
        self._folders = [_Folder(watched) for watched in watched_folders]
        self._relist_s = relist_s
        self._lock = threading.Lock()
        self._saved: deque[dict[str, Any]] = deque(maxlen=KEPT_CHECKPOINTS)
        self._count = 0
        self._unread = ""
        self._commands: deque[WatchedRanks | None] = deque()
        self._world_size = 0
        self._incarnation = 0
        # Folders for which inotify failed; tried again after RELIST_S.
        self._unwatchable: set[str] = set()
        # Trackers that can't be read, and since when (monotonic s).
        self._unread_since: dict[str, float] = {}
        self._closing = self._failed = False
        self._read_fd, self._wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread: threading.Thread | None = None

    @property
    def incarnation(self) -> int:
        """The incarnation whose checkpoints are being watched; 0: none."""
        return self._incarnation

    # ------------------------------------------------------------ called from the agent's loop

    def environment(self) -> Mapping[str, str]:
        """None."""
        return {}

    def on_started(self, ranks: WatchedRanks) -> None:
        """List what is there now; what completes from here on is reported, if rank 0 is on this node."""
        if not self._folders:
            return
        if self._thread is None:
            if ranks.assignment.group_rank != 0:
                return
            self._thread = threading.Thread(target=self._run, name="aegis-boundary", daemon=True)
            self._thread.start()
        self._send_command(ranks)

    def on_ended(self) -> None:
        """Check the folders once more: what is complete by now was completed by these ranks."""
        if self._thread is not None:
            self._send_command(None)

    def facts(self) -> Mapping[str, Any] | None:
        """The last checkpoints, numbered; `unread`: a tracker that Megatron can't read, so that a start would
        fail.
        """
        with self._lock:
            if not self._saved and not self._unread:
                return None
            return {"saved": list(self._saved), "unread": _printable(self._unread)}

    def close(self) -> None:
        """End the thread. If it hangs on a dead network file system, it is left running, as a daemon."""
        self._closing = True
        os.write(self._wake_fd, b"\0")
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                logger.warning("the checkpoint folders don't respond: their watcher is left running")
                return
        os.close(self._read_fd)
        os.close(self._wake_fd)

    def _send_command(self, command: WatchedRanks | None) -> None:
        self._commands.append(command)
        os.write(self._wake_fd, b"\0")

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            inotify: Inotify | None = Inotify()
        except OSError as error:
            logger.warning("checkpoint folders are checked every %g s only: %s", self._relist_s, error)
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
        due_s, rest_until_s = time.monotonic(), 0.0
        wanted = True
        while not self._closing:
            now_s = time.monotonic()
            at_s = max(now_s, rest_until_s) if wanted else max(due_s, rest_until_s)
            ready = selector.select(max(at_s - now_s, 0.0))
            for key, _ in ready:
                if inotify is not None and key.fileobj is inotify:
                    changed = inotify.read()
                    wanted = wanted or bool(changed)
                    for folder in self._folders:
                        for path in changed:
                            folder.lister.mark_changed(path)
                else:
                    os.read(self._read_fd, 4096)
            if self._run_commands():
                wanted, rest_until_s = True, 0.0
            now_s = time.monotonic()
            if self._closing or now_s < rest_until_s or not (wanted or now_s >= due_s):
                continue
            if now_s >= due_s:
                self._unwatchable.clear()
            try:
                wanted = self._check_folders(inotify)
            except Exception:  # of an unexpected file, say: the next check may succeed
                if not self._failed:
                    logger.exception("cannot check the checkpoint folders; trying again")
                wanted, self._failed = False, True
            took_s = time.monotonic() - now_s
            rest_until_s = time.monotonic() + max(REST_S, REST_FACTOR * took_s)
            due_s = time.monotonic() + (
                UNREAD_S if self._unread_since and not self._unread else self._relist_s
            )

    def _run_commands(self) -> bool:
        """Run the commands of the agent's loop; returns whether there were any."""
        found_any = False
        while self._commands:
            ranks = self._commands.popleft()
            found_any = True
            # First report what the ranks before have completed; then whatever is there is old.
            if self._incarnation:
                self._check_folders(None)
            self._incarnation = 0
            if ranks is not None and ranks.assignment.group_rank == 0:
                self._world_size = ranks.world_size
                for folder in self._folders:
                    folder.memory.rebase(folder.lister.start())
                # Nothing is being written yet: a tracker that can't be read now can't be read by the ranks,
                # either.
                self._unread_since = dict.fromkeys(self._unread_trackers(), -math.inf)
                self._incarnation = ranks.incarnation
        return found_any

    def _check_folders(self, inotify: Inotify | None) -> bool:
        """Report what is new; returns whether to check again, since something may have come unnoticed."""
        found: list[tuple[str, Checkpoint]] = []
        unread_now: list[str] = []
        if not self._incarnation:
            return False  # the facts of ranks that have ended stay as they are
        for folder in self._folders:
            listing = folder.lister.list_folder(self._world_size)
            if folder.lister.too_many and not folder.warned_too_many:
                folder.warned_too_many = True
                logger.warning(
                    "%s has too many files to look for checkpoints in all of them; name the folder with "
                    "--aegis-ckpt-watch KIND:PATH",
                    folder.lister.top,
                )
            for checkpoint in folder.memory.new(complete(folder.watched.kind, listing)):
                folder.lister.mark_done(checkpoint.path)
                found.append((os.path.join(folder.lister.top, checkpoint.path), checkpoint))
            unread_now += folder.unread(listing)
        again = inotify is not None and self._update_watches(inotify)
        unread = self._long_unread(unread_now)
        if found or unread != self._unread:
            self._record(found, unread)
        return again

    def _unread_trackers(self) -> list[str]:
        return [path for folder in self._folders for path in folder.unread(folder.lister.list_folder())]

    def _long_unread(self, unread_now: Sequence[str]) -> str:
        """One of the trackers that can't be read for longer than a write takes; "" if there is none."""
        now_s = time.monotonic()
        self._unread_since = {path: self._unread_since.get(path, now_s) for path in unread_now}
        return next((path for path in unread_now if now_s - self._unread_since[path] >= UNREAD_S), "")

    def _record(self, found: Sequence[tuple[str, Checkpoint]], unread: str) -> None:
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

    def _update_watches(self, inotify: Inotify) -> bool:
        """Watch the folders that exist now, and the nearest parents of those that don't.

        Returns whether some are new: events there before `add` are not reported.
        """
        wanted: dict[str, None] = {}
        for folder in self._folders:
            wanted |= dict.fromkeys(folder.lister.folders or (_nearest_existing(folder.lister.top),))
        kept = set([*wanted][:WATCHES_MAX])
        for path in inotify.folders - kept:
            inotify.remove(path)
        added = False
        for path in kept - inotify.folders - self._unwatchable:
            try:
                inotify.add(path)
                added = True
            except OSError as error:
                # It may be gone again; and folders are listed every RELIST_S in any case.
                self._unwatchable.add(path)
                logger.debug("cannot watch %s: %s", path, error)
        return added


def _printable(path: str) -> str:
    """A path for people and reports: printable, of at most PATH_CHARS."""
    text = os.fsencode(path).decode("utf-8", "replace")
    return "".join(sign if sign.isprintable() else "?" for sign in text[-PATH_CHARS:])


def _nearest_existing(path: str) -> str:
    """The nearest parent of this folder that exists, or the folder itself."""
    while path != "/" and not os.path.isdir(path):
        path = os.path.dirname(path)
    return path
