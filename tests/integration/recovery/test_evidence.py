"""What a failure was, by all the evidence together, and what follows from it, through the real launcher."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from aegis_elastic.core.events import Noted
from tests.checks.conftest import compiler as compiler
from tests.checks.support import compile_c
from tests.integration.harness import Job, wait_for
from tests.integration.recovery.test_two_nodes import Training

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


@pytest.mark.full
def test_without_the_flag_it_is_restarted_like_any_other_and_named(tmp_path: Path) -> None:
    script = tmp_path / "users.py"
    script.write_text(USERS.format(error="ValueError"))
    with Job(tmp_path, max_restarts=1, flags=NO_CHECKS) as job:
        launch = job.start(script)
        assert launch.wait() == 1
        report, notes = job.report(), verdicts(job)
    roots = [failure for failure in report["failures"] if failure["role"] == "root"]
    assert [root["class"] for root in roots] == ["process", "process"]
    assert "an error of the user's own, it seems" in roots[0]["reason"]
    # Its progress is unknown, so it is no repetition without progress.
    place = f"{os.path.realpath(script)}:4 load"
    assert f"the same exception at the same place as before ({place})" in roots[1]["reason"]
    assert "whether training got further in between is unknown" in roots[1]["reason"]
    assert [code for code, _ in notes] == ["verdict.process"]
    assert notes[0][1].startswith("class process, level 1: signature user_value_error")


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


# The same without torch, whose import takes longer than all else: what the stacks show is the same.
STANDS = """
import os, sys, time
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
open(f"{sys.argv[1]}.{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w").close()
wait = "def barrier():\\n    import time\\n    while True: time.sleep(0.01)\\n"
exec(compile(wait, "/usr/lib/site-packages/torch/distributed/distributed_c10d.py", "exec"))
def load_for_ever():
    while True:
        time.sleep(0.01)
if first:
    load_for_ever() if os.environ["RANK"] == "3" else barrier()
"""


@pytest.mark.parametrize(
    "code", [STANDS, pytest.param(STUCK, marks=pytest.mark.full)], ids=["stands", "gloo"]
)
def test_ranks_that_hang_are_checked_before_they_stop_and_the_odd_one_is_named(
    tmp_path: Path, code: str
) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(code)
    with Job(tmp_path, nnodes="2", nproc=2, flags=("--aegis-bootcheck", "off")) as job:
        launches = [job.start(script, str(tmp_path / "in"), worker=name) for name in ("a", "b")]
        job.wait_phase("RunCommand", 1)
        wait_for(lambda: all((tmp_path / f"in.{rank}.0").exists() for rank in range(4)), "four ranks in it")
        stuck = next(launch for launch in launches if 3 in job.ranks(launch))
        # As the guard does after its time, here by hand.
        assert job.ctl("hang", stuck.worker, "--verdict", "desync", "--reason", "no step").returncode == 0
        done = job.ctl("restart", stuck.worker, "--reason", "no step")
        assert done.returncode == 0, done.stderr
        assert [launch.wait() for launch in launches] == [0, 0]
        report, notes = job.report(), verdicts(job)
    ((code, detail),) = notes
    assert code == "verdict.hang"
    assert (
        f"{stuck.worker}: a deadlock: odd one out is rank 3 is at" in detail and "(load_for_ever)" in detail
    )
    looks = [check for check in report["checks"] if check["checkType"] == "hang"]
    assert len(looks) == 2 and all("2 live, none frozen" in check["result"] for check in looks)
    ((root),) = [failure for failure in report["failures"] if failure["role"] == "root"]
    assert (root["worker"], root["class"]) == (stuck.worker, "hang")


# The same sample breaks it at the same step every time.
REPEATS = """
import aegis_elastic
def work(step):
    if step == 5:
        raise RuntimeError(f"sample {step} of {id(step)} can't be used")
for step in range(1, 9):
    aegis_elastic.progress(step)
    work(step)
"""


def test_the_same_error_again_without_progress_is_the_user_s_bug_and_ends_the_job_with_fail_fast(
    tmp_path: Path,
) -> None:
    script = tmp_path / "repeats.py"
    script.write_text(REPEATS)
    with Job(tmp_path, max_restarts=5, flags=(*NO_CHECKS, "--aegis-fail-fast")) as job:
        launch = job.start(script)
        assert launch.wait() == 1
        view, report = job.status(), job.report()
    assert (view["phase"], view["incarnation"], view["recoverCount"]) == ("Failed", 2, 2)
    assert "and training got no further than step 5: the user's error" in report["failReason"]
    roots = [failure for failure in report["failures"] if failure["role"] == "root"]
    assert [root["class"] for root in roots] == ["process", "user bug"]


@pytest.mark.full
def test_which_rank_died_first_is_told_although_a_node_s_clock_is_an_hour_ahead(
    tmp_path: Path, compiler: str
) -> None:
    source = Path(__file__).with_name("skewed_clock.c")
    library = compile_c(compiler, source, tmp_path / "skewed.so", "-shared", "-fPIC", "-ldl")
    with Job(tmp_path, nnodes="2", nproc=1, flags=NO_CHECKS) as job:
        training = Training(job)
        first = training.start("a")
        first.wait_output("run directory")
        env = {"LD_PRELOAD": str(library), "SKEW_S": "3600"}
        second = job.start(training.script, str(tmp_path / "done"), worker="b", env=env)
        job.wait_phase("RunCommand", 1)
        job.wait_ranks(2, restart_count=0)
        ranks = {launch.worker: job.ranks(launch) for launch in (first, second)}
        # Its agent reports late, so the report of the one that dies later comes first.
        second.process.send_signal(signal.SIGSTOP)
        os.kill(next(iter(ranks["b"].values())).pid, signal.SIGKILL)
        time.sleep(0.5)
        os.kill(next(iter(ranks["a"].values())).pid, signal.SIGKILL)
        job.wait_phase("Troubleshooting")
        second.process.send_signal(signal.SIGCONT)
        job.wait_phase("RunCommand", 2)
        training.end(first, second)
        ((_, detail),) = verdicts(job)
        report = job.report()
    (root,) = [failure for failure in report["failures"] if failure["role"] == "root"]
    (other,) = [failure for failure in report["failures"] if failure["role"] == "consequence"]
    assert (root["worker"], other["worker"]) == ("a", "b")
    assert 3590 < other["time"] - root["time"] < 3601, "by the nodes' own clocks b's was an hour later"
    (died,) = re.findall(r"rank \d of b died first, (\S+) to (\S+) s before rank \d of a", detail)
    assert 0.2 < float(died[0]) <= float(died[1]) < 5
    assert "though a's report came first" in detail


# Steps are only counted here. The first time it gets to the fifth; what comes after begins somewhere else.
RESUMES = """
import os, torch
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(1, 9):
    weight.grad = torch.ones(1)
    optimizer.step()
    if step == (5, 3, 3, 9)[life]:
        raise RuntimeError(f"sample {step} can't be used")
"""


@pytest.mark.full
def test_counted_steps_tell_of_no_progress_only_when_the_count_is_the_same(tmp_path: Path) -> None:
    script = tmp_path / "resumes.py"
    script.write_text(RESUMES)
    with Job(tmp_path, max_restarts=5, flags=(*NO_CHECKS, "--aegis-fail-fast")) as job:
        launch = job.start(script)
        assert launch.wait() == 1
        report = job.report()
    roots = [failure for failure in report["failures"] if failure["role"] == "root"]
    assert [root["class"] for root in roots] == ["process", "process", "user bug"]
    assert "whether training got further in between is unknown" in roots[1]["reason"]
    assert job.status()["recoverCount"] == 3


# Its first life finds a checkpoint that was cut off; the second has another.
BROKEN_CHECKPOINT = """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise RuntimeError("PytorchStreamReader failed reading zip archive: failed finding central directory")
"""


@pytest.mark.full
def test_a_checkpoint_that_can_t_be_read_is_said_loudly(tmp_path: Path) -> None:
    script = tmp_path / "resumes.py"
    script.write_text(BROKEN_CHECKPOINT)
    with Job(tmp_path, flags=NO_CHECKS) as job:
        launch = job.start(script)
        assert launch.wait() == 0
        ((code, detail),) = verdicts(job)
        assert code == "verdict.checkpoint" and "RESUME FROM THE CHECKPOINT BEFORE" in detail
        assert "[aegis] THE CHECKPOINT CAN'T BE READ" in launch.output
        assert launch.output.count("RESUME FROM THE CHECKPOINT BEFORE") == 1, "on the screen, too"
