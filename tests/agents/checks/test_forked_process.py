"""The fork of the launcher for a node's first checks: as good as a new process, and ready at once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[3]
# In a process of its own, as in the launcher: pytest's has threads, and must not be forked.
HEAD = """
import os, select, sys, time
from pathlib import Path
import torch
from aegis_elastic.agents.checks.process import CheckRun, end_checks
from aegis_elastic.agents.checks.forked_process import fork_checks
from aegis_elastic.checks.contract.request import CheckRequest

def wait(run):
    while not run.done:
        assert select.select([run], [], [], 60)[0], "the checks are silent"
        run.read()

def request(*checks):
    return CheckRequest(checks=checks, worker="w", node="n", paths={})
"""


def launcher(code: str, **more: str) -> str:
    """Its output; it must succeed and print nothing on stderr."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **more}
    argv = [sys.executable, "-c", HEAD + textwrap.dedent(code)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_it_gives_results_as_a_new_process_does_and_has_torch_already() -> None:
    output = launcher(
        """
        secret, held = os.environ["AEGIS_JOIN_SECRET"], open("/dev/null")
        process = fork_checks()
        own = Path(f"/proc/{process.pid}")
        run = CheckRun(request("env", "runtime"), process)
        wait(run)
        print(sorted(result.check_type for result in run.results), all(r.passed for r in run.results))
        (env,) = (r for r in run.results if r.check_type == "env")
        print(env.details["torch"] == torch.__version__, process.poll() is not None, own.exists())
        """,
        AEGIS_JOIN_SECRET="correct horse",
    )
    assert output.split("\n")[:2] == ["['env', 'runtime'] True", "True True False"]


def test_it_has_the_title_of_checks_and_a_session_of_its_own_and_no_descriptor_of_the_launcher() -> None:
    output = launcher(
        """
        reader, writer = os.pipe()
        process = fork_checks()
        own = Path(f"/proc/{process.pid}")
        os.close(writer)
        ended = os.read(reader, 1)  # its end: nobody else has a writer
        until = time.monotonic() + 60
        named = f"{sys.executable} -m aegis_elastic.checks".encode()
        while not (own / "cmdline").read_bytes().startswith(named):
            assert time.monotonic() < until
            time.sleep(0.01)
        print(os.getsid(process.pid) == process.pid, ended)
        end_checks(process)
        print(own.exists(), process.returncode)
        """
    )
    assert output.split("\n")[:2] == ["True b''", "False -9"]


def test_it_ends_with_the_launcher_and_a_process_with_threads_is_not_forked() -> None:
    output = launcher(
        """
        import threading
        print(fork_checks().pid, flush=True)
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        print(fork_checks(), flush=True)
        stop.set()
        os._exit(0)
        """
    )
    pid, threaded = output.split()
    assert threaded == "None"
    cmdline = Path(f"/proc/{pid}/cmdline")
    assert not cmdline.exists() or b"aegis_elastic.checks" not in cmdline.read_bytes()


def test_a_process_with_an_open_device_is_not_forked() -> None:
    output = launcher(
        """
        from aegis_elastic.agents.checks import forked_process
        forked_process.DEVICES = ("/dev/zero",)  # stands for a card's
        process = fork_checks()
        with open("/dev/zero"):
            print(fork_checks())
        end_checks(process)
        print(process.returncode)
        """
    )
    assert output.split() == ["None", "-9"]
