"""What a failure was, by all the evidence together, and what follows from it, through the real launcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aegis_elastic.core.events import Noted
from tests.integration.harness import Job, wait_for

pytestmark = pytest.mark.timeout(240)
NO_CHECKS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")
# Fails in its first life and in every later one, each time at the same place, with other numbers.
USERS = """
import os, sys
def load(sample):
    raise {error}(f"no sample {{os.getpid()}}")
load(1)
"""


def verdicts(job: Job) -> list[tuple[str, str]]:
    """(code, detail) of what was concluded, as the journal has it."""
    noted = [line.event for line in job.journal() if isinstance(line.event, Noted)]
    return [(event.code, event.detail) for event in noted if event.code.startswith("verdict.")]


def test_with_fail_fast_a_user_s_error_ends_the_job_at_once_and_says_so(tmp_path: Path) -> None:
    script = tmp_path / "users.py"
    script.write_text("import nosuchmodule_of_mine\n")
    with Job(tmp_path, max_restarts=3, flags=(*NO_CHECKS, "--aegis-fail-fast")) as job:
        launch = job.start(script)
        assert launch.wait() == 1
        assert "a user's error, and --aegis-fail-fast: ModuleNotFoundError" in launch.output
        view, report = job.status(), job.report()
    assert (view["phase"], view["recoverCount"], view["incarnation"]) == ("Failed", 1, 1)
    assert "nosuchmodule_of_mine" in report["failReason"]


def test_without_the_flag_it_is_restarted_like_any_other_and_named(tmp_path: Path) -> None:
    script = tmp_path / "users.py"
    script.write_text(USERS.format(error="ValueError"))
    with Job(tmp_path, max_restarts=1, flags=NO_CHECKS) as job:
        launch = job.start(script)
        assert launch.wait() == 1
        report, said = job.report(), verdicts(job)
    roots = [failure for failure in report["failures"] if failure["role"] == "root"]
    assert [root["class"] for root in roots] == ["process", "process"]
    assert "an error of the user's own, it seems" in roots[0]["reason"]
    # Nobody has told how far it got, so nobody calls it a repetition without progress.
    place = f"{os.path.realpath(script)}:4 load"
    assert f"the same exception at the same place as before ({place})" in roots[1]["reason"]
    assert "whether training got further in between is unknown" in roots[1]["reason"]
    assert [code for code, _ in said] == ["verdict.process"]
    assert said[0][1].startswith("class process, level 1: signature user_value_error")


# Ranks that wait for each other, but for one that goes round and round in code of its own.
STUCK = """
import os, sys, time
import torch.distributed as dist
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
dist.init_process_group("gloo")
open(f"{sys.argv[1]}.{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w").close()
def load_for_ever():
    while True:
        time.sleep(0.01)
if first and os.environ["RANK"] == "3":
    load_for_ever()
dist.barrier()
"""


def test_ranks_that_hang_are_looked_at_before_they_stop_and_the_odd_one_is_named(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    flags = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "adaptive")
    with Job(tmp_path, nnodes="2", nproc=2, flags=flags) as job:
        launches = [job.start(script, str(tmp_path / "in"), worker=name) for name in ("a", "b")]
        job.wait_phase("RunCommand", 1)
        wait_for(lambda: all((tmp_path / f"in.{rank}.0").exists() for rank in range(4)), "four ranks in it")
        stuck = next(launch for launch in launches if 3 in job.ranks(launch))
        # As the guard does after its time, here by hand.
        assert job.ctl("hang", stuck.worker, "--verdict", "desync", "--reason", "no step").returncode == 0
        done = job.ctl("restart", stuck.worker, "--reason", "no step")
        assert done.returncode == 0, done.stderr
        assert [launch.wait() for launch in launches] == [0, 0]
        report, said = job.report(), verdicts(job)
    ((code, detail),) = said
    assert code == "verdict.hang"
    assert (
        f"{stuck.worker}: a deadlock: odd one out is rank 3 is at" in detail and "(load_for_ever)" in detail
    )
    looks = [check for check in report["checks"] if check["checkType"] == "hang"]
    assert len(looks) == 2 and all("2 live, none frozen" in check["result"] for check in looks)
    ((root),) = [failure for failure in report["failures"] if failure["role"] == "root"]
    assert (root["worker"], root["class"]) == (stuck.worker, "hang")
