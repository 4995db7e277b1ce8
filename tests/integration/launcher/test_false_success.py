"""Ranks that end with code 0 and have not trained to the end: reported as doubtful."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import Job

pytestmark = pytest.mark.timeout(120)
STANDIN = Path(__file__).parents[1] / "megatron_standin.py"
FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")


@pytest.mark.full
@pytest.mark.parametrize("strict", [False, True], ids=["reported", "strict"])
def test_megatrons_exit_over_an_empty_tracker_is_no_plain_success(tmp_path: Path, strict: bool) -> None:
    """A tracker whose write was cut short makes Megatron exit with 0 before its first step."""
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").touch()
    flags = (*FLAGS, *(["--aegis-strict-success"] if strict else []))
    env = {"PYTHONPATH": str(STANDIN.parents[2])}
    with Job(tmp_path, flags=flags, env=env) as job:
        launch = job.start(STANDIN, "--save", "ckpt", "--load", "ckpt")
        job.wait(lambda view: any("checkpoint.unread" in repr(line) for line in job.journal()), "a warning")
        (tmp_path / "go").touch()
        assert launch.wait() == (1 if strict else 0)
        report = job.report()
        assert report["outcome"] == "succeeded"
        (doubt,) = report["doubts"]
        assert "latest_checkpointed_iteration.txt" in doubt
        assert "DOUBTFUL SUCCESS" in launch.output
