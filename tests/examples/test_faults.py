"""The example under aegis-run: whatever happens on the way, it ends as if nothing had."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.harness import Job

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
ARGUMENTS = ["--steps", "60", "--save-every", "10", "--step-time-s", "0.1", "--checkpoint-dir"]
FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")


def result_of(output: str) -> dict[str, str]:
    """The last accuracy and digest that the training printed."""
    return dict(re.findall(r"^(accuracy|digest) (\S+)", output, flags=re.MULTILINE))


def test_through_a_kill_and_an_exception_to_the_same_parameters_bit_for_bit(tmp_path: Path) -> None:
    script, saboteur = EXAMPLES / "train_digits.py", {"PYTHONPATH": str(EXAMPLES / "saboteur")}
    with (
        Job(tmp_path / "calm", "calm", nproc=2, flags=FLAGS) as calm,
        Job(tmp_path / "struck", "struck", nproc=2, flags=FLAGS, env=saboteur) as struck,
    ):
        undisturbed = calm.start(script, *ARGUMENTS, str(tmp_path / "calm-checkpoints"))
        disturbed = struck.start(script, *ARGUMENTS, str(tmp_path / "struck-checkpoints"))
        for line, rank, signum in (("step 20:", 1, signal.SIGKILL), ("step 40:", 0, signal.SIGUSR1)):
            disturbed.wait_output(line)
            os.kill(struck.ranks()[rank].pid, signum)
        assert (undisturbed.wait(), disturbed.wait()) == (0, 0)

        result = result_of(disturbed.output)
        assert result == result_of(undisturbed.output)
        assert len(result["digest"]) == 64
        report = struck.report()
        assert report["recoverCount"] == 2
        assert "at most 3 restarts, 2 used" in report["summary"]
        roots = [
            (entry["rank"], entry["signal"], entry["exception"])
            for entry in report["failures"]
            if entry["role"] == "root"
        ]
        assert roots == [(1, "SIGKILL", None), (0, None, "RuntimeError: injected by the demo")]
        assert not calm.report()["failures"]


@pytest.mark.full
def test_the_demo_trains_well_and_equals_an_undisturbed_torchrun(tmp_path: Path) -> None:
    quiet = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", *command]
        return subprocess.run(argv, cwd=EXAMPLES.parent, env=quiet, capture_output=True, text=True)

    demo = run("examples.demo")
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "at most 3 restarts, 2 used; 0 reschedules for hardware" in demo.stdout
    assert re.search(r"root cause: rank 2 of .*, SIGKILL", demo.stdout)
    assert re.search(r"root cause: rank 1 of .*RuntimeError: injected by the demo", demo.stdout)
    assert "processes left behind: none" in demo.stdout
    training = [str(EXAMPLES / "train_digits.py"), "--checkpoint-dir", str(tmp_path / "calm")]
    calm = run("torch.distributed.run", "--standalone", "--nproc-per-node", "4", *training)
    assert result_of(demo.stdout) == result_of(calm.stdout)
    assert float(result_of(demo.stdout)["accuracy"]) > 0.9
