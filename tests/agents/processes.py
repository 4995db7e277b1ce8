"""Real processes for tests: ranks, process trees that are hard to kill, and waiting for their ends."""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

from aegis_elastic.agents.guard.client import Event, Exited, GuardClient, RankSpec, Stopped

PATIENCE_S = 30.0
# a family that is hard to kill: own sessions, double forks, ignoring TERM; each writes its pid to a folder
STUBBORN = r"""
import os, signal, sys, time
folder = sys.argv[1]
def live(name):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(f"{folder}/{name}.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/{name}.tmp", f"{folder}/{name}.pid")
    while True:
        signal.pause()
if os.fork() == 0:
    live("child")
if os.fork() == 0:
    os.setsid()
    live("own-session")
middle = os.fork()
if middle == 0:
    os.setsid()
    if os.fork() == 0:
        live("double-forked")
    os._exit(0)
os.waitpid(middle, 0)
live("rank")
"""
FAMILY = ("child", "own-session", "double-forked", "rank")


def python(code: str, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code, *args)


def rank(local_rank: int, *argv: str, stdout: str = "") -> RankSpec:
    return RankSpec(local_rank, argv, dict(os.environ), stdout, "")


def stubborn(local_rank: int, folder: Path) -> RankSpec:
    folder.mkdir(exist_ok=True)
    return rank(local_rank, *python(STUBBORN, str(folder)))


def next_event(guard: GuardClient) -> Event:
    event = guard.wait_event(PATIENCE_S)
    assert event is not None, f"no event from the guard in {PATIENCE_S} s"
    return event


def wait_stopped(guard: GuardClient) -> tuple[list[Exited], Stopped]:
    exits = []
    while not isinstance(event := next_event(guard), Stopped):
        assert isinstance(event, Exited), event
        exits.append(event)
    return exits, event


def wait_files(*paths: Path) -> list[str]:
    deadline_s = time.monotonic() + PATIENCE_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline_s, f"missing of {paths}"
        time.sleep(0.005)
    return [path.read_text() for path in paths]


def wait_family(folder: Path) -> list[int]:
    return [int(text) for text in wait_files(*(folder / f"{name}.pid" for name in FAMILY))]


def ended(pid: int) -> bool:
    """True when `pid` has ended; waits for it (a zombie counts as ended)."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    done = bool(poll.poll(PATIENCE_S * 1000))
    os.close(fd)
    return done


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
