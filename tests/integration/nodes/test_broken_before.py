"""What once broke under somebody who tried: each with the right behaviour, named by its subject."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aegis_elastic.core.accounts import journal
from tests.integration.harness import Job, wait_for
from tests.integration.planes import plane_processes, wait_plane, wait_successor, write_worker

FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")
BIN = Path(sys.executable).parent

COMPLAINS = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
while not (folder / "end").exists():
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and os.environ["RANK"] == "0" and (folder / "complain").exists():
        raise RuntimeError("Connection closed by peer [127.0.0.1]")
    time.sleep(0.02)
"""

SHOW = """
import json, os, sys
print(json.dumps(dict(os.environ)))
"""


def test_a_job_that_nobody_named_goes_on_when_its_master_is_killed(tmp_path: Path) -> None:
    script = write_worker(tmp_path)
    with Job(tmp_path, flags=(*FLAGS, "--rdzv-id", "none")) as job:
        job.name = f"job-{job.endpoint.rpartition(':')[2]}"
        launch = job.start(script, str(tmp_path))
        job.wait_phase("RunCommand", 1)
        ranks = job.wait_ranks(1, restart_count=0)
        old = plane_processes(job)["master"]
        os.kill(old, signal.SIGKILL)
        wait_successor(job, "master", old)
        wait_plane(job)
        os.kill(ranks[0].pid, signal.SIGKILL)
        job.wait_phase("RunCommand", 2)
        (tmp_path / "end").touch()
        assert launch.wait() == 0
        view = job.status()
        assert (view["phase"], view["generation"], view["recoverCount"]) == ("Succeed", 1, 1)


@pytest.mark.full
def test_several_nodes_that_die_together_and_what_the_rest_says_of_it_are_one_failure(tmp_path: Path) -> None:
    script = tmp_path / "complains.py"
    script.write_text(COMPLAINS)
    with Job(tmp_path, nnodes="3", flags=FLAGS) as job:
        flags = {"a": ["--node-rank", "0"], "b": ["--node-rank", "1"], "c": ["--node-rank", "2"]}
        launches = {
            name: job.start(script, str(tmp_path), worker=name, flags=flags[name]) for name in ("a", "b", "c")
        }
        job.wait_phase("RunCommand", 1)
        job.wait_ranks(3, restart_count=0)
        for name in ("b", "c"):
            launches[name].kill()
        (tmp_path / "complain").touch()
        # While the master can't know yet whether they come back, nobody helps himself.
        job.wait_phase("Restarting", 1)
        for name in ("b", "c"):
            launches[name] = job.start(script, str(tmp_path), worker=name, flags=flags[name])
        view = job.wait_phase("RunCommand", 2)
        assert view["recoverCount"] == 1
        (tmp_path / "end").touch()
        assert {launch.wait() for launch in launches.values()} == {0}
        roots = {entry["worker"] for entry in job.report()["failures"] if entry["role"] == "root"}
        assert roots <= {"b", "c"}


def test_ranks_get_every_variable_of_torchrun_s_and_where_to_tell_of_progress(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    seen = {}
    for launcher in ("torchrun", "aegis-run"):
        argv = [str(BIN / launcher), "--standalone", "--nproc-per-node", "1", str(script)]
        env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "AEGIS_BOOTCHECK": "off"}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
        seen[launcher] = json.loads(done.stdout)
    assert seen["aegis-run"].keys() - seen["torchrun"].keys() == {"AEGIS_PROGRESS"}
    assert seen["aegis-run"].keys() > seen["torchrun"].keys()
    same = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    assert seen["aegis-run"][same] == seen["torchrun"][same]


def test_a_run_directory_that_is_named_again_is_the_new_job_s_and_keeps_the_old_one_s(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "fails_once.py", tmp_path / "run"
    script.write_text("import os, sys\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n")
    argv = [str(BIN / "aegis-run"), "--standalone", *FLAGS, "--aegis-run-dir", str(run_dir), str(script)]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    for _ in range(2):
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
        assert "at most 3 restarts, 1 used" in done.stderr
    for folder in (run_dir, run_dir / "earlier-1"):
        assert journal.replay(journal.read(folder / "journal.jsonl")).ok
        assert len(json.loads((folder / "report.json").read_bytes())["failures"]) == 1


def test_an_interrupted_job_of_one_node_is_over_and_has_used_no_restart(tmp_path: Path) -> None:
    script = write_worker(tmp_path)
    with Job(tmp_path, max_restarts=0, flags=FLAGS) as job:
        for generation in (1, 2):
            launch = job.start(script, str(tmp_path))
            run_dir = str(generation)
            wait_for(lambda: job.run_dir is not None and job.run_dir.name == run_dir, f"run {run_dir}")  # noqa: B023
            wait_for(lambda: bool(job.view()), "a journal")
            job.wait_phase("RunCommand", 1)
            job.wait_ranks(1, restart_count=0)
            launch.kill(signal.SIGINT)
            assert launch.wait() == 128 + signal.SIGINT
            view = job.status()
            assert (view["phase"], view["recoverCount"]) == ("Failed", 0)
            assert "interrupted by SIGINT" in job.report()["failReason"]


def test_an_agent_that_outlives_its_job_takes_part_in_the_next_of_that_name(tmp_path: Path) -> None:
    """The endpoint's node goes with plane and launcher, and a job that nobody named is never continued."""
    script = write_worker(tmp_path)
    with Job(tmp_path, nnodes="2", flags=(*FLAGS, "--rdzv-id", "none")) as job:
        job.name = f"job-{job.endpoint.rpartition(':')[2]}"
        first = job.start(script, str(tmp_path), worker="a", flags=["--node-rank", "0"])
        # As on a host of its own, it can't start the plane again.
        other = job.start(
            script, str(tmp_path), worker="b", flags=["--node-rank", "1", "--aegis-plane-restarts", "0"]
        )
        job.wait_phase("RunCommand", 1)
        job.wait_ranks(2)
        first.kill()
        os.kill(plane_processes(job)["supervisor"], signal.SIGKILL)
        other.wait_output("is not started again")
        again = job.start(script, str(tmp_path), worker="a", flags=["--node-rank", "0"])
        wait_for(lambda: job.run_dir is not None and job.run_dir.name == "2" and bool(job.view()), "run 2")
        job.wait_phase("RunCommand", 1)
        job.wait_ranks(2, restart_count=0)
        (tmp_path / "end").touch()
        assert {again.wait(), other.wait()} == {0}
        assert job.status()["recoverCount"] == 0
