"""`python -m aegis_elastic.checks` as an agent meets it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from aegis_elastic.checks.contract.budgets import ALL, CHEAP, DEFAULT_BUDGETS_S
from tests.checks.support import COMMAND, ROOT, results, run_checks, start


def test_a_healthy_machine_passes_every_cheap_check(tmp_path: Path) -> None:
    started = time.monotonic()
    found = run_checks({"checks": CHEAP, "paths": {"checkpoint": str(tmp_path), "log": str(tmp_path)}})
    print(f"five cheap checks side by side: {time.monotonic() - started:.3f} s")
    assert set(found) == set(CHEAP)
    assert all(result.passed for result in found.values()), [result.result for result in found.values()]


def test_cheap_checks_import_no_torch() -> None:
    code = "import sys, aegis_elastic.checks.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_check_asked_for_is_an_empty_answer() -> None:
    assert run_checks({"checks": []}) == {}


def test_every_check_has_a_budget() -> None:
    assert set(ALL) == set(DEFAULT_BUDGETS_S)


def test_help_describes_the_protocol() -> None:
    done = subprocess.run([*COMMAND, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "one JSON request on standard input" in done.stdout


def test_a_bad_request_is_refused_with_its_reason() -> None:
    for request, why in [
        ("", "truncated"),
        ('{"checks": ["warp"]}', "no check is called warp"),
        ('{"checks": ["health"]}', "health need a world"),
        ('{"checks": [], "budgetsS": {"io": 0}}', "above 0 s"),
        ('{"checks": [], "expectedGpus": "8"}', "expectedGpus"),
        (
            '{"checks": [], "world": {"groupRank": 2, "groupWorldSize": 2, "rankOffset": 0, "worldSize": 2,'
            '"localWorldSize": 1, "masterAddr": "::1", "masterPort": 1}}',
            "groupRank must be in 0..1 (got 2)",
        ),
    ]:
        done = subprocess.run(COMMAND, input=request, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("cannot run the checks: ")
        assert why in done.stderr
    done = subprocess.run([*COMMAND, "io"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "unexpected argument 'io'" in done.stderr


def test_a_reader_that_goes_away_ends_the_checks_quietly() -> None:
    process = start({"checks": ["rdma", "hang"]})
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(10) == 1


def test_results_arrive_as_checks_end(tmp_path: Path) -> None:
    # The first line is there long before the io check is through with a path that never answers.
    fifo = tmp_path / "fifo"
    subprocess.run(["mkfifo", fifo], check=True)
    request = {"checks": ["io", "rdma"], "paths": {"data": str(fifo)}, "budgetsS": {"io": 2}}
    arriving = results(start(request))
    assert next(arriving).check_type == "rdma"
    early = time.monotonic()
    assert next(arriving).finding == "io.timeout"
    assert time.monotonic() - early > 1
