"""`aegisctl burn`: the stress test in a process of its own, watched, as a broken card may take it along."""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import subprocess
import sys
import time

import msgspec
from rich.console import Console

from aegis_elastic.checks.burn_words import Request, Said
from aegis_elastic.control.errors import UsageError
from aegis_elastic.core.model import CheckResult
from aegis_elastic.launch.node_screen import Bars, as_json, table

# Before the first word: importing torch, making contexts on all GPUs. Between words it is a second, if all is
# well.
FIRST_WORD_S, SILENCE_S_MAX = 180.0, 60.0
_READ_BYTES = 65536
_COMMAND = (sys.executable, "-m", "aegis_elastic.checks.burn")


def burn_node(args: argparse.Namespace, console: Console) -> int:
    """`aegisctl burn`; returns the exit code."""
    try:
        request = Request(args.minutes * 60, args.size, args.threads)
    except ValueError as error:
        raise UsageError(f"cannot burn: {error}") from error
    node = socket.gethostname()
    results = burn(request, args.json)
    if args.json:
        print(as_json(node, results))
    else:
        console.print(table(node, results))
    return 0 if all(result.passed for result in results) else 1


def burn(request: Request, quiet: bool) -> list[CheckResult]:
    """Load this node as asked; one result for each device, or one that says why there is none."""
    # In a session of its own: an interrupt at the terminal is for us, who then end it.
    process = subprocess.Popen(
        _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    results: list[CheckResult] = []
    started = time.monotonic()
    why = ""
    try:
        process.stdin.write(msgspec.json.encode(request))
        process.stdin.close()
        why = _listen(process, request, quiet, results)
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
    process: subprocess.Popen[bytes], request: Request, quiet: bool, results: list[CheckResult]
) -> str:
    """Take what it says until it ends; returns why it must be ended, or nothing."""
    assert process.stdout is not None
    buffer, patience_s = b"", FIRST_WORD_S
    with Bars(quiet) as bars, selectors.DefaultSelector() as selector:
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
                    bars.show(
                        said.progress.device, request.duration_s, said.progress.elapsed_s, _figures(said)
                    )
    return f"no word in {patience_s:g} s: a device hangs"


def _figures(said: Said) -> str:
    progress = said.progress
    assert progress is not None
    heat = "" if progress.temperature_c is None else f", {progress.temperature_c} C"
    wrong = f", {progress.wrong} elements WRONG" if progress.wrong else ""
    return f"{progress.passes} products, {progress.tflops:.2f} TFLOP/s{heat}{wrong}"


def _exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
