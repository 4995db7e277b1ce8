"""Runs the real process of the checks, as an agent does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
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


def run_checks(request: Mapping[str, Any], env: Mapping[str, str] | None = None) -> dict[str, CheckResult]:
    """All results of one request, by check."""
    return {result.check_type: result for result in results(start(request, env))}


def compile_c(compiler: str, source: Path, target: Path, *options: str) -> Path:
    """`source` compiled to `target` with all warnings on."""
    subprocess.run([compiler, "-Wall", "-Wextra", "-O1", *options, "-o", target, source], check=True)
    return target


# A new interpreter for each of a hundred states would take a minute; the stand-in reads its file anew at
# every call.
_MANY = """
import json, os, sys, msgspec
from aegis_elastic.checks import runner
from aegis_elastic.checks.contract.request import CheckRequest
runner.load()
for line in sys.stdin:
    lines, request = json.loads(line)
    with open(os.environ["FAKE_NVML_STATE"], "w") as file:
        file.writelines(f"{each}\\n" for each in lines)
    for result in runner.run(msgspec.json.decode(json.dumps(request), type=CheckRequest)):
        print(msgspec.json.encode(result).decode(), flush=True)
"""


def run_many(
    requests: Sequence[tuple[Sequence[str], Mapping[str, Any]]], env: Mapping[str, str]
) -> list[CheckResult]:
    """One result for each (lines of the stand-in's file, request for one check), from a single process."""
    done = subprocess.run(
        [sys.executable, "-c", _MANY],
        input="".join(json.dumps(each) + "\n" for each in requests),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stderr
    answers = [msgspec.json.decode(line, type=CheckResult) for line in done.stdout.splitlines()]
    assert len(answers) == len(requests)
    return answers
