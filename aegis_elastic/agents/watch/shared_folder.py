"""A private folder in shared memory, which the next launcher removes if its owner was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "aegis-progress-"
_SHM = Path("/dev/shm")
_LOCK = ".lock"


class SharedFolder:
    """A folder (mode 0700) that this process keeps locked. Unlocked folders of ours are removed."""

    def __init__(self) -> None:
        """OSError if it can be made neither in shared memory nor in the temporary directory."""
        usable = _SHM.is_dir() and os.access(_SHM, os.W_OK | os.X_OK)
        parent = _SHM if usable else Path(tempfile.gettempdir())
        _remove_abandoned(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._lock_fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # locked as long as the process lives; a pid means nothing in another container that shares this
            # memory
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            if os.fstat(self._lock_fd).st_nlink:
                return
            # Another launcher locked it before us, took it for an abandoned one and removed it.
            os.close(self._lock_fd)

    def empty(self) -> None:
        """Remove everything in it but the lock."""
        for entry in self.path.iterdir():
            if entry.name != _LOCK:
                entry.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # just being made, or just being removed
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(handle)
