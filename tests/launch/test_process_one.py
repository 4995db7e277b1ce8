"""The launcher as process 1 of a container: a PID namespace of its own, as a container runtime makes it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.harness import parent_of, wait_for

SCRIPT = """
import pathlib, signal, subprocess, sys, time
# An orphan of the rank's own, which ends at once: its guard reaps that.
subprocess.run(["sh", "-c", "(sleep 0.01 &)"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path("ready").touch()
time.sleep(600)
"""
FLAGS = ("--aegis-bootcheck", "off", "--aegis-warm-spares", "off", "--aegis-monitor", "off")


class Container:
    """`unshare` with the launcher as its process 1; `init` is that one's pid seen from here."""

    def __init__(self, folder: Path, *flags: str) -> None:
        (folder / "train.py").write_text(SCRIPT)
        launcher = str(Path(sys.executable).parent / "aegis-run")
        self.folder = folder
        self._log = folder / "log"
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc",
                 launcher, *FLAGS, *flags, "train.py"],
                cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), "AEGIS_NODE_NAME": "gpu-7"},
            )  # fmt: skip
        wait_for((folder / "ready").exists, f"ready rank: {self._log.read_text()}")
        (self.init,) = children(self.process.pid)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")


def children(pid: int) -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()
            and parent_of(int(entry.name)) == pid]  # fmt: skip


def zombies(pid: int) -> list[int]:
    found = []
    for child in children(pid):
        try:
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                found.append(child)
        except OSError:
            continue  # reaped meanwhile
    return found


@pytest.fixture
def container(tmp_path: Path, unmet: Callable[[str], None]) -> Iterator[Container]:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        unmet("PID namespaces need root, unshare and nsenter")
    made = Container(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def test_it_reaps_what_others_leave_behind_and_ends_as_the_signal_says(container: Container) -> None:
    # As `kubectl exec` does: a process of the namespace whose own child outlives it, and then ends.
    launcher = children(container.init)
    inside = ["nsenter", "--target", str(container.init), "--pid", "--mount"]
    left = subprocess.run([*inside, "sh", "-c", "sleep 1 &"], capture_output=True, text=True)
    assert left.returncode == 0, left.stderr
    wait_for(lambda: children(container.init) == launcher, "the end of the orphan")
    assert not zombies(container.init)
    (journal,) = container.folder.glob("state/aegis/default/*/1/journal.jsonl")
    assert '"gpu-7"' in journal.read_text()
    os.kill(container.init, signal.SIGTERM)
    assert container.process.wait(60) == 128 + signal.SIGTERM, container.output
    assert "ended by SIGTERM: every rank ended with exit code 0" in container.output


def test_nobody_else_is_forked(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import os\nfrom aegis_elastic.launch import process_one\n"
         "before = os.getpid(); process_one.serve_as_init(); print(before == os.getpid())"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "True\n"
