"""What training code may report where torch's hooks can't know it: its step, a complete checkpoint.

Without the launcher (or with `--aegis-progress off`) both do nothing, so scripts run everywhere.
"""

from __future__ import annotations

import os
import threading
import time

from aegis_elastic.worker import slot as slots

_lock = threading.Lock()
# (pid, slot): a forked child is another process of the same rank, and its calls count too
_opened: tuple[int, slots.Slot | None] = (0, None)


def progress(step: int) -> None:
    """Report that training has done `step`. Not needed with torch's optimizers, whose steps are counted."""
    slot = _slot()
    if slot is not None:
        with _lock:
            slot.write_progress(int(step), time.monotonic_ns())


def checkpoint_saved(step: int, path: str | os.PathLike[str]) -> None:
    """Report that the checkpoint of `step` at `path` is complete. Not needed for known frameworks.

    Call it on one rank, after everything is written: from then on a slow node may be moved out, and training
    continues from there. ValueError for a path of more than 2048 bytes.
    """
    slot = _slot()
    if slot is not None:
        with _lock:
            slot.write_checkpoint(int(step), time.time_ns(), os.path.abspath(path))


def _slot() -> slots.Slot | None:
    global _opened
    pid, slot = _opened
    if pid != os.getpid():
        folder, rank = os.environ.get(slots.VARIABLE), os.environ.get("RANK", "")
        slot = None
        if folder and rank.isdigit():
            try:
                slot = slots.Slot(os.path.join(folder, rank))
            except OSError:
                slot = None  # the launcher is gone: nobody reads it
        _opened = os.getpid(), slot
    return slot
