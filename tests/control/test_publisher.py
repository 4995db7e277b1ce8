"""The journal of a long job, and of one whose disk is full."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aegis_elastic.control import publisher
from aegis_elastic.control.publisher import Journal, Publisher, parts, set_aside
from aegis_elastic.core.accounts import journal
from aegis_elastic.core.events import Error, Event, Finish, Join, Quit, Reconcile
from aegis_elastic.core.machine import step
from aegis_elastic.core.model import Phase, Status
from tests.control.planes import spec


class Job:
    """One worker's job, written down as a master does."""

    def __init__(self, folder: Path, part_bytes_max: int = publisher.PART_BYTES_MAX) -> None:
        self.book = Journal(folder, part_bytes_max)
        begun = journal.begin(spec(max_retry=1000), 1.0)
        self.status: Status = begun.status
        self.book.write(1.0, journal.Create(self.status.spec), begun)

    def tell(self, event: Event) -> None:
        """An event, then decisions until none is left."""
        made = step(self.status, event, 2.0)
        self.status = made.status
        self.book.write(2.0, event, made)
        while (made := step(self.status, Reconcile(), 2.0)).status is not self.status:
            self.status = made.status
            self.book.write(2.0, Reconcile(), made)

    def finish(self) -> None:
        """The worker has done what it was asked."""
        status = self.status
        self.tell(Finish("a", "u", status.incarnation, status.seq_num, store="10.0.0.1:1"))

    def run(self) -> None:
        """From nothing to training, and from a failure back."""
        if not self.status.workers:
            self.tell(Join("a", "u", "n", "10.0.0.1", 1))
        else:
            self.tell(Error("a", "u", self.status.incarnation, self.status.seq_num, "exit code 1"))
        while self.status.phase is not Phase.RUN_COMMAND:
            self.finish()


class NoBus:
    """Takes what is said."""

    def __init__(self) -> None:
        self.said = 0

    async def publish(self, subject: str, data: bytes) -> None:
        """One more."""
        self.said += 1


def closed(job: Job, folder: Path) -> Any:
    bus: Any = NoBus()
    made = asyncio.run(Publisher(bus, "team", "job").close_job(folder, job.book, job.status))
    assert bus.said == 1
    return made


def test_a_long_journal_goes_on_in_a_new_file_that_stands_for_itself(tmp_path: Path) -> None:
    job = Job(tmp_path, part_bytes_max=8_000)
    for _ in range(40):
        job.run()
    files = [*parts(tmp_path), job.book.path]
    assert len(files) > 2
    assert all(path.stat().st_size < 12_000 for path in files)
    read = [journal.read(path) for path in files]
    assert all(journal.replay(lines).ok for lines in read)
    assert [line.seq for lines in read for line in lines] == list(range(1, job.book.seq + 1))
    again = Journal(tmp_path)
    assert again.seq == job.book.seq
    job.tell(Quit("enough"))
    final = closed(job, tmp_path)
    assert (final.phase, final.recover_count) == ("Failed", 39)
    assert final.summary.endswith("(how it began: " + ", ".join(path.name for path in files[:-1]) + ")")
    set_aside(tmp_path)
    assert not parts(tmp_path)
    assert len(parts(tmp_path / "earlier-1")) == len(files) - 1


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
    book: Any = job.book
    file, log = book._file, book._log
    book._file, book._log = Full(file, room), Full(log, 0)
    job.run()
    job.book.log(job.status, 2.0, "something")
    assert [each.levelname for each in caplog.records] == ["ERROR"]
    book._file, book._log = file, log
    job.run()
    lines = job.book.lines()
    assert journal.replay(lines).ok
    assert sum(isinstance(line.event, journal.Adopt) for line in lines) == 1
    assert job.status.incarnation == 3
    assert "again" in caplog.text


def test_the_end_is_told_though_no_report_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path)
    job.run()
    job.tell(Quit("enough"))

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

    monkeypatch.setattr(publisher, "write_private", full)
    assert closed(job, tmp_path).fail_reason == "enough"


@pytest.mark.parametrize("left", [b"{", b"\n", b'{"t":1}\n{"t":2}\n', b"\0" * 100 + b"\n\n{}\n"])
def test_whatever_lies_there_a_master_can_begin(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "journal.jsonl").write_bytes(left)
    job = Job(tmp_path)
    book = Journal(tmp_path)
    book.write(2.0, journal.Adopt(job.status), journal.adopted(job.status))
    assert book.seq >= 1
    assert msgspec.json.encode(book.lines()[-1].event)
