"""A private folder in shared memory, and no more of it when its owner is gone, however it went."""

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
    """A folder (mode 0700) that this process holds by a lock. Those of ours that nobody holds are swept."""

    def __init__(self) -> None:
        """OSError if neither shared memory nor the temporary directory will have it."""
        usable = _SHM.is_dir() and os.access(_SHM, os.W_OK | os.X_OK)
        parent = _SHM if usable else Path(tempfile.gettempdir())
        _sweep(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # held as long as the process lives: process ids mean nothing between containers that share memory
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            if os.fstat(self._handle).st_nlink:
                return
            # A launcher that began together with us was quicker to lock it, and took it for a dead one's.
            os.close(self._handle)

    def empty(self) -> None:
        """Remove everything in it but the lock."""
        for entry in self.path.iterdir():
            if entry.name != _LOCK:
                entry.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


def _sweep(parent: Path) -> None:
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
            continue  # somebody lives there
        finally:
            os.close(handle)
