"""A signal for a rank reaches the rank and the programs that it runs, not its helper processes."""

from __future__ import annotations

import signal
from pathlib import Path

from aegis_elastic.agents.guard.client import GuardClient
from tests.agents.processes import python, rank, wait_files, wait_stopped

# marks that it is up; on SIGTERM it takes a moment, marks that, and ends
SAVER = r"""
import os, signal, sys, time
folder, name = sys.argv[1:3]
def mark(what):
    open(f"{folder}/{what}.tmp", "w").close()
    os.rename(f"{folder}/{what}.tmp", f"{folder}/{what}")
def save(signum, frame):
    time.sleep(0.2)
    mark(name + "-saved")
    os._exit(0)
signal.signal(signal.SIGTERM, save)
mark(name + "-up")
while True:
    signal.pause()
"""
# a helper process that is a fork of its rank, as a DataLoader's worker is, with the signals' default action
FORKED = r"""
import os, signal, sys
ready, done = os.pipe()
helper = os.fork()
if helper == 0:
    os.close(ready)
    signal.pause()
    os._exit(0)
os.close(done)
def save(signum, frame):
    if os.waitid(os.P_PID, helper, os.WEXITED | os.WNOHANG) is None:
        open(sys.argv[1] + "/helper-lives", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, save)
open(sys.argv[1] + "/up", "w").close()
while True:
    signal.pause()
"""


def test_a_wrappers_program_gets_the_signal_and_the_time(tmp_path: Path) -> None:
    """The shell dies of the SIGTERM at once; what it wrapped may still save."""
    guard = GuardClient.start("test")
    try:
        wrapped = ("sh", "-c", '"$@"; true', "sh", *python(SAVER, str(tmp_path), "wrapped"))
        guard.spawn(0, [rank(0, *wrapped)])
        wait_files(tmp_path / "wrapped-up")
        guard.stop(20.0, signal.SIGTERM)
        exits, stopped = wait_stopped(guard)
        assert [ended.signal for ended in exits] == [signal.SIGTERM]
        assert (tmp_path / "wrapped-saved").exists()
        assert stopped.killed == ()
    finally:
        guard.close()


def test_a_helper_process_outlives_the_signal_while_its_rank_saves(tmp_path: Path) -> None:
    guard = GuardClient.start("test")
    try:
        guard.spawn(0, [rank(0, *python(FORKED, str(tmp_path)))])
        wait_files(tmp_path / "up")
        guard.stop(20.0, signal.SIGTERM)
        exits, stopped = wait_stopped(guard)
        assert [ended.exit_code for ended in exits] == [0]
        assert (tmp_path / "helper-lives").exists()
        assert len(stopped.killed) == 1, "the helper is ended with its rank"
    finally:
        guard.close()
