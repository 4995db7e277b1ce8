"""The stress test in a process of its own, watched, as a broken card may take it along."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import msgspec

from aegis_elastic.checks.contract.burn_protocol import Progress, Request, Said
from aegis_elastic.core.model import CheckResult

# Before the first word: importing torch, making contexts on all GPUs. Between words it is a second, if all is
# well.
FIRST_WORD_S, SILENCE_S_MAX = 180.0, 60.0
_READ_BYTES = 65536
_COMMAND = (sys.executable, "-m", "aegis_elastic.checks.burn")


def start(request: Request, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start it. In a session of its own: an interrupt at the terminal is for us, who then end it."""
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
        pass  # It ended before it read; `attend` finds that it gave no results.
    return process


def attend(process: subprocess.Popen[bytes], told: Callable[[Progress], None]) -> list[CheckResult]:
    """Listen until it ends, or hangs and is ended; one result for each device, at least one in all."""
    assert process.stdout is not None
    results: list[CheckResult] = []
    started = time.monotonic()
    why = ""
    try:
        why = _listen(process, told, results)
    finally:
        process.kill()
        code = process.wait()
        process.stdout.close()
    if not results or why:
        how = why or f"it ended with {_exit(code)} before it had an answer"
        finding = "burn.timeout" if why else "burn.crashed"
        scope = "hardware" if why else "unknown"
        took = round(time.monotonic() - started, 3)
        results.append(CheckResult("burn", False, f"burn: {how}", time.time(), took, finding, scope))
    return results


def _listen(
    process: subprocess.Popen[bytes], told: Callable[[Progress], None], results: list[CheckResult]
) -> str:
    """Take what it says until it ends; returns why it must be ended, or nothing."""
    assert process.stdout is not None
    buffer, patience_s = b"", FIRST_WORD_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(patience_s):
            data = os.read(process.stdout.fileno(), _READ_BYTES)
            if not data:
                return ""
            patience_s = SILENCE_S_MAX
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                said = msgspec.json.decode(line, type=Said)
                if said.result is not None:
                    results.append(said.result)
                if said.progress is not None:
                    told(said.progress)
    return f"no word in {patience_s:g} s: a device hangs"


def figures(progress: Progress) -> str:
    """How a device fares, in words."""
    heat = "" if progress.temperature_c is None else f", {progress.temperature_c} C"
    wrong = f", {progress.wrong} elements WRONG" if progress.wrong else ""
    return f"{progress.passes} products, {progress.tflops:.2f} TFLOP/s{heat}{wrong}"


def _exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
