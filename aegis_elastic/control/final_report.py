"""The report of a job that has ended: built from its journal, written into the run directory."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from aegis_elastic.control.journal_file import Journal
from aegis_elastic.control.run_files import REPORT_FILE, write_if_possible
from aegis_elastic.core.accounts import report
from aegis_elastic.core.accounts.journal import BadJournal
from aegis_elastic.core.accounts.report import Report
from aegis_elastic.core.model import Status

logger = logging.getLogger(__name__)


async def write_final_report(run_dir: Path, journal: Journal, status: Status) -> Report:
    """Build the report, write it if the disk takes it, return it."""
    # Beside the loop: of a large job it takes a while, and agents must not take us for dead meanwhile.
    final = await asyncio.to_thread(_build, journal, status)
    write_if_possible(run_dir / REPORT_FILE, msgspec.json.format(msgspec.json.encode(final), indent=2))
    return final


def _build(journal: Journal, status: Status) -> Report:
    try:
        final = report.build(journal.lines(), status)
    except (BadJournal, OSError) as error:
        logger.error("the report tells of the end only: %s", error)
        final = report.build((), status)
    if journal.parts:
        names = ", ".join(path.name for path in journal.parts)
        final = msgspec.structs.replace(final, summary=f"{final.summary} (how it began: {names})")
    return final
