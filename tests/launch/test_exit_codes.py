"""docs/exit-codes.md, row by row, with real launchers."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.harness import Job

TABLE = Path(__file__).resolve().parent.parent.parent / "docs" / "exit-codes.md"
FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off", "--aegis-warm-spares", "off")
SCRIPT = """
import os, signal, sys, time
how = sys.argv[1]
if how == "wait":
    time.sleep(600)
elif how.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, how))
sys.exit(int(how))
"""
PROPAGATE = "--aegis-propagate-exit-code"


@pytest.fixture
def job_of(tmp_path: Path) -> Callable[..., Job]:
    (tmp_path / "train.py").write_text(SCRIPT)

    def make(*flags: str) -> Job:
        return Job(tmp_path / "job", max_restarts=0, flags=[*FLAGS, *flags])

    return make


def test_every_row_is_a_test_of_this_file() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \|", TABLE.read_text(), flags=re.MULTILINE)
    assert set(rows) == {
        ("aegis-run", "75"),
        ("aegis-run", "0"), ("aegis-run", "1"), ("aegis-run", "2"), ("aegis-run", "128 + N"),
        ("aegis-run", "the root cause's own"),
        ("aegis-run", "`--aegis-isolate-exit-code`"),
        ("aegisctl", "0"), ("aegisctl", "1"), ("aegisctl", "2"), ("aegisctl", "3"),
    }  # fmt: skip


def test_too_few_nodes_are_75_and_the_next_start_goes_on_with_the_accounts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = [*FLAGS, "--aegis-requeue", "on", "--aegis-rejoin-timeout-s", "1"]
    with Job(tmp_path / "job", nnodes="2", max_restarts=1, flags=flags) as job:
        first = job.start(tmp_path / "train.py", "wait", worker="a")
        second = job.start(tmp_path / "train.py", "wait", worker="b")
        job.wait_phase("RunCommand", 1)
        second.kill()
        assert first.wait() == 75
        view = job.status()
        assert (view["phase"], view["recoverCount"]) == ("Restarting", 1)
        again = [job.start(tmp_path / "train.py", "0", worker=name) for name in ("a", "c")]
        assert [launch.wait() for launch in again] == [0, 0]
        report = job.report()
    assert (report["outcome"], report["recoverCount"]) == ("succeeded", 1)
    assert {worker["name"] for worker in report["workers"]} == {"a", "c"}


def test_success_and_what_aegisctl_says_of_it(job_of: Callable[..., Job], tmp_path: Path) -> None:
    with job_of() as job:
        assert job.start(tmp_path / "train.py", "0").wait() == 0
        assert job.ctl("report").returncode == 0
        assert job.ctl("replay").returncode == 0
        assert job.ctl("no-such-command").returncode == 2
        assert job.ctl("--job", "another", "status").returncode == 3


@pytest.mark.parametrize(
    ("how", "flags", "code"),
    [("7", (), 1), ("SIGKILL", (), 1), ("7", (PROPAGATE,), 7), ("SIGKILL", (PROPAGATE,), 128 + 9)],
)
def test_failure_is_1_or_the_root_causes_own(
    how: str, flags: tuple[str, ...], code: int, job_of: Callable[..., Job], tmp_path: Path
) -> None:
    with job_of(*flags) as job:
        assert job.start(tmp_path / "train.py", how).wait() == code
        assert job.ctl("status").returncode == 1


@pytest.mark.parametrize(
    ("flags", "code"),
    [pytest.param((), 1, marks=pytest.mark.full), (("--aegis-isolate-exit-code", "67"), 67)],
)
def test_a_refused_node_is_1_or_what_the_flag_says(
    flags: tuple[str, ...], code: int, job_of: Callable[..., Job], tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with job_of("--aegis-state-dir", str(shared), *flags) as job:
        tainted = job.ctl("taint", socket.gethostname(), "--reason", "x", "--state-dir", str(shared))
        assert tainted.returncode == 0, tainted.stderr
        launch = job.start(tmp_path / "train.py", "0")
        assert launch.wait() == code
        assert f"node {socket.gethostname()} is not to be used: x (says " in launch.output


def test_wrong_use_starts_nothing(job_of: Callable[..., Job], tmp_path: Path) -> None:
    with job_of() as job:
        launch = job.start(tmp_path / "no-such-script.py")
        assert launch.wait() == 2
        assert job.run_dir is None


def test_a_signal_is_128_and_its_number(job_of: Callable[..., Job], tmp_path: Path) -> None:
    with job_of() as job:
        launch = job.start(tmp_path / "train.py", "wait")
        job.wait_phase("RunCommand")
        job.wait_ranks(1)
        launch.kill(signal.SIGTERM)
        assert launch.wait() == 128 + signal.SIGTERM
