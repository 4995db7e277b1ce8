"""One training as a batch job of the real Slurm of `tests.slurm.cluster`, and its results.

    with Cluster(tmp_path) as slurm:
        job = BatchJob(slurm, nodes=3, training_nodes="2")
        job.wait_step(3)
        slurm.power_off(job.host_of_rank(1))
        ended = job.wait()
        assert ended["JobState"] == "COMPLETED"

The training counts steps and logs each of them; it resumes at the step in its one checkpoint file.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aegis_elastic.core.accounts import journal
from tests.slurm.cluster import Cluster

PATIENCE_S = 150.0
AEGISCTL = str(Path(sys.executable).parent / "aegisctl")
_MARK = "AEGIS_TEST_BATCH"
_POLL_S = 0.05  # between two reads of a file

TRAIN = """\
import os, pathlib, signal, socket, sys, time
import torch
import torch.distributed as dist

steps, pause_s, saved = int(sys.argv[1]), float(sys.argv[2]), pathlib.Path(sys.argv[3])


log = open(saved.with_suffix(".log"), "a", buffering=1)


def log_line(*parts):
    # srun's own output is lost with its node; this file isn't.
    print(time.time(), socket.gethostname(), *parts, file=log)


def on_signal(number, frame):
    log_line("signal", signal.Signals(number).name)
    if number == signal.SIGTERM:
        sys.exit(143)


for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, on_signal)
dist.init_process_group("gloo")
step = torch.tensor([int(saved.read_text()) if saved.exists() else 0])
dist.broadcast(step, 0)
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
log_line("init rank", dist.get_rank(), "of", dist.get_world_size(), "start", life, "pid", os.getpid())
for number in range(int(step), steps):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    time.sleep(pause_s)
    if dist.get_rank() == 0:
        new = saved.with_suffix(".new")
        new.write_text(str(number + 1))
        new.replace(saved)
        log_line("step", number + 1)
dist.destroy_process_group()
log_line("done")
"""

_SCRIPT = """\
#!/bin/bash
export GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
{before}
srun --no-kill --kill-on-bad-exit=0 --wait=0 --label {srun} {launcher} {train}
code=$?
echo "srun: $code"
exit $code
"""


class BatchJob:
    """One submitted job. `training_nodes` (an --nnodes) of its `nodes` train, the others wait as spares."""

    def __init__(
        self,
        slurm: Cluster,
        *,
        nodes: int,
        training_nodes: str,
        steps: int = 40,
        pause_s: float = 0.1,
        flags: Sequence[str] = (),
        options: Sequence[str] = (),
        before: str = "",
        launcher: str = "",
        wrap: str = "",
        name: str = "train",
    ) -> None:
        """`options` are sbatch's. `launcher`: another command line than aegis-run's, for comparison; `wrap`
        stands before it.
        """
        self.slurm = slurm
        self.output = slurm.root / f"{name}.txt"
        self._log = slurm.root / f"{name}.log"
        self.state = slurm.root / "state-home"
        train = slurm.root / "train.py"
        train.write_text(TRAIN)
        own = [
            "aegis-run",
            "--nnodes",
            training_nodes,
            "--nproc-per-node",
            "1",
            "--aegis-bootcheck",
            "env",
            *flags,
        ]
        script = _SCRIPT.format(
            before=before,
            srun="-N $SLURM_JOB_NUM_NODES -n $SLURM_JOB_NUM_NODES",
            launcher=f"{wrap} {launcher or ' '.join(own)}",
            train=f"{train} {steps} {pause_s} {slurm.root}/{name}.step",
        )
        path = f"{Path(sys.executable).parent}:{slurm.env['PATH']}"
        self._mark = uuid.uuid4().hex
        env = {"PATH": path, "XDG_STATE_HOME": str(self.state), "AEGIS_WARM_SPARES": "off"}
        env[_MARK] = self._mark
        given = [f"--nodes={nodes}", "--no-kill", f"--output={self.output}", "--open-mode=append", *options]
        self.number = slurm.submit(script, *given, env=env)

    # ------------------------------------------------------------ its output

    @property
    def log_text(self) -> str:
        """Everything that launchers and ranks have written so far."""
        files = (self.output, self._log)
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    def wait_for(self, found: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        """Wait until `found()` is true; returns it. AssertionError with the output."""
        pause, until = threading.Event(), time.monotonic() + timeout_s
        while not (result := found()):
            assert time.monotonic() < until, f"no {what} in {timeout_s:.0f} s:\n{self.log_text}"
            pause.wait(_POLL_S)
        return result

    def wait_logged(self, pattern: str, count: int = 1) -> list[Any]:
        """Wait until `pattern` has matched `count` times in the output."""
        seen: list[Any] = self.wait_for(
            lambda: found if len(found := re.findall(pattern, self.log_text)) >= count else None,
            repr(pattern),
        )
        return seen

    def wait_step(self, step: int) -> None:
        """Wait until that step has been made."""
        self.wait_logged(rf"step {step}\b")

    def starts(self) -> list[tuple[float, str, int, int, int, int]]:
        """Every start of a rank: wall time, host, rank, world size, restart count, pid."""
        lines = re.findall(
            r"([0-9.]+) (\S+) init rank (\d+) of (\d+) start (\d+) pid (\d+)", self.log_text
        )  # fmt: skip
        return [(float(t), host, int(r), int(w), int(n), int(pid)) for t, host, r, w, n, pid in lines]

    def host_of(self, rank: int) -> str:
        """Where that rank was started last."""
        return [host for _, host, number, *_ in self.starts() if number == rank][-1]

    def pid_of(self, rank: int) -> int:
        """Its process id, which is the machine's own."""
        return [pid for _, _, number, _, _, pid in self.starts() if number == rank][-1]

    def processes(self) -> dict[int, str]:
        """Everything that lives and was started for this job, however indirectly: pid and command line."""
        mark, found = f"{_MARK}={self._mark}".encode(), {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = command
            except OSError:
                continue  # it has ended meanwhile
        return found

    def wait_gone(self, timeout_s: float = 15.0) -> None:
        """Wait until nothing that was started for this job lives any more."""
        self.wait_for(lambda: not self.processes(), f"end of all: {self.processes()}", timeout_s)

    def ctl(self, *arguments: str) -> Any:
        """What `aegisctl` prints of the job on the host for commands, which is none of its nodes."""
        argv = ["env", f"XDG_STATE_HOME={self.state}", AEGISCTL, "--job", str(self.number), *arguments]
        done = self.slurm.command(argv)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    # ------------------------------------------------------------ its end

    def wait(self, timeout_s: float = PATIENCE_S) -> dict[str, str]:
        """Wait for the job's end; returns what scontrol shows of it. AssertionError with the output."""
        try:
            return self.slurm.wait(self.number, timeout_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.log_text}") from None

    def run_dir(self, generation: int = 1) -> Path:
        """Where the journal is."""
        return self.state / "aegis" / "default" / str(self.number) / str(generation)

    def report(self, generation: int = 1) -> dict[str, Any]:
        """The report of an ended job."""
        report: dict[str, Any] = json.loads((self.run_dir(generation) / "report.json").read_text())
        return report

    def summary(self, shown: dict[str, str]) -> str:
        """State, exit code, counts and recovery times, on one line."""
        summary = f"{shown['JobState']} {shown['ExitCode']}, {len(self.starts())} starts of ranks"
        if (self.run_dir() / "report.json").exists():
            report = self.report()
            times = ", ".join(f"{recovery['total_s']:.1f} s" for recovery in report["recoveries"])
            summary += f", counted {report['recoverCount']}, recoveries {times or 'none'}"
        return summary

    def replays(self, generation: int = 1) -> None:
        """Assert that the journal replays."""
        result = journal.replay(journal.read(self.run_dir(generation) / "journal.jsonl"))
        assert result.ok, result.first_difference
