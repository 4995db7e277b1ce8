"""The lines of a file that is still being written, as they come."""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Iterator
from pathlib import Path

_IN_MODIFY = 0x002
_IN_CLOEXEC = 0o2000000
_IN_NONBLOCK = 0o4000
# A file that another host writes (NFS) causes no event here, so the file is polled as well.
_POLL_S = 1.0
_READ_BYTES = 1 << 20


def follow(path: Path) -> Iterator[bytes]:
    """Every whole line of `path` without its newline: those that are there, then new ones; never ends.

    Waits by inotify. OSError as the file system says.
    """
    with path.open("rb") as file:
        with _Watch(path) as watch:
            pending = b""
            while True:
                new = file.read(_READ_BYTES)
                if not new:
                    watch.wait(_POLL_S)
                    continue
                *whole, pending = (pending + new).split(b"\n")
                yield from whole


class _Watch:
    """An inotify watch on one file."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
        if self._fd < 0:
            raise _failed("inotify_init1", path)
        if libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_MODIFY) < 0:
            error = _failed("inotify_add_watch", path)
            os.close(self._fd)
            raise error

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def wait(self, timeout_s: float) -> None:
        """Return when the file has been written to, or after `timeout_s`."""
        if select.select([self._fd], [], [], timeout_s)[0]:
            os.read(self._fd, 1 << 16)  # all events so far: one read of the file covers them all


def _failed(call: str, path: Path) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}", str(path))
