"""aegisctl as people call it, against a real master on a real gRPC port with a certificate of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aegis_elastic.control.host import run_directories
from aegis_elastic.control.host.errors import AdminRefused, AdminUnreachable, BadRecord
from aegis_elastic.core.accounts.journal import encode_line
from aegis_elastic.core.accounts.report import build
from aegis_elastic.core.accounts.status_view import status_view
from aegis_elastic.launch.ctl import admin_client, main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("status", "--json")`: exit code, stdout and stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = main.main(argv)
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def ended(recorded_job: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """`ended("digits")`: the run directory of a job that has come to its end."""

    def make(job: str = "digits", **about: int) -> Path:
        recorded = recorded_job(job, **about)
        run_dir = tmp_path / f"run-{job}"
        run_dir.mkdir()
        recorded.write(run_dir / "journal.jsonl")
        (run_dir / "status.json").write_bytes(msgspec.json.encode(status_view(recorded.final, {})))
        (run_dir / "report.json").write_bytes(msgspec.json.encode(build(recorded.lines, recorded.final)))
        run_directories.register("default", job, 1, run_dir)
        return run_dir

    return make


def a_view(job: str = "digits", phase: str = "RunCommand") -> dict[str, Any]:
    worker = {"name": "w0", "node": "node0", "innerPhase": phase, "finished": False, "retries": 1,
              "lastFailedReason": "rank 1: SIGKILL", "ranks": [0, 1]}  # fmt: skip
    return {"job": job, "namespace": "default", "generation": 1, "phase": phase, "incarnation": 2,
            "seqNum": 9, "maxRetry": 3, "recoverCount": 1, "workers": [worker],
            "errorNodes": [{"nodeName": "node7", "reason": "gpu.missing", "kind": "hardware"}],
            "plane": {"master": "up"}}  # fmt: skip


@pytest.fixture
def live(master: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`live("digits")`: a job whose master answers."""

    def make(job: str = "digits", answer: Callable[[str, dict[str, Any]], Any] | None = None) -> Any:
        one = master(a_view(job), answer)
        run_dir = tmp_path / f"live-{job}"
        run_dir.mkdir()
        one.write_admin_file(run_dir)
        run_directories.register("default", job, 1, run_dir)
        return one

    return make


# --- which job ------------------------------------------------------------------------------------------


def test_the_only_live_job_needs_no_name(
    run: Run, live: Callable[..., Any], ended: Callable[..., Path]
) -> None:
    ended("older")
    live("digits")
    code, out, _ = run("status", "--json")
    assert code == 0
    assert msgspec.json.decode(out) == a_view("digits")


def test_two_live_jobs_must_be_distinguished(run: Run, live: Callable[..., Any]) -> None:
    live("one")
    live("two")
    code, _, err = run("status")
    assert code == 2
    assert "'one', 'two' are live" in err and "--job" in err
    assert run("status", "--json", "--job", "two")[0] == 0
    assert run("--job", "one", "status")[0] == 0


def test_aegis_job_names_the_job(run: Run, live: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    live("one")
    live("two")
    monkeypatch.setenv("AEGIS_JOB", "two")
    assert msgspec.json.decode(run("status", "--json")[1])["job"] == "two"


def test_no_job_at_all(run: Run, ended: Callable[..., Path]) -> None:
    assert run("status")[0] == 3
    ended("older")
    code, _, err = run("status")
    assert code == 3 and "--job 'older'" in err
    code, _, err = run("status", "--job", "other")
    assert code == 3 and "'other'" in err
    assert run("status", "--run-dir", "/no/such/run")[0] == 3


def test_wrong_use(run: Run) -> None:
    assert run("stauts")[0] == 2
    assert run()[0] == 2
    assert run("status", "--job", "")[0] == 3


# --- status ---------------------------------------------------------------------------------------------


def test_status_shows_what_happens_and_why(run: Run, live: Callable[..., Any]) -> None:
    live()
    code, out, _ = run("status")
    assert code == 0
    assert "RunCommand: training" in out
    assert "at most 3 restarts, 1 used" in out
    assert "rank 1: SIGKILL" in out and "0-1" in out
    assert "not to be used: node7 (hardware: gpu.missing)" in out


def test_an_ended_job_is_read_from_its_run_directory(run: Run, ended: Callable[..., Path]) -> None:
    run_dir = ended(max_retry=1, crashes=2)
    code, out, _ = run("status", "--run-dir", str(run_dir))
    assert code == 1, "a failed job is a finding"
    assert "Failed: the job is closed" in out and "because " in out
    code, out, _ = run("status", "--json", "--job", "digits")
    assert msgspec.json.decode(out)["phase"] == "Failed"
    assert run("status", "--run-dir", str(ended("fine")))[0] == 0


def test_a_master_that_is_gone_is_reported_and_the_last_status_shown(
    run: Run, live: Callable[..., Any], tmp_path: Path
) -> None:
    live().stop()
    code, out, err = run("status", "--job", "digits")
    assert (code, out) == (1, "") and "cannot reach the master at 127.0.0.1:" in err
    (tmp_path / "live-digits" / "status.json").write_bytes(msgspec.json.encode(a_view()))
    code, out, err = run("status", "--job", "digits")
    assert code == 1 and "training" in out
    assert "last status written down" in err
    assert run("status")[0] == 3, "it doesn't count as live"


# --- calls to the master ------------------------------------------------------------------------------


def test_only_the_pinned_master_is_believed(master: Callable[..., Any], tmp_path: Path) -> None:
    real, other = master(a_view()), master(a_view("evil"))
    real.write_admin_file(tmp_path, certPem=other.certificate.pem)
    admin = admin_client.load(tmp_path)
    assert admin is not None
    with pytest.raises(AdminUnreachable):
        admin_client.call(admin, "status", timeout_s=3)
    assert real.requests == []


def test_a_wrong_token_is_refused_and_the_token_is_shown_nowhere(
    master: Callable[..., Any], tmp_path: Path
) -> None:
    one = master(a_view())
    one.write_admin_file(tmp_path, token="hunter2")
    admin = admin_client.load(tmp_path)
    assert admin is not None and "hunter2" not in repr(admin)
    with pytest.raises(AdminRefused, match="cannot status: wrong token"):
        admin_client.call(admin, "status")


def test_an_admin_file_that_others_can_read_is_not_used(master: Callable[..., Any], tmp_path: Path) -> None:
    master().write_admin_file(tmp_path)
    (tmp_path / "admin.json").chmod(0o644)
    with pytest.raises(BadRecord, match="0644"):
        admin_client.load(tmp_path)


def test_quit_reaches_the_master_with_its_reason(run: Run, live: Callable[..., Any]) -> None:
    one = live()
    code, out, _ = run("quit", "--reason", "wrong data")
    assert code == 0 and "digits was asked to quit: wrong data" in out
    assert one.requests[-1] == ("quit", {"reason": "wrong data"})


def test_a_refusal_is_reported(run: Run, live: Callable[..., Any]) -> None:
    def answer(op: str, args: dict[str, Any]) -> Any:
        if op == "quit":
            raise ValueError("another operator has locked this job")
        return a_view()

    live(answer=answer)
    code, _, err = run("quit")
    assert code == 1 and "cannot quit: another operator has locked this job" in err


def test_an_ended_job_cannot_be_quit(run: Run, ended: Callable[..., Path]) -> None:
    ended()
    code, _, err = run("quit", "--job", "digits")
    assert code == 3 and "it has ended" in err


# --- log, report, replay --------------------------------------------------------------------------------


def test_the_log_is_readable(run: Run, ended: Callable[..., Path]) -> None:
    run_dir = ended()
    code, out, _ = run("log", "--run-dir", str(run_dir))
    assert code == 0
    failed = next(line for line in out.splitlines() if "error w0" in line)
    assert "RunCommand" in failed and "w0 failed: rank 1: exit code 1, ValueError: boom" in failed
    assert "Succeed" in out.splitlines()[-1]


def test_the_log_as_json_is_the_journal(run: Run, ended: Callable[..., Path]) -> None:
    run_dir = ended()
    assert run("log", "--json", "--run-dir", str(run_dir))[1] == (run_dir / "journal.jsonl").read_text()


def test_a_log_with_damage_names_the_line(run: Run, ended: Callable[..., Path]) -> None:
    journal = ended() / "journal.jsonl"
    lines = journal.read_text().splitlines()
    lines[3] = "{broken"
    journal.write_text("\n".join(lines))
    code, _, err = run("log", "--job", "digits")
    assert code == 1 and "journal.jsonl:4" in err


def test_following_a_log_shows_lines_as_they_come_and_ends_with_the_job(
    recorded_job: Callable[..., Any], tmp_path: Path
) -> None:
    recorded = recorded_job()
    assert [line.transition for line in recorded.lines[-2:]] == [
        "advance",
        "ended",
    ]  # it ends in the last but one
    journal = tmp_path / "journal.jsonl"
    recorded.write(journal, lines=3)
    with _aegisctl("log", "-f", "--json", "--run-dir", str(tmp_path)) as follower:
        assert follower.stdout is not None
        for line in recorded.lines[:3]:
            assert follower.stdout.readline() == encode_line(line)
        with journal.open("ab") as file:
            encoded = [encode_line(line) for line in recorded.lines[3:-1]]
            file.write(encoded[0][:20])  # a line that is being written is no line yet
            file.flush()
            file.write(encoded[0][20:])
            file.flush()
            assert follower.stdout.readline() == encoded[0]
            file.write(b"".join(encoded[1:]))
            file.flush()
        assert follower.stdout.read() == b"".join(encoded[1:])
        assert follower.wait(20) == 0


def test_following_can_be_interrupted(recorded_job: Callable[..., Any], tmp_path: Path) -> None:
    recorded_job().write(tmp_path / "journal.jsonl", lines=2)
    with _aegisctl("log", "-f", "--run-dir", str(tmp_path)) as follower:
        assert follower.stdout is not None
        follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        assert follower.wait(20) == 130


def _aegisctl(*argv: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "aegis_elastic.launch.ctl.main", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=env)


def test_the_report_is_shown_and_printed(run: Run, ended: Callable[..., Path]) -> None:
    run_dir = ended()
    code, out, _ = run("report", "--job", "digits")
    assert code == 0 and "root cause" in out
    code, out, _ = run("report", "--json", "--job", "digits")
    assert msgspec.json.decode(out) == msgspec.json.decode((run_dir / "report.json").read_bytes())
    ended("lost", max_retry=0, crashes=1)
    assert run("report", "--job", "lost")[0] == 1


def test_a_running_job_has_no_report_yet(run: Run, live: Callable[..., Any]) -> None:
    live()
    code, _, err = run("report")
    assert code == 3 and "written when the job ends" in err


def test_a_true_journal_replays(run: Run, ended: Callable[..., Path]) -> None:
    run_dir = ended()
    for named in (str(run_dir), str(run_dir / "journal.jsonl")):
        code, out, _ = run("replay", named)
        assert code == 0 and "came out the same: every decision" in out
    assert run("replay", "--job", "digits")[0] == 0


def test_an_altered_journal_is_found_out(run: Run, ended: Callable[..., Path]) -> None:
    journal = ended() / "journal.jsonl"
    lines = journal.read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if '"worker":"w0"' in line and '"error"' in line)
    lines[number] = lines[number].replace('"worker":"w0"', '"worker":"w1"')
    journal.write_text("\n".join(lines) + "\n")
    code, out, _ = run("replay", str(journal))
    assert code == 1 and f"line {number + 1}" in out


def test_what_is_no_journal(run: Run, tmp_path: Path) -> None:
    assert run("replay", str(tmp_path))[0] == 3
    assert run("replay", str(tmp_path / "none.jsonl"))[0] == 3
    (tmp_path / "junk").write_bytes(b"junk\xff\n{}\n")
    code, _, err = run("replay", str(tmp_path / "junk"))
    assert code == 1 and "junk:1" in err
