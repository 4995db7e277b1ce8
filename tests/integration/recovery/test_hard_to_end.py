"""Whole jobs whose ranks don't come down by themselves after a fault, as trainings with NCCL do."""

from __future__ import annotations

from pathlib import Path

from tests.integration.harness import Job

# In the first life rank 1 fails, and its interpreter hangs at its end; rank 0 waits in a call that never
# comes back, so that its handler of SIGTERM is never run.
SCRIPT = """
import ctypes, os, signal, sys
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
def hang(libc=libc, mutex=mutex):
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
class HangsAtItsEnd:
    def __del__(self, hang=hang):
        hang()
if life == 0 and rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    open(sys.argv[1] + "/hangs", "w").close()
    hang()
if life == 0:
    while not os.path.exists(sys.argv[1] + "/hangs"):
        pass
    sys.kept = HangsAtItsEnd()
    raise ValueError("the fault")
"""


def test_a_failed_rank_that_never_ends_and_peers_that_hear_nothing_are_restarted(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    flags = ["--aegis-bootcheck", "env"]
    with Job(tmp_path, nproc=2, flags=flags) as job:
        launch = job.start(path, str(tmp_path))
        assert launch.wait() == 0
        assert job.status()["recoverCount"] == 1
        (failure,) = [entry for entry in job.report()["failures"] if entry["role"] == "root"]
        assert (failure["rank"], failure["exitCode"], failure["exception"]) == (1, 1, "ValueError: the fault")
