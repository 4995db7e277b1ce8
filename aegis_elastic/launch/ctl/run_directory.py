"""Reads a job's status, journal and report by its run directory, and finds this user's live jobs."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aegis_elastic.control.host import run_directories
from aegis_elastic.control.host.errors import AdminUnreachable, BadRecord, LaunchError, NoSuchJob, UsageError
from aegis_elastic.core.accounts.journal import BadJournal, Line, read
from aegis_elastic.core.accounts.report import Report
from aegis_elastic.core.model import TERMINAL
from aegis_elastic.launch.ctl import admin_client

STATUS_FILE = "status.json"
REPORT_FILE = "report.json"
JOURNAL_FILE = "journal.jsonl"

_ENDED = frozenset(phase.value for phase in TERMINAL)
# A master on this host answers in milliseconds; one that needs longer isn't there.
_PROBE_S = 3.0
_PROBES_MAX = 64


class JobStatus(NamedTuple):
    """A job's status view and where it came from: `live` from its master, else the last one stored."""

    view: dict[str, Any]
    live: bool
    why_not_live: str = ""

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.view.get("phase") in _ENDED


def read_status(run_dir: Path, timeout_s: float = 10.0) -> JobStatus:
    """The status of the job of this run directory: from its master, or as an ended job has stored it.

    AdminUnreachable if the master doesn't answer and nothing is stored; NoSuchJob if the directory has
    neither.
    """
    stored = _stored_status(run_dir)
    if stored is not None and stored.get("phase") in _ENDED:
        return JobStatus(stored, live=False)
    admin = admin_client.load(run_dir)
    if admin is None:
        if stored is None:
            raise NoSuchJob(
                f"cannot find a job in {run_dir}: it has no {admin_client.ADMIN_FILE} and no {STATUS_FILE}"
            )
        return JobStatus(stored, live=False, why_not_live=f"{run_dir} doesn't say how to reach its master")
    try:
        view = admin_client.call(admin, "status", timeout_s=timeout_s)
    except AdminUnreachable as error:
        if stored is None:
            raise
        return JobStatus(stored, live=False, why_not_live=str(error))
    if not isinstance(view, dict):
        raise BadRecord(f"cannot understand the master at {admin.endpoint}: its status is no JSON object")
    return JobStatus(view, live=True)


def read_report(run_dir: Path) -> Report:
    """The report that the job left; NoSuchJob if it has none (yet)."""
    path = run_dir / REPORT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except FileNotFoundError as error:
        raise NoSuchJob(f"cannot find a report in {run_dir}: it is written when the job ends") from error
    except (OSError, msgspec.DecodeError) as error:
        raise BadRecord(f"cannot read {path}: {error}") from error


def read_journal(path: Path) -> list[Line]:
    """The lines of a journal, given by its file or its run directory."""
    file = journal_file(path)
    try:
        return read(file)
    except BadJournal as error:
        raise BadRecord(str(error)) from error


def journal_file(path: Path) -> Path:
    """The journal that `path` (itself or the run directory it is in) means; NoSuchJob if there is none."""
    file = path / JOURNAL_FILE if path.is_dir() else path
    if not file.is_file():
        raise NoSuchJob(f"cannot find a journal at {path}: want a run directory or a {JOURNAL_FILE}")
    return file


def locate(run_dir: Path | None, job: str | None, namespace: str | None) -> Path:
    """The run directory that is meant: the one given, that of the job named, or the only live one.

    NoSuchJob if there is none; UsageError if several are live.
    """
    if run_dir is not None:
        if not run_dir.is_dir():
            raise NoSuchJob(f"cannot find a job in {run_dir}: there is no such directory")
        return run_dir
    if job is not None:
        return run_directories.find(job, namespace).path
    live = _live(run_directories.registrations(namespace))
    if not live:
        known = [r.job for r in run_directories.registrations(namespace)][:5]
        hint = f"; to look at one that has ended: --job {known[0]!r}" if known else ""
        raise NoSuchJob(f"cannot find a live job of yours on this machine{hint}")
    if len(live) > 1:
        names = ", ".join(sorted(repr(r.job) for r in live))
        raise UsageError(f"cannot tell which job is meant: {names} are live; choose one with --job NAME")
    return live[0].path


def _live(registered: Iterable[run_directories.Registration]) -> list[run_directories.Registration]:
    """Those whose master answers. All are called at once, since one that is gone may take long to fail."""
    candidates = [r for r, _ in zip(registered, range(_PROBES_MAX), strict=False) if _has_admin_file(r.path)]
    if not candidates:
        return []
    with ThreadPoolExecutor(max_workers=min(len(candidates), 16)) as pool:
        return [r for r, live in zip(candidates, pool.map(_answers, candidates), strict=True) if live]


def _has_admin_file(run_dir: Path) -> bool:
    return (run_dir / admin_client.ADMIN_FILE).exists()


def _answers(registration: run_directories.Registration) -> bool:
    try:
        status = read_status(registration.path, _PROBE_S)
    except LaunchError:  # a master that can't be called leads no live job
        return False
    return status.live and not status.ended


def _stored_status(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / STATUS_FILE
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise BadRecord(f"cannot read {path}: {error}") from error
    return stored
