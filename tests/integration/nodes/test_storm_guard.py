"""The guard in a running job: a mark that lasts is acted on once, and humans are paged."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from aegis_elastic.core.events import Act, Noted
from tests.integration.harness import Job, stays, wait_for
from tests.integration.trainings import steps_of, write_training
from tests.observe.receiver import receiver

FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off", "--aegis-hang-after-s", "2")
QUICK = ("--aegis-guard-persistence-s", "1.5", "--aegis-guard-look-s", "0.5")
SCRIPT = "import sys, time, pathlib\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\n"


def guard_notes(job: Job) -> list[str]:
    codes = [line.event.code for line in job.journal() if isinstance(line.event, Noted)]
    return [code for code in codes if code.startswith("guard.")]


def acts(job: Job) -> list[Act]:
    return [line.event for line in job.journal() if isinstance(line.event, Act)]


def test_a_mark_that_lasts_is_acted_on_and_humans_hear_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "shared").mkdir()
    with (
        receiver() as received,
        Job(tmp_path, flags=(*FLAGS, *QUICK, "--aegis-state-dir", str(tmp_path / "shared"))) as job,
    ):
        env = {"AEGIS_NOTIFY": received.url}
        launch = job.start(tmp_path / "train.py", str(tmp_path / "end"), worker="w", env=env)
        assert "AEGIS_NOTIFY" not in job.wait_ranks(1)[0].environ
        done = job.ctl("hang", "w", "--reason", "no heartbeat")
        assert done.returncode == 0, done.stderr
        job.wait_phase("RunCommand", 2)
        due, page = received.wait(2)
        assert " (w) is due: frozen, for " in due["message"]
        assert page["urgent"] is False
        assert page["message"].startswith("the restart in place on ")
        assert "incarnation 2 runs" in page["message"]
        [act] = acts(job)
        assert act.reason.startswith("frozen, for "), act.reason
        wait_for(lambda: guard_notes(job).count("guard.page") == 2, "both pages in the journal")
        before, after = (
            ["guard.wait", "guard.anchor", "guard.wait", "guard.page"],
            ["guard.done", "guard.page"],
        )
        assert guard_notes(job) == before + after
        assert job.status()["recoverCount"] == 1, "charged at the action"
        records = sorted(path.name for path in (tmp_path / "shared").rglob("guard.*"))
        assert any(name.endswith(".state") for name in records), records

        # The same again at once is our own doing: the cooldown is on.
        assert job.ctl("hang", "w").returncode == 0
        wait_for(lambda: guard_notes(job)[6:] == ["guard.wait"], "the cooldown")
        stays(lambda: len(acts(job)) == 1, 2.5)
        assert "our own doing" in str([line.reason for line in job.journal()])
        (tmp_path / "end").touch()
        assert launch.wait() == 0
        assert received.url not in launch.output + (job.journal_file or tmp_path).read_text()

        # The recorded run under other policies: the very same one, and one that would have waited.
        (tmp_path / "same.toml").write_text("[guard]\npersistence_s = 1.5\nlook_s = 0.5\n")
        (tmp_path / "calm.toml").write_text("[guard]\npersistence_s = 3600\n")
        run = str(job.run_dir)
        same = job.ctl("replay", run, "--policy", str(tmp_path / "same.toml"))
        assert same.stdout.splitlines()[0].startswith("same    "), same.stdout + same.stderr
        calm = job.ctl("replay", run, "--policy", str(tmp_path / "calm.toml"))
        assert calm.returncode == 1, calm.stdout + calm.stderr
        assert re.match(r"DIFFERS .* marked frozen: acted after \d s; with this policy: nothing", calm.stdout)


@pytest.mark.full
def test_in_shadow_mode_it_only_says_what_it_would_do(tmp_path: Path) -> None:
    settings = "persistence_s = 1\nlook_s = 0.5\nobservations = 1\n"
    (tmp_path / "aegis.toml").write_text(f'mode = "observe"\n[guard]\n{settings}')
    (tmp_path / "train.py").write_text(SCRIPT)
    with receiver() as received, Job(tmp_path, flags=FLAGS) as job:
        flags = ["--aegis-notify", received.url]
        launch = job.start(tmp_path / "train.py", str(tmp_path / "end"), worker="w", flags=flags)
        job.wait_ranks(1)
        assert job.ctl("hang", "w", "--reason", "no heartbeat").returncode == 0
        [page] = received.wait(1)
        assert "is due, but the policy is to observe: frozen, for " in page["message"]
        stays(lambda: not acts(job) and len(received.pages) == 1, 2)
        assert "guard.would_act" in guard_notes(job)
        (tmp_path / "end").touch()
        assert launch.wait() == 0


@pytest.mark.full
def test_a_stopped_rank_is_found_restarted_and_trains_on(tmp_path: Path) -> None:
    with receiver() as received, Job(tmp_path, nproc=2, flags=(*FLAGS, *QUICK)) as job:
        env = {"AEGIS_NOTIFY": received.url}
        launch = job.start(write_training(tmp_path), str(tmp_path), "nothing", "all", "0", "0", env=env)
        ranks = job.wait_ranks(2)
        wait_for(lambda: steps_of(tmp_path) >= 10, "step 10")
        os.kill(ranks[1].pid, signal.SIGSTOP)
        job.wait_phase("RunCommand", 2)
        page = received.wait(2)[0]
        assert "rank 1 is stopped (SIGSTOP)" in page["message"]
        (tmp_path / "end").touch()
        assert launch.wait() == 0
