"""The checks' process for the first checks of a node, forked from the launcher instead of started.

The launcher has imported torch anyway, and a bootcheck needs it: a fork right then has it for nothing, where
a new interpreter takes a second or more on the way to the first step. Later checks start a new one: by then
the launcher has threads, which a fork leaves behind in the middle of whatever they do.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from typing import IO, NoReturn, Protocol

from aegis_elastic.checks.contract.child_process import die_with_parent
from aegis_elastic.worker.environment import SECRETS

EXIT_BROKEN = 1
# Of whoever has one of these open a driver is in use, and in a fork of such a process it answers with errors.
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel/")


class ChecksProcess(Protocol):
    """What is asked of a checks' process, as `subprocess.Popen` says of each."""

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class ForkedChecks:
    """A checks' process that was forked; ours to end."""

    def __init__(self, pid: int, requests: int, results: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = os.fdopen(requests, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(results, "rb", buffering=0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        return self._await(os.WNOHANG)

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        code = self._await(0)
        assert code is not None
        return code

    def kill(self) -> None:
        """End it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def discard(self) -> None:
        """End it if it hasn't been asked, and leave no descriptor behind; safe to call at any time."""
        for file in (self.stdin, self.stdout):
            if file is not None:
                file.close()
        self.kill()
        self.wait()

    def _await(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:
                self.returncode = EXIT_BROKEN  # somebody else has reaped it: how it ended is lost
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def fork_checks() -> ForkedChecks | None:
    """Fork one; it waits for its request. None if this process has threads already, or a device: once torch
    was asked how many GPUs there are (`--nproc-per-node auto`), CUDA is initialised, and every check of a
    fork would find it broken. From the main thread: it ends with the thread that forked it."""
    if len(os.listdir("/proc/self/task")) > 1:
        return None
    if any(leads_to.startswith(DEVICES) for leads_to in _open_files().values()):
        return None
    request_reader, request_writer = os.pipe()
    result_reader, result_writer = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _be_checks(parent, request_reader, result_writer)
    os.close(request_reader)
    os.close(result_writer)
    return ForkedChecks(pid, request_writer, result_reader)


def _open_files() -> dict[int, str]:
    """What each descriptor of this process leads to, but for the three standard ones."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {descriptor: leads_to for descriptor, leads_to in found.items() if descriptor > 2}


def _be_checks(parent: int, requests: int, results: int) -> NoReturn:
    code = EXIT_BROKEN
    try:
        die_with_parent(parent)
        os.setsid()
        os.dup2(requests, 0)
        os.dup2(results, 1)
        for descriptor in _open_files():  # one by one: of those that there may be, there may be a billion
            os.close(descriptor)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        for name in SECRETS:
            os.environ.pop(name, None)
        _look_like_checks()
        _get_ready()
        main = importlib.import_module("aegis_elastic.checks.__main__").main
        code = main([])
        sys.stdout.flush()
    finally:
        os._exit(code)


def _look_like_checks() -> None:
    from setproctitle import setproctitle

    setproctitle(f"{sys.executable} -m aegis_elastic.checks")


def _get_ready() -> None:
    import torch

    # as in a process that imports torch for the checks: what forks must have no threads of a math library
    torch.set_num_threads(1)
    try:
        importlib.import_module("aegis_elastic.checks.bootcheck")
    except Exception:  # noqa: BLE001 - whatever an import may do: the check that needs it says so
        return
