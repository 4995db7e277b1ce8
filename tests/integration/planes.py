"""Shared by tests of the plane's loss: ranks that count steps, and the processes of the plane."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.harness import Job, View, parent_of, wait_for

# A rank that trains until the test says so: no torch, so that a start costs little.
WORKER = """
import os, sys, time
folder, step = sys.argv[1], 0
name = f"{folder}/steps.{os.environ['RANK']}"
while not os.path.exists(f"{folder}/end"):
    step += 1
    with open(f"{name}.{os.getpid()}", "w") as file:
        file.write(str(step))
    os.replace(f"{name}.{os.getpid()}", name)
    time.sleep(0.02)
"""


def write_worker(folder: Path) -> Path:
    """The script of a rank; its argument is the folder of the step files and of `end`, which ends it."""
    script = folder / "train.py"
    script.write_text(WORKER)
    return script


def steps_of(folder: Path, rank: int) -> int:
    """How many steps this rank has made since its last start, 0 before the first."""
    file = folder / f"steps.{rank}"
    return int(file.read_text()) if file.exists() else 0


def plane_processes(job: Job) -> dict[str, int]:
    """`supervisor`, `master`, `nats` -> pid, of those that live."""
    running = {pid: _arguments(pid) for pid in job.processes()}
    # Launchers start a plane process ahead, unused if there is a plane: the real one has a nats-server.
    nats = [pid for pid, arguments in running.items() if arguments and arguments[0].endswith("nats-server")]
    if not nats:
        return {}
    found = {"nats": nats[0], "supervisor": parent_of(nats[0])}
    for pid, arguments in running.items():
        ours = parent_of(pid) == found["supervisor"]
        if ours and len(arguments) > 2 and arguments[2] == "aegis_elastic.control.main":
            found["master"] = pid
    return found


def bus_port(job: Job) -> int:
    """The port of the job's nats-server, which its plane keeps over its lives."""
    assert job.run_dir is not None, "there is no plane yet"
    return int((job.run_dir.parent / "plane" / "nats.port").read_text())


def wait_plane(job: Job) -> View:
    """Wait until the plane that runs now answers `aegisctl status`; returns its answer."""
    seen: View = {}

    def answers() -> bool:
        nonlocal seen
        done = job.ctl("status", "--json")
        seen = json.loads(done.stdout) if done.stdout else {}
        return bool(seen) and seen["plane"].get("pid") == plane_processes(job).get("master", -1)

    wait_for(answers, "a plane that answers")
    return seen


def wait_successor(job: Job, part: str, old: int) -> None:
    """Wait until that part of the plane has another process than `old`."""
    wait_for(lambda: plane_processes(job).get(part, old) != old, f"a new {part}")


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []
