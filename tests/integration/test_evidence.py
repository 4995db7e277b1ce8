"""What a failure was, said by all the evidence together, and what follows from it, through the real launcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aegis_elastic.core.events import Noted
from tests.integration.harness import Job

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
