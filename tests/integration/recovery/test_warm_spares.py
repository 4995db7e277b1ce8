"""Whole jobs with warm spares: restarts out of held processes, their accounts, and nothing left behind."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest

from tests.integration.harness import Job, Launch, wait_for

# Each life prints its ids; rank 1 dies in its first lives if a file says so.
SCRIPT = """
import json, os, signal, sys, time
folder, lives = sys.argv[1], int(sys.argv[2])
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(json.dumps({"rank": rank, "life": life, "pid": os.getpid(), "args": sys.argv[2:], "main": __file__}))
open(f"{folder}/{life}-{rank}", "w").write(str(os.getpid()))
while not os.path.exists(f"{folder}/go-{life}"):
    time.sleep(0.01)
if life < lives:
    if rank == 1:
        raise ValueError(f"fault of life {life}")
    signal.pause()
"""
READY = "warm spares ready: "


def script(folder: Path) -> tuple[Path, Path]:
    path, marks = folder / "train.py", folder / "marks"
    path.write_text(SCRIPT)
    marks.mkdir()
    return path, marks


def pids(marks: Path, life: int, ranks: int = 2) -> set[int]:
    files = [marks / f"{life}-{rank}" for rank in range(ranks)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), f"life {life} of all ranks")
    return {int(file.read_text()) for file in files}


def wait_spares(launch: Launch, nth: int) -> None:
    wait_for(lambda: launch.output.count(READY) == nth, f"spares for the start number {nth}")


def test_a_failed_job_goes_on_in_the_processes_that_were_held(tmp_path: Path) -> None:
    path, marks = script(tmp_path)
    flags = ["--aegis-bootcheck", "off", "--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    with Job(tmp_path, nproc=2, env={"AEGIS_WARM_SPARES": "on"}, flags=flags) as job:
        launch = job.start(path, str(marks), "2")
        first = pids(marks, 0)
        for life in (0, 1):
            wait_spares(launch, life + 1)
            held = {pid for pid, env in job.processes().items() if "AEGIS_WORKER_ROOM" in env}
            assert len(held) == 2
            assert len(job.ranks()) == 2, "a spare is no rank"
            (marks / f"go-{life}").touch()
            assert pids(marks, life + 1) == held
            ranks = job.wait_ranks(2, restart_count=life + 1)
            assert {rank.pid for rank in ranks.values()} == held, "they look like ranks from outside"
        assert not held & first
        (marks / "go-2").touch()
        assert launch.wait() == 0
        view = job.status()
        assert (view["phase"], view["recoverCount"], view["incarnation"]) == ("Succeed", 2, 3)
        report = job.report()
        assert [failure["exception"] for failure in report["failures"]] == [
            f"ValueError: fault of life {life}" for life in (0, 1)
        ]
        assert len(report["recoveries"]) == 2
    logs = sorted((tmp_path / "logs").glob("*/attempt_*/1/stdout.log"))
    assert [f'"life": {life}' in log.read_text() for life, log in enumerate(logs)] == [True] * 3


def test_a_second_crash_before_there_are_spares_is_a_cold_start(tmp_path: Path) -> None:
    path, marks = script(tmp_path)
    with Job(tmp_path, nproc=2, env={"AEGIS_WARM_SPARES": "on"}, flags=["--aegis-bootcheck", "off"]) as job:
        launch = job.start(path, str(marks), "2")
        wait_spares(launch, 1)
        for life in range(3):
            pids(marks, life)
            (marks / f"go-{life}").touch()
        assert launch.wait() == 0
        assert job.status()["recoverCount"] == 2


def test_a_node_that_waits_for_a_seat_takes_over_in_processes_that_it_held(tmp_path: Path) -> None:
    path, marks = script(tmp_path)
    flags = ["--aegis-bootcheck", "off"]
    with Job(tmp_path, nnodes="1", nproc=2, env={"AEGIS_WARM_SPARES": "on"}, flags=flags) as job:
        first = job.start(path, str(marks), "0", worker="a")
        pids(marks, 0)
        spare = job.start(path, str(marks), "0", worker="b")
        spare.wait_output(READY)
        held = {pid for pid, env in job.processes().items() if "AEGIS_WORKER_ROOM" in env}
        assert len(job.ranks()) == 2, "nothing of the script has run there"
        first.kill()
        assert pids(marks, 1) <= held
        (marks / "go-1").touch()
        assert spare.wait() == 0


def test_spares_are_gone_when_the_launcher_is_killed(tmp_path: Path) -> None:
    path, marks = script(tmp_path)
    with Job(tmp_path, nproc=1, env={"AEGIS_WARM_SPARES": "on"}, flags=["--aegis-bootcheck", "off"]) as job:
        launch = job.start(path, str(marks), "0")
        launch.wait_output(READY)
        launch.kill()  # leaving the block asserts that nothing of the job is left


@pytest.mark.parametrize(
    "restarts", [15, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_many_restarts_leave_nothing_behind(tmp_path: Path, restarts: int) -> None:
    """Descriptors, processes, files and memory of launcher and plane don't grow, nor does the time."""
    path, marks = script(tmp_path)
    flags = ["--aegis-bootcheck", "off"]
    with Job(tmp_path, nproc=2, max_restarts=restarts + 1, flags=flags) as job:
        launch = job.start(path, str(marks), str(restarts))
        taken, found = [], []
        for life in range(restarts):
            pids(marks, life)
            if life == 3:
                found.append(used(job, launch.pid))
            began_s = time.monotonic()
            (marks / f"go-{life}").touch()
            pids(marks, life + 1)
            taken.append(time.monotonic() - began_s)
        found.append(used(job, launch.pid))
        (marks / f"go-{restarts}").touch()
        assert launch.wait() == 0
        assert job.status()["recoverCount"] == restarts
    tenth = max(restarts // 10, 5)
    first_s, last_s = (statistics.median(part) for part in (taken[:tenth], taken[-tenth:]))
    print(f"median of the first {tenth} restarts {first_s:.3f} s, of the last {last_s:.3f} s, used {found}")
    before, after = found
    assert after["processes"] == before["processes"]
    assert after["descriptors"] <= before["descriptors"] + 4
    assert after["memory MiB"] <= before["memory MiB"] + 8 + restarts // 10
    # Not a timing: a cost that grows with each restart would have multiplied by then.
    assert restarts < 100 or last_s <= 1.5 * first_s


def used(job: Job, launcher: int) -> dict[str, int]:
    """What the job holds now, without its ranks."""
    ranks = {rank.pid for rank in job.ranks().values()}
    # the checks' process of the next failure comes and goes
    ours = [pid for pid, _ in job.processes().items() if pid not in ranks and b"checks" not in command(pid)]
    assert launcher in ours
    return {
        "processes": len(ours),
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in ours),
        "memory MiB": sum(resident_kib(pid) for pid in ours) // 1024,
    }


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def resident_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:"))
