"""The example under stock torchrun: it resumes where it was killed and ends with the very same parameters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 60
ARGUMENTS = ["--steps", str(STEPS), "--save-every", "10"]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += [str(ROOT / "examples" / "train_digits.py"), "--checkpoint-dir", str(folder)]
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen([*command, *ARGUMENTS, *arguments], env=quiet, stdout=subprocess.PIPE, text=True)


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    return output.splitlines()


@pytest.mark.full
def test_a_killed_and_resumed_training_equals_an_undisturbed_one_bit_for_bit(tmp_path: Path) -> None:
    undisturbed = lines_of(start(tmp_path / "undisturbed"))
    assert undisturbed[-1].startswith("digest ")

    killed = start(tmp_path / "killed", "--step-time-s", "0.05")
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("step 30:"):
            break
    killed.send_signal(signal.SIGTERM)
    rest, _ = killed.communicate(timeout=60)
    assert "digest" not in rest

    resumed = lines_of(start(tmp_path / "killed"))
    assert resumed[0].endswith(("from step 30", "from step 40"))
    assert resumed[-1] == undisturbed[-1]
    kept = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert kept == ["latest", "step_000050", "step_000060"]
