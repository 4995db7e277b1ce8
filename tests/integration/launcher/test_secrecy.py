"""The join secret and what it protects: seen where it must be, and nowhere else."""

from __future__ import annotations

import stat
from pathlib import Path

from tests.integration.harness import Job
from tests.integration.planes import plane_processes, write_worker

FLAGS = ("--aegis-bootcheck", "env", "--aegis-troubleshoot", "off")
SECRET = "known to nodes and nobody else"
LOUD = "NO JOIN SECRET"


def test_the_secret_is_in_no_argument_no_rank_no_log_and_no_file_of_others(tmp_path: Path) -> None:
    script = write_worker(tmp_path)
    with Job(tmp_path, nnodes="2", flags=FLAGS, env={"AEGIS_JOIN_SECRET": SECRET}) as job:
        launches = [job.start(script, str(tmp_path), worker=worker) for worker in "ab"]
        job.wait_phase("RunCommand", 1)
        job.wait_ranks(2)
        launchers = {launch.pid for launch in launches}
        assert {*plane_processes(job)} == {"supervisor", "master", "nats"}
        for pid, environ in job.processes().items():
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            assert SECRET not in command
            assert SECRET not in "".join(environ.values()) or pid in launchers, command
        (tmp_path / "end").touch()
        assert [launch.wait() for launch in launches] == [0, 0]
        assert not any(LOUD in launch.output for launch in launches)
    holders = [
        path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert [path.name for path in holders] == ["plane.json"]
    state = tmp_path / "state" / "aegis"
    for path in [state, *state.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode & 0o077 == 0, f"{path} has mode {mode:04o}"
