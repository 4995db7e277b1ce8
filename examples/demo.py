"""Trains `train_digits.py` with 4 ranks under aegis-run and kills two of them on the way: `make demo`.

One rank is killed (SIGKILL), another raises an exception, without notice to the training code or aegis-run.
Ends with the training's own result, the report, and whether any process was left behind.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
RANKS = 4
MARK = "AEGIS_DEMO"
# (step, step, rank, signal): at the first step if warm spares are ready, at the second in any case.
FAULTS = [(60, 140, 2, signal.SIGKILL), (180, 280, 1, signal.SIGUSR1)]
SAVED = re.compile(r"step (\d+): .*saved")
TRAINING = [str(HERE / "train_digits.py"), "--steps", "300", "--save-every", "20", "--step-time-s", "0.1"]
LAUNCHER = ["-m", "aegis_elastic.launch.run", "--standalone", "--nproc-per-node", str(RANKS)]


def demo_processes(mark: str) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Every process of this demo (they inherit `mark`) with its environment."""
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue  # ended meanwhile, or another user's
        if environment.get(MARK) == mark and process.pid != os.getpid():
            yield process, environment


def inject_fault(mark: str, rank: int, signum: signal.Signals) -> None:
    """Sends `signum` to the process that trains as `rank` now."""
    for process, environment in demo_processes(mark):
        # What a rank starts has its environment too; the rank itself is the one that leads a session.
        if environment.get("RANK") == str(rank) and os.getsid(process.pid) == process.pid:
            process.send_signal(signum)
            print(f"demo: {signum.name} to rank {rank} (pid {process.pid})", flush=True)
            return
    print(f"demo: rank {rank} is not running, no fault injected", flush=True)


def train(folder: Path, mark: str) -> int:
    """Runs the training, prints its output, injects the faults; returns the exit code of aegis-run."""
    path = os.pathsep.join(filter(None, [str(HERE / "saboteur"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {MARK: mark, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    faults, ready = list(FAULTS), False
    command = [sys.executable, *LAUNCHER, *TRAINING, "--checkpoint-dir", str(folder)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            print(line, end="", flush=True)
            ready = "warm spares ready" in line or (ready and "training starts" not in line)
            saved = SAVED.match(line)
            if saved and faults:
                earliest, latest, rank, signum = faults[0]
                if int(saved[1]) >= (earliest if ready else latest):
                    inject_fault(mark, rank, signum)
                    del faults[0]
    return launcher.returncode


def main() -> int:
    """0 when the training got through both faults and nothing of it is left running."""
    began = time.monotonic()
    mark = str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="aegis-demo-") as folder:
        code = train(Path(folder), mark)
    left = [process.pid for process, _ in demo_processes(mark)]
    print(f"demo: aegis-run ended with {code} after {time.monotonic() - began:.0f} s")
    print(f"demo: processes left behind: {left or 'none'}")
    return 1 if code or left else 0


if __name__ == "__main__":
    sys.exit(main())
