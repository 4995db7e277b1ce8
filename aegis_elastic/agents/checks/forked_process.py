"""The process for the first checks of a node, forked from the launcher instead of started.

The launcher has imported torch anyway, and a bootcheck needs it: a fork has it for free, where a new
interpreter delays the first step by a second or more. Later checks start a new process: by then the launcher
has threads, whose locks a fork would copy in whatever state they are.
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
# A process that has one of these open uses a driver, which answers a fork of that process with errors.
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel/")


class ChecksProcess(Protocol):
    """A checks' process; methods as those of `subprocess.Popen`."""

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
    """A checks' process that was forked; its owner ends it."""

    def __init__(self, pid: int, requests: int, results: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = os.fdopen(requests, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(results, "rb", buffering=0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for its end; returns its exit code."""
        code = self._wait(0)
        assert code is not None
        return code

    def kill(self) -> None:
        """Kill it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def discard(self) -> None:
        """End it if it got no request, and close its descriptors; safe to call at any time."""
        for file in (self.stdin, self.stdout):
            if file is not None:
                file.close()
        self.kill()
        self.wait()

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:
                self.returncode = EXIT_BROKEN  # somebody else has reaped it: its exit code is lost
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def fork_checks() -> ForkedChecks | None:
    """Fork a checks' process, which waits for its request. None if this process has threads, or a device
    open: once torch has counted GPUs (`--nproc-per-node auto`), CUDA is initialised, and checks in a fork
    would find it broken. Call it from the main thread: the fork ends with the thread that made it.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        return None
    if any(target.startswith(DEVICES) for target in _open_files().values()):
        return None
    request_reader, request_writer = os.pipe()
    result_reader, result_writer = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _run_checks(parent, request_reader, result_writer)
    os.close(request_reader)
    os.close(result_writer)
    return ForkedChecks(pid, request_writer, result_reader)


def _open_files() -> dict[int, str]:
    """The target of each descriptor of this process, but for the three standard ones."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {descriptor: target for descriptor, target in found.items() if descriptor > 2}


def _run_checks(parent: int, requests: int, results: int) -> NoReturn:
    code = EXIT_BROKEN
    try:
        die_with_parent(parent)
        os.setsid()
        os.dup2(requests, 0)
        os.dup2(results, 1)
        for descriptor in _open_files():  # one by one: the limit of descriptors may be a billion
            os.close(descriptor)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        for name in SECRETS:
            os.environ.pop(name, None)
        _set_title()
        _import_checks()
        main = importlib.import_module("aegis_elastic.checks.__main__").main
        code = main([])
        sys.stdout.flush()
    finally:
        os._exit(code)


def _set_title() -> None:
    from setproctitle import setproctitle

    setproctitle(f"{sys.executable} -m aegis_elastic.checks")


def _import_checks() -> None:
    import torch

    # as in a process that imports torch for the checks: a process that forks must have no math library's
    # threads
    torch.set_num_threads(1)
    try:
        importlib.import_module("aegis_elastic.checks.bootcheck")
    except Exception:  # noqa: BLE001 - whatever an import raises: the check that needs it reports it
        return
