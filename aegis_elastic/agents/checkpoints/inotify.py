"""inotify by ctypes: three calls of the C library are not worth a dependency."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# A file or folder was created, removed or written.
_CLOSE_WRITE, _MOVED_TO, _MOVED_FROM, _CREATE, _DELETE, _MOVE_SELF = 0x8, 0x80, 0x40, 0x100, 0x200, 0x800
MASK = _CLOSE_WRITE | _MOVED_TO | _MOVED_FROM | _CREATE | _DELETE | _MOVE_SELF
_ONLY_FOLDERS = 0x01000000
# The kernel has removed this watch: the folder is gone.
_IGNORED = 0x8000
_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """Watches folders. Not thread-safe; `fileno` is readable when there are events."""

    def __init__(self) -> None:
        """OSError if this user has too many inotify instances."""
        self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _error("inotify_init1")
        self._folders: dict[int, str] = {}
        self._numbers: dict[str, int] = {}

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return int(self._fd)

    @property
    def folders(self) -> frozenset[str]:
        """The folders that are watched now."""
        return frozenset(self._numbers)

    def add(self, folder: str) -> None:
        """Watch a folder, not its subfolders. OSError: it doesn't exist, or the kernel's limit is reached."""
        number = _libc.inotify_add_watch(self._fd, os.fsencode(folder), MASK | _ONLY_FOLDERS)
        if number < 0:
            raise _error(folder)
        # The kernel watches inodes, not names: after a rename, the same number has the new name.
        self._numbers.pop(self._folders.get(number, ""), None)
        self._folders[number], self._numbers[folder] = folder, number

    def remove(self, folder: str) -> None:
        """Stop watching a folder."""
        number = self._numbers.pop(folder, None)
        if number is not None:
            self._folders.pop(number, None)
            _libc.inotify_rm_watch(self._fd, number)  # fails if the folder is gone, which is no matter

    def read(self) -> set[str]:
        """The folders with events since the last call; all of them after an overflow."""
        changed: set[str] = set()
        while True:
            try:
                raw = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return changed
            at = 0
            while at < len(raw):
                number, mask, _, length = _EVENT.unpack_from(raw, at)
                at += _EVENT.size + length
                if number < 0:
                    changed |= self._numbers.keys()
                    continue
                folder = self._folders.get(number)
                if folder is not None:
                    changed.add(folder)
                if mask & _IGNORED and folder is not None:
                    del self._folders[number]
                    self._numbers.pop(folder, None)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    why = "too many folders are watched by this user" if number == errno.ENOSPC else os.strerror(number)
    return OSError(number, why, what)
