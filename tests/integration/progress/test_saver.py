"""--aegis-saver through the real launcher: apart from the ranks, noted when it ends, never an orphan."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from aegis_elastic.core.events import Noted
from tests.integration.harness import Job, wait_for

pytestmark = pytest.mark.timeout(120)
FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")
TRAIN = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""
SAVER = """
import os, time
print("saver", os.environ["TORCHELASTIC_RUN_ID"], os.getpid(), "RANK" in os.environ, flush=True)
time.sleep(600)
"""


def lives(job: Job) -> list[list[str]]:
    logs = list(job.folder.glob("logs/**/saver.log"))
    text = logs[0].read_text() if logs else ""
    return [line.split()[1:] for line in text.splitlines() if line.startswith("saver ")]


@pytest.mark.full
def test_the_saver_outlives_the_ranks_and_not_the_launcher(tmp_path: Path) -> None:
    train, saver = tmp_path / "train.py", tmp_path / "saver.py"
    train.write_text(TRAIN)
    saver.write_text(SAVER)
    flags = (*FLAGS, "--log-dir", "logs", "--aegis-saver", f"python3 -S '{saver}'")
    with Job(tmp_path, max_restarts=2, flags=flags) as job:
        launch = job.start(train, str(tmp_path / "done"))
        job.wait_phase("RunCommand", 1)
        wait_for(lambda: len(lives(job)) == 1, "a saver")
        run_id, pid, has_rank = lives(job)[0]
        assert (run_id, has_rank) == ("fault-job", "False")
        os.kill(job.wait_ranks(1)[0].pid, signal.SIGKILL)
        job.wait_phase("RunCommand", 2)
        job.wait_ranks(1, restart_count=1)
        assert os.path.exists(f"/proc/{pid}"), "a restart of the ranks is none of its business"

        os.kill(int(pid), signal.SIGKILL)
        wait_for(lambda: len(lives(job)) == 2, "the saver's second life")
        noted = [line.event for line in job.journal() if isinstance(line.event, Noted)]
        assert ["SIGKILL" in event.detail for event in noted if event.code == "saver.ended"] == [True]
        assert job.view()["incarnation"] == 2, "nor is its end the ranks'"
        launch.kill()  # the harness finds whoever outlives it
