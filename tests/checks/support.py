"""How the tests of the checks ask the real process, as an agent does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from aegis_elastic.core.model import CheckResult

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "aegis_elastic.checks"]


def start(request: Mapping[str, Any], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """The checks' process with `request` on its standard input."""
    process = subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, **(env or {})}
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode())
    process.stdin.close()
    return process


def results(process: subprocess.Popen[bytes]) -> Iterator[CheckResult]:
    """Its results as they come; at the end it must have exited with 0."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            yield msgspec.json.decode(line, type=CheckResult)
    assert process.wait() == 0


def ask(request: Mapping[str, Any], env: Mapping[str, str] | None = None) -> dict[str, CheckResult]:
    """All results of one request, by check."""
    return {result.check_type: result for result in results(start(request, env))}


def compile_c(compiler: str, source: Path, target: Path, *options: str) -> Path:
    """`source` compiled to `target` with all warnings on."""
    subprocess.run([compiler, "-Wall", "-Wextra", "-O1", *options, "-o", target, source], check=True)
    return target
