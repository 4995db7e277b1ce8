"""One run of checks beside the agent's loop: a process, whose results are read as they come."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping

import msgspec

from aegis_elastic.agents.checks.forked_process import ChecksProcess
from aegis_elastic.checks.contract.budgets import TORCH
from aegis_elastic.checks.contract.request import CheckRequest
from aegis_elastic.core.events import Finding
from aegis_elastic.core.model import CheckResult

logger = logging.getLogger(__name__)

READ_BYTES = 65536


def start_checks(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a checks' process. It waits for its request, so it can be started long before there is one.

    Call it from the main thread: the process ends with the thread that started it.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "aegis_elastic.checks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(environment),
        # Ctrl-C in a terminal is for the launcher, which ends the checks; their traceback would be noise.
        start_new_session=True,
    )


def end_checks(process: ChecksProcess) -> None:
    """End a checks' process that got no request."""
    process.kill()
    process.wait()
    for file in (process.stdin, process.stdout):
        if file is not None:
            file.close()


def findings_of(results: Iterable[CheckResult]) -> tuple[Finding, ...]:
    """The findings of the results that did not pass."""
    return tuple(
        Finding(result.check_type, result.finding or f"{result.check_type}.failed", result.scope)
        for result in results
        if not result.passed
    )


class CheckRun:
    """One run of checks. Wait on its descriptor; when it is readable call `read`, until `done`."""

    def __init__(self, request: CheckRequest, process: ChecksProcess) -> None:
        """Send the request to a process of `start_checks` or `fork_checks`, and own it from here on."""
        self.started_s = time.monotonic()
        self.results: list[CheckResult] = []
        self.done = False
        self._wanted = request.checks
        # a collective check must not be killed while its peers may still talk to it
        self._end_early = not set(request.checks) & set(TORCH)
        self._buffer = b""
        self._process = process
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request))
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # It ended before it read; `read` finds that it gave no results.
        os.set_blocking(self._process.stdout.fileno(), False)

    def fileno(self) -> int:
        """Readable when there are results, or at the end."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read(self) -> None:
        """Read the results so far."""
        try:
            data = os.read(self.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            try:
                self.results.append(msgspec.json.decode(line, type=CheckResult))
            except (
                msgspec.MsgspecError
            ):  # a library's output; results that are missing are made up at the end
                logger.warning("ignored output of the checks' process: %.200r", line)
        if self._end_early and len(self.results) == len(self._wanted):
            self.cancel()  # its regular end takes longer than most checks

    def cancel(self) -> None:
        """Kill it; its children end with it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self.done = True

    def _end(self) -> None:
        code = self._process.wait()
        finished = {result.check_type for result in self.results}
        for name in self._wanted:
            if name not in finished:
                # Our own failure, not the machine's: reported, but no reason for the node to leave.
                text = f"the checks ended with exit code {code} before this one"
                self.results.append(
                    CheckResult(name, False, text, time.time(), 0.0, f"{name}.crashed", "software")
                )
        assert self._process.stdout is not None
        self._process.stdout.close()
        self.done = True
