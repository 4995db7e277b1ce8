"""However a launcher ends, nothing of its job outlives it, and its exit code says what ended it.

The ranks here are hard to end: each has a worker process as a DataLoader has, and a helper in a session of
its own that is deaf to SIGTERM. Leaving a `Job` asserts that nothing of all that runs any more.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

from tests.integration.harness import Job, Launch, wait_for

QUICK = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")
# argv: a folder for its files, and whether it is "deaf" to SIGTERM. On a signal it saves something
# that it needs its worker process for, and says so by a file.
RANK = r"""
import multiprocessing, os, signal, subprocess, sys, time
folder, how = sys.argv[1:3]
name = os.environ["RANK"] + "-" + os.environ["TORCHELASTIC_RESTART_COUNT"]
def write_file(what, text=""):
    with open(f"{folder}/{what}.tmp", "w") as file:
        file.write(text)
    os.rename(f"{folder}/{what}.tmp", f"{folder}/{what}")
def load(pipe):
    while True:
        pipe.send(pipe.recv() * 2)
ours, theirs = multiprocessing.Pipe()
worker = multiprocessing.get_context("fork").Process(target=load, args=(theirs,), daemon=True)
worker.start()
deaf = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('up', flush=True); time.sleep(600)"
helper = subprocess.Popen([sys.executable, "-S", "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
helper.stdout.readline()
def on_signal(signum, frame):
    if how == "deaf":
        return
    ours.send(21)
    if ours.poll(20) and ours.recv() == 42:
        write_file(f"saved-{name}-{signal.Signals(signum).name}")
    if signum not in (signal.SIGUSR1, signal.SIGUSR2):
        os._exit(3)
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, on_signal)
write_file(f"ready-{name}", f"{worker.pid} {helper.pid}")
while not os.path.exists(f"{folder}/end"):
    time.sleep(0.05)
helper.kill()
"""


def _job(folder: Path, *flags: str, nproc: int = 1) -> Job:
    folder.mkdir()
    (folder / "rank.py").write_text(RANK)
    return Job(folder, nproc=nproc, flags=(*QUICK, *flags))


def _start(job: Job, how: str = "willing") -> Launch:
    return job.start("rank.py", str(job.folder), how)


def _wait_ready(job: Job, restart_count: int = 0) -> list[int]:
    """Wait until rank 0 can be signalled; the pids of its worker and its helper."""
    ready = job.folder / f"ready-0-{restart_count}"
    wait_for(ready.exists, f"{ready.name} of {job.launches[0].output}")
    return [int(pid) for pid in ready.read_text().split()]


def _saved(job: Job, name: str) -> bool:
    return (job.folder / f"saved-0-0-{name}").exists()


def test_signals_end_the_launcher_after_its_ranks_have_saved(tmp_path: Path) -> None:
    """TERM, INT, HUP, QUIT: the ranks get it and have their time, their worker processes don't get it.

    KempnerForge#177 (a DataLoader's workers die of the SIGTERM, and the last checkpoint with them),
    pytorch#160908 (the launcher's last lines have the ranks' exit codes).
    """
    signums = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    with ExitStack() as stack:
        jobs = [stack.enter_context(_job(tmp_path / signum.name)) for signum in signums]
        launches = [_start(job) for job in jobs]
        for job, launch, signum in zip(jobs, launches, signums, strict=True):
            _wait_ready(job)
            launch.kill(signum)
        for job, launch, signum in zip(jobs, launches, signums, strict=True):
            assert launch.wait() == 128 + signum, launch.output
            assert _saved(job, signum.name)
            assert f"ended by {signum.name}: rank 0 ended with exit code 3" in launch.output


def test_a_deaf_rank_has_the_shutdown_timeout_or_until_the_second_signal(tmp_path: Path) -> None:
    short = _job(tmp_path / "short", "--shutdown-timeout", "1")
    long = _job(tmp_path / "long", "--shutdown-timeout", "900")
    with short, long:
        launches = [_start(job, "deaf") for job in (short, long)]
        for job, launch in zip((short, long), launches, strict=True):
            _wait_ready(job)
            launch.kill(signal.SIGTERM)
        launches[1].wait_output("900 s to end")
        launches[1].kill(signal.SIGTERM)
        for launch in launches:
            assert launch.wait() == 128 + signal.SIGTERM, launch.output
            assert "ended by SIGTERM: rank 0 ended with signal SIGKILL" in launch.output


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    """NVRx#270: no rank, no helper, no plane."""
    with _job(tmp_path / "job", nproc=2) as job:
        launch = _start(job, "deaf")
        wait_for((job.folder / "ready-1-0").exists, "rank 1")
        _wait_ready(job)
        launch.kill(signal.SIGKILL)
        wait_for(lambda: not job.processes(), "the end of all that was left", 30.0)


def test_a_killed_guard_takes_all_of_its_ranks_with_it_and_is_replaced(tmp_path: Path) -> None:
    with _job(tmp_path / "job") as job:
        launch = _start(job, "deaf")
        family = _wait_ready(job)
        guards = [pid for pid in job.processes() if "guard.py" in _command(pid)]
        assert len(guards) == 1
        os.kill(guards[0], signal.SIGKILL)
        _wait_ready(job, restart_count=1)
        wait_for(lambda: not job.processes().keys() & set(family), "the end of the first ranks' helpers")
        (job.folder / "end").touch()
        assert launch.wait() == 0, launch.output
        report = job.report()
        assert report["recoverCount"] == 1
        assert "guard" in report["failures"][0]["reason"]


def test_a_signal_while_waiting_checking_or_recovering_ends_the_launcher_at_once(tmp_path: Path) -> None:
    """In Pending (a node is missing), in BootChecking, in Troubleshooting: no ranks to wait for."""
    (tmp_path / "train.py").write_text("import sys; sys.exit(7)\n")
    moments = {
        "Pending": ("--nnodes", "2"),
        "BootChecking": ("--aegis-bootcheck", "full"),
        "Troubleshooting": ("--aegis-troubleshoot", "full", "--aegis-bootcheck", "off"),
    }
    for phase, flags in moments.items():
        with Job(tmp_path / phase, flags=flags) as job:
            launch = job.start(tmp_path / "train.py")
            job.wait_phase(phase)
            launch.kill(signal.SIGTERM)
            assert launch.wait() == 128 + signal.SIGTERM, launch.output


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
