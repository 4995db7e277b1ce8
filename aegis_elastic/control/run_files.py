"""The files of a run directory, and what an earlier job has left there."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

from aegis_elastic.control.host.config import write_private

logger = logging.getLogger(__name__)

JOURNAL_FILE = "journal.jsonl"
REPORT_FILE = "report.json"
STATUS_FILE = "status.json"
LOG_FILE = "aegis.log"


def set_aside(run_dir: Path) -> None:
    """Before a job begins in this run directory: what an earlier one has left there gets a folder beside it.

    Users name the same directory again and again, and two jobs in one journal are neither's.
    """
    left = [run_dir / name for name in (JOURNAL_FILE, REPORT_FILE, STATUS_FILE, LOG_FILE)]
    left = [path for path in (*left, *journal_parts(run_dir)) if path.exists()]
    if left:
        folders = (run_dir / f"earlier-{number}" for number in itertools.count(1))
        folder = next(folder for folder in folders if not folder.exists())
        folder.mkdir(mode=0o700)
        for path in left:
            path.rename(folder / path.name)


def journal_parts(run_dir: Path) -> list[Path]:
    """The files in which a long journal began, oldest first. The newest, `journal.jsonl`, is not one of
    them.
    """
    found = {path: path.stem.removeprefix("journal-") for path in run_dir.glob("journal-*.jsonl")}
    return sorted((path for path, number in found.items() if number.isdigit()), key=lambda p: int(found[p]))


def write_if_possible(path: Path, content: bytes) -> None:
    """Write a file that others wait for less than for what comes after it: a full disk is logged, no more."""
    try:
        write_private(path, content)
    except OSError as error:
        logger.error("cannot write %s: %s", path, error)
