"""After a fault a rank that can't handle the stop signal is not waited for; one that handles it is."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from aegis_elastic.agents.guard.client import GuardClient
from tests.agents.processes import PATIENCE_S, python, rank, wait_files, wait_stopped

HANDLER = """
import signal, sys, threading, time
folder = sys.argv[1]
def handler(*_):
    {handler}
    open(folder + "/handled", "w").write("yes")
    sys.exit(0)
signal.signal(signal.SIGTERM, handler)
open(folder + "/up", "w").close()
{main}
"""
# The kernel takes this wait up again after a signal, and so Python's handler never runs.
STUCK = """
import ctypes
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""
GRACE_S = 20.0


def start(guard: GuardClient, folder: Path, main: str, handler: str = "pass") -> None:
    code = HANDLER.format(handler=handler, main=main)
    guard.spawn(0, [rank(0, *python(code, str(folder)))])
    wait_files(folder / "up")
    time.sleep(0.3)  # into the call in which it waits


def stop(guard: GuardClient, *, wait: bool = False) -> tuple[float, int | None]:
    began_s = time.monotonic()
    guard.stop(GRACE_S, wait_if_ignored=wait, wait_if_blocked=wait)
    exits, _ = wait_stopped(guard)
    return time.monotonic() - began_s, exits[0].signal


def test_a_rank_that_hangs_in_a_call_as_nccl_does_is_not_waited_for(
    guard: GuardClient, tmp_path: Path
) -> None:
    start(guard, tmp_path, STUCK)
    took_s, signum = stop(guard)
    assert signum == signal.SIGKILL
    assert not (tmp_path / "handled").exists()
    assert took_s < GRACE_S / 2


@pytest.mark.parametrize(
    ("main", "handler"),
    [
        # handling it, in one way or another, for much longer than the guard watches
        ("signal.pause()", "time.sleep(0.7)"),
        ("time.sleep(100)", "end = time.monotonic() + 0.7\n    while time.monotonic() < end: pass"),
        ("threading.Event().wait()", "threading.Event().wait(0.7)"),
        # computing, while another call is far from done
        ("end = time.monotonic() + 2\nwhile time.monotonic() < end: sum(range(10**5))", "pass"),
    ],
)
def test_a_rank_that_handles_the_signal_has_the_whole_grace(
    guard: GuardClient, tmp_path: Path, main: str, handler: str
) -> None:
    start(guard, tmp_path, main, handler)
    _, signum = stop(guard)
    assert signum is None
    assert (tmp_path / "handled").read_text() == "yes"


def test_another_thread_that_acts_for_the_main_one_is_waited_for(guard: GuardClient, tmp_path: Path) -> None:
    acts = (
        "def act():\n"
        "    signal.sigwait([signal.SIGTERM])\n"
        "    end = time.monotonic() + 0.7\n"
        "    while time.monotonic() < end: sum(range(10**4))\n"
        "    handler()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "thread = threading.Thread(target=act)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    start(guard, tmp_path, acts)
    stop(guard)
    assert (tmp_path / "handled").exists()


def test_a_grace_that_the_user_asked_for_is_given_to_all(guard: GuardClient, tmp_path: Path) -> None:
    start(guard, tmp_path, STUCK)
    began_s = time.monotonic()
    guard.stop(1.0, wait_if_ignored=False)
    wait_stopped(guard)
    assert 1.0 <= time.monotonic() - began_s < PATIENCE_S
