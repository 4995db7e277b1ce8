"""`aegisctl signatures` as people and programs call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

LOG = (
    b"step 1 loss 2.3\n"
    b"RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    b"\xff\xfe 99%|#9|\r100%|##| NVRM: Xid (PCI:0000:04:00): 79, GPU has fallen off the bus.\r\n"
    b"\n"
    b"KeyError: 'no newline at the end'"
)
FIELDS = ["line", "fault_class", "component", "role", "action"]
EXPECTED = [
    [1, None, None, None, "unknown"],
    [2, "cuda_oom", "cuda", "root", "fail_fast"],
    [3, "gpu_lost", "xid", "root", "isolate_node"],
    [4, None, None, None, "unknown"],
    [5, "user_key_error", "python", "root", "fail_fast"],
]


def signatures(*argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "aegis_elastic.launch.ctl.main", "signatures", *argv]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, input=stdin, capture_output=True, env=env)


def test_every_line_of_a_file_or_of_stdin_has_a_result_in_json(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_bytes(LOG)
    for done in (signatures("--json", str(file)), signatures("--json", "-", stdin=LOG)):
        assert (done.returncode, done.stderr) == (0, b"")
        rows = [json.loads(row) for row in done.stdout.splitlines()]
        assert all(list(row) == FIELDS for row in rows)
        assert [list(row.values()) for row in rows] == EXPECTED


def test_people_see_the_lines_that_match() -> None:
    done = signatures("-", stdin=LOG + b"\nKeyError: '\x1b]0;evil\x07'\n")
    shown = done.stdout.decode().splitlines()
    assert done.returncode == 0
    assert [line.split()[:3] for line in shown] == [
        ["2", "fail_fast", "cuda_oom"],
        ["3", "isolate_node", "gpu_lost"],
        ["5", "fail_fast", "user_key_error"],
        ["6", "fail_fast", "user_key_error"],
    ]
    assert "\x1b" not in done.stdout.decode() and "Tried to allocate" in shown[0]


def test_an_empty_log_has_no_results_and_no_file_is_wrong_use(tmp_path: Path) -> None:
    assert signatures("--json", "-").stdout == b""
    for named in (tmp_path, tmp_path / "none.log"):
        done = signatures(str(named))
        assert done.returncode == 2 and f"cannot read {named}:" in done.stderr.decode()
    assert signatures().returncode == 2
