"""One name, one living agent: on a host, each launcher of a job holds its worker's name by a file lock.

A worker's name carries its accounts from one life of its agent to the next, so two agents that live at the
same time must not share one: each would take the other for its own successor. Launch lines that start several
launchers on a host give them no names, so they are numbered here; a relaunch takes the lowest number that is
free, which is the one of the launcher that has gone. The lock goes with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from aegis_elastic.control.host import run_directories
from aegis_elastic.control.host.errors import UsageError

logger = logging.getLogger(__name__)

FOLDER = "workers"
LAUNCHERS_MAX = 1024


class Name(NamedTuple):
    """A worker's name, and the descriptor of the lock on it (-1 where none could be had)."""

    text: str
    lock: int = -1


@contextmanager
def held_on(name: str, lock: int) -> Iterator[Name]:
    """Hold a name whose lock an earlier program of this process has left to us."""
    try:
        yield Name(name, lock)
    finally:
        if lock >= 0:
            os.close(lock)


@contextmanager
def held(job_dir: Path, wanted: str, *, chosen: bool) -> Iterator[Name]:
    """Hold a worker's name while the block runs; yields it.

    A `chosen` name is taken as it is, and UsageError says when a living launcher here has it; others get a
    number behind them. Where no lock can be had, the wanted name is yielded unheld: the master still refuses
    a name that is alive elsewhere.
    """
    try:
        folder = run_directories.make_private(job_dir / FOLDER)
    except UsageError as error:
        logger.info("worker name %s is not locked: %s", wanted, error)
        yield Name(wanted)
        return
    for number in range(1, LAUNCHERS_MAX + 1):
        name = wanted if number == 1 else f"{wanted}.{number}"
        try:
            lock = _lock(folder / run_directories.file_name(name))
        except OSError as error:  # a full disk, say
            logger.info("worker name %s is not locked: %s", wanted, error)
            yield Name(wanted)
            return
        if lock is not None:
            try:
                yield Name(name, lock)
            finally:
                os.close(lock)
            return
        if chosen:
            raise UsageError(
                f"cannot start as worker {wanted!r}: a launcher of this job is running here under that name; "
                "give each its own --aegis-worker-name or --node-rank, or another job another endpoint"
            )
    raise UsageError(f"cannot start: {LAUNCHERS_MAX} launchers of this job run here already")


def _lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        # Some network file systems have no locks: better an unheld name than none.
        logger.info("cannot lock %s: %s", path, error)
    return descriptor
