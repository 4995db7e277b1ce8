"""The stress test in a process of its own, which a broken GPU may crash or hang."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import msgspec

from aegis_elastic.checks.contract.burn_protocol import OutputLine, Progress, Request
from aegis_elastic.core.model import CheckResult

# Before the first message torch is imported and contexts are made on all GPUs. Later there is one each
# second.
FIRST_MESSAGE_S, SILENCE_S_MAX = 180.0, 60.0
_READ_BYTES = 65536
_COMMAND = (sys.executable, "-m", "aegis_elastic.checks.burn")


def start(request: Request, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start it, in a session of its own: an interrupt at the terminal is for this process, which then ends
    it.
    """
    process = subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=dict(environment),
    )
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(request))
        process.stdin.close()
    except BrokenPipeError:
        pass  # It ended before it read; `wait_results` finds that it gave no results.
    return process


def wait_results(
    process: subprocess.Popen[bytes], on_progress: Callable[[Progress], None]
) -> list[CheckResult]:
    """Read its output until it ends, or hangs and is killed; a result for each device, and at least one."""
    assert process.stdout is not None
    results: list[CheckResult] = []
    started = time.monotonic()
    why = ""
    try:
        why = _read_output(process, on_progress, results)
    finally:
        process.kill()
        code = process.wait()
        process.stdout.close()
    if not results or why:
        outcome = why or f"it ended with {_describe_code(code)} before it had an answer"
        finding = "burn.timeout" if why else "burn.crashed"
        scope = "hardware" if why else "unknown"
        took = round(time.monotonic() - started, 3)
        results.append(CheckResult("burn", False, f"burn: {outcome}", time.time(), took, finding, scope))
    return results


def _read_output(
    process: subprocess.Popen[bytes], on_progress: Callable[[Progress], None], results: list[CheckResult]
) -> str:
    """Read its output until it ends; returns why it must be killed, or ""."""
    assert process.stdout is not None
    buffer, timeout_s = b"", FIRST_MESSAGE_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(timeout_s):
            data = os.read(process.stdout.fileno(), _READ_BYTES)
            if not data:
                return ""
            timeout_s = SILENCE_S_MAX
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                message = msgspec.json.decode(line, type=OutputLine)
                if message.result is not None:
                    results.append(message.result)
                if message.progress is not None:
                    on_progress(message.progress)
    return f"no output in {timeout_s:g} s: a device hangs"


def describe_progress(progress: Progress) -> str:
    """The progress of a device, as text."""
    temperature = "" if progress.temperature_c is None else f", {progress.temperature_c} C"
    wrong = f", {progress.wrong} elements WRONG" if progress.wrong else ""
    return f"{progress.passes} products, {progress.tflops:.2f} TFLOP/s{temperature}{wrong}"


def _describe_code(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
