"""What a killed guard leaves behind is ended by the launcher; what the launcher runs itself is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.agents.processes import ended

# A launcher with a child of our own and one that leaves behind a helper that ignores SIGTERM.
LAUNCHER = r"""
import os, subprocess, sys
from aegis_elastic.agents.checks import forked_process
from aegis_elastic.agents.guard import orphans
forked_checks = forked_process.fork_checks()
IGNORES = "import os, signal as s; s.signal(s.SIGTERM, s.SIG_IGN); print(os.getpid(), flush=True); s.pause()"
PARENT = (
    "import subprocess, sys\n"
    "helper = [sys.executable, '-S', '-c', sys.argv[1]]\n"
    "started = subprocess.Popen(helper, start_new_session=True, stdout=subprocess.PIPE)\n"
    "print(started.stdout.readline().decode())\n"
)
orphans.adopt()
ours = subprocess.Popen([sys.executable, "-m", "aegis_elastic.checks"], stdin=subprocess.PIPE)
parent = subprocess.run([sys.executable, "-S", "-c", PARENT, IGNORES], stdout=subprocess.PIPE, text=True)
print(int(parent.stdout), ours.pid, flush=True)
sys.stdin.readline()
while b"-m aegis_elastic.checks" not in open(f"/proc/{forked_checks.pid}/cmdline", "rb").read():
    pass
print(orphans.kill(), ours.poll(), forked_checks.poll(), flush=True)
sys.stdin.readline()
forked_checks.discard()
ours.kill()
ours.wait()
"""


def test_leftovers_end_and_our_own_programs_live(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdin is not None and launcher.stdout is not None
    with launcher.stdin, launcher.stdout:
        orphan, ours = (int(pid) for pid in launcher.stdout.readline().split())
        assert Path(f"/proc/{orphan}").exists()
        print(file=launcher.stdin, flush=True)
        assert launcher.stdout.readline() == "[] None None\n", "all orphans have ended, ours live"
        assert ended(orphan)
        assert Path(f"/proc/{ours}").exists()
        print(file=launcher.stdin, flush=True)
        assert launcher.wait(30) == 0
