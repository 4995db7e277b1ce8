"""Ranks that have failed and whose interpreter is still shutting down. Part of the guard program, stdlib
only.

A rank whose script has ended in an exception, after its last ``atexit``, writes its pid into the access time
of its error file (``worker/exit_notice.py``), which inotify reports at once. The pid must be the rank's own:
a wrapper script may run another Python after the one that failed.
"""

from __future__ import annotations

import ctypes
import os
import struct

# typing costs a third of the guard's start; the annotations below are never evaluated
TYPE_CHECKING = False
if TYPE_CHECKING:
    import select
    from typing import Any

IN_ATTRIB = 0x4
EPOLLIN = 1
READ_BYTES = 1 << 14
_HEAD = struct.Struct("iIII")
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

_libc = ctypes.CDLL(None, use_errno=True)


class ExitingRanks:
    """Watches the error files of one generation. Where it can't, a rank's exit is seen when the process has
    ended.
    """

    def __init__(self, poll: select.epoll) -> None:
        self._poll = poll
        self._fd = -1
        self._files: dict[tuple[int, bytes], tuple[int, bytes]] = {}

    def watch(self, specs: list[dict[str, Any]]) -> None:
        """Watch the ranks that are about to be started, in place of those before."""
        self.close()
        files = {}
        for spec in specs:
            path = {**spec["env"], **(spec.get("late") or {})}.get(ERROR_FILE, "")
            if path and "\0" not in path:
                files[spec["local_rank"]] = path.encode("utf-8", "surrogateescape")
        self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC) if files else -1
        if self._fd < 0:
            return  # there are none, or the user's limit of inotify instances is reached
        for local_rank, path in files.items():
            folder, name = os.path.split(path)
            watch = _libc.inotify_add_watch(self._fd, folder, IN_ATTRIB)
            if watch >= 0:
                self._files[watch, name] = local_rank, path
        self._poll.register(self._fd, EPOLLIN)

    def owns(self, fd: int) -> bool:
        """Whether the descriptor is ours."""
        return fd == self._fd

    def read(self) -> list[tuple[int, int]]:
        """The ranks that are exiting: (local rank, the pid that it wrote)."""
        found = []
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return []
        while len(data) >= _HEAD.size:
            watch, _, _, length = _HEAD.unpack_from(data)
            name = data[_HEAD.size : _HEAD.size + length].rstrip(b"\0")
            data = data[_HEAD.size + length :]
            if (watch, name) in self._files:
                local_rank, path = self._files[watch, name]
                try:
                    found.append((local_rank, int(os.stat(path).st_atime)))
                except OSError:
                    continue  # the file is gone again
        return found

    def close(self) -> None:
        """Stop watching."""
        self._files.clear()
        if self._fd >= 0:
            self._poll.unregister(self._fd)
            os.close(self._fd)
            self._fd = -1
