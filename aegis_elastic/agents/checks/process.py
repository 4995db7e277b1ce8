"""Checks beside the agent's loop: one process, results read as they come, nothing waited for."""

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
    """Start the checks' process; it waits for its request, so it can stand ready long before there is one.

    From the main thread: the checks end with the thread that started them.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "aegis_elastic.checks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(environment),
        # Ctrl-C in a terminal is for the launcher, who ends the checks; their complaint would be noise.
        start_new_session=True,
    )


def end_checks(process: ChecksProcess) -> None:
    """End a checks' process that wasn't asked."""
    process.kill()
    process.wait()
    for file in (process.stdin, process.stdout):
        if file is not None:
            file.close()


def findings_of(results: Iterable[CheckResult]) -> tuple[Finding, ...]:
    """What did not pass, as the machine wants it."""
    return tuple(
        Finding(result.check_type, result.finding or f"{result.check_type}.failed", result.scope)
        for result in results
        if not result.passed
    )


class CheckRun:
    """One run of checks. Register its descriptor; when it is readable call `read`; `done` at the end."""

    def __init__(self, request: CheckRequest, process: ChecksProcess) -> None:
        """Ask a process of `start_checks` or `fork_checks`, which is ours from here on."""
        self.started_s = time.monotonic()
        self.results: list[CheckResult] = []
        self.done = False
        self._wanted = request.checks
        # collective checks have peers: these get the end of theirs
        self._alone = not set(request.checks) & set(TORCH)
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
        """Readable when there are results, or when all are done."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read(self) -> None:
        """Take what has come."""
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
            except msgspec.MsgspecError:  # some library's words; a result that is missing is told at the end
                logger.warning("ignored what the checks' process said: %.200r", line)
        if self._alone and len(self.results) == len(self._wanted):
            self.cancel()  # its own end takes longer than most checks

    def cancel(self) -> None:
        """End it; its own children end with it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self.done = True

    def _end(self) -> None:
        code = self._process.wait()
        answered = {result.check_type for result in self.results}
        for name in self._wanted:
            if name not in answered:
                # Our own failure, not the machine's: said, but nobody is to leave for it.
                said = f"the checks ended with exit code {code} before this one"
                self.results.append(
                    CheckResult(name, False, said, time.time(), 0.0, f"{name}.crashed", "software")
                )
        assert self._process.stdout is not None
        self._process.stdout.close()
        self.done = True
