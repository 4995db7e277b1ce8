"""The journal of a long job, and of one whose disk is full."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aegis_elastic.control import journal_file, run_files
from aegis_elastic.control.effects import Publisher
from aegis_elastic.control.final_report import write_final_report
from aegis_elastic.control.journal_file import Journal
from aegis_elastic.control.run_files import journal_parts, set_aside
from aegis_elastic.core.accounts import journal
from aegis_elastic.core.accounts.report import Report
from aegis_elastic.core.events import Error, Event, Finish, Join, Quit, Reconcile
from aegis_elastic.core.machine import step
from aegis_elastic.core.model import Phase, Status
from tests.control.planes import spec


class Job:
    """One worker's job, written down as a master does."""

    def __init__(self, folder: Path, part_bytes_max: int = journal_file.PART_BYTES_MAX) -> None:
        self.journal_file = Journal(folder, part_bytes_max)
        begun = journal.begin(spec(max_retry=1000), 1.0)
        self.status: Status = begun.status
        self.journal_file.write(1.0, journal.Create(self.status.spec), begun)

    def feed(self, event: Event) -> None:
        """An event, then decisions until none is left."""
        transition = step(self.status, event, 2.0)
        self.status = transition.status
        self.journal_file.write(2.0, event, transition)
        while (transition := step(self.status, Reconcile(), 2.0)).status is not self.status:
            self.status = transition.status
            self.journal_file.write(2.0, Reconcile(), transition)

    def finish(self) -> None:
        """The worker has done what it was asked."""
        status = self.status
        self.feed(Finish("a", "u", status.incarnation, status.seq_num, store="10.0.0.1:1"))

    def run(self) -> None:
        """From nothing to training, and from a failure back."""
        if not self.status.workers:
            self.feed(Join("a", "u", "n", "10.0.0.1", 1))
        else:
            self.feed(Error("a", "u", self.status.incarnation, self.status.seq_num, "exit code 1"))
        while self.status.phase is not Phase.RUN_COMMAND:
            self.finish()


class CountingBus:
    """Counts messages."""

    def __init__(self) -> None:
        self.published = 0

    async def publish(self, subject: str, data: bytes) -> None:
        """One more."""
        self.published += 1


def closed(job: Job, folder: Path) -> Report:
    bus: Any = CountingBus()

    async def close() -> Report:
        final = await write_final_report(folder, job.journal_file, job.status)
        await Publisher(bus, "team", "job").send_final_report(job.status, final)
        return final

    final = asyncio.run(close())
    assert bus.published == 1
    return final


def test_a_long_journal_goes_on_in_a_new_file_that_stands_for_itself(tmp_path: Path) -> None:
    job = Job(tmp_path, part_bytes_max=8_000)
    for _ in range(40):
        job.run()
    files = [*journal_parts(tmp_path), job.journal_file.path]
    assert len(files) > 2
    assert all(path.stat().st_size < 12_000 for path in files)
    read = [journal.read(path) for path in files]
    assert all(journal.replay(lines).ok for lines in read)
    assert [line.seq for lines in read for line in lines] == list(range(1, job.journal_file.seq + 1))
    again = Journal(tmp_path)
    assert again.seq == job.journal_file.seq
    job.feed(Quit("enough"))
    final = closed(job, tmp_path)
    assert (final.phase, final.recover_count) == ("Failed", 39)
    assert final.summary.endswith("(how it began: " + ", ".join(path.name for path in files[:-1]) + ")")
    set_aside(tmp_path)
    assert not journal_parts(tmp_path)
    assert len(journal_parts(tmp_path / "earlier-1")) == len(files) - 1


class Full:
    """A file on a disk that takes so many bytes more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file = file
        self.room = room

    def write(self, data: bytes) -> int:
        """As a raw file does: a part of it, or ENOSPC."""
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = data[: self.room]
        self.room -= len(taken)
        self.file.write(taken)
        return len(taken)


@pytest.mark.parametrize("room", [0, 100])
def test_a_full_disk_ends_no_job_and_the_journal_goes_on_when_there_is_room(
    tmp_path: Path, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    job.run()
    journal_file: Any = job.journal_file
    file, log = journal_file._file, journal_file._log
    journal_file._file, journal_file._log = Full(file, room), Full(log, 0)
    job.run()
    job.journal_file.log(job.status, 2.0, "something")
    assert [each.levelname for each in caplog.records] == ["ERROR"]
    journal_file._file, journal_file._log = file, log
    job.run()
    lines = job.journal_file.lines()
    assert journal.replay(lines).ok
    assert sum(isinstance(line.event, journal.Adopt) for line in lines) == 1
    assert job.status.incarnation == 3
    assert "again" in caplog.text


def test_the_report_is_sent_though_it_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path)
    job.run()
    job.feed(Quit("enough"))

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

    monkeypatch.setattr(run_files, "write_private", full)
    assert closed(job, tmp_path).fail_reason == "enough"


@pytest.mark.parametrize("left", [b"{", b"\n", b'{"t":1}\n{"t":2}\n', b"\0" * 100 + b"\n\n{}\n"])
def test_whatever_lies_there_a_master_can_begin(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "journal.jsonl").write_bytes(left)
    job = Job(tmp_path)
    journal_file = Journal(tmp_path)
    journal_file.write(2.0, journal.Adopt(job.status), journal.adopted(job.status))
    assert journal_file.seq >= 1
    assert msgspec.json.encode(journal_file.lines()[-1].event)
