"""Checks beside the agent's loop: their results as they come, and an honest word when there are none."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path

from aegis_elastic.agents.checks.process import CheckRun, end_checks, findings_of, start_checks
from aegis_elastic.checks.contract.request import CheckRequest

WAIT_S = 60.0


def _run(checker: CheckRun) -> None:
    while not checker.done:
        assert select.select([checker], [], [], WAIT_S)[0], "the checks are silent"
        checker.read()


def _request(folder: Path, *checks: str) -> CheckRequest:
    return CheckRequest(checks=checks, worker="w", node="n", paths={"checkpoint": str(folder)})


def test_checks_run_and_their_findings_are_what_did_not_pass(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    for folder, passes in ((tmp_path, True), (file, False)):
        checker = CheckRun(_request(folder, "io"), start_checks(os.environ))
        _run(checker)
        (result,) = checker.results
        assert (result.check_type, result.passed) == ("io", passes), result
        assert [finding.check for finding in findings_of(checker.results)] == ([] if passes else ["io"])


def test_checks_that_are_killed_blame_nobodys_hardware(tmp_path: Path) -> None:
    process = start_checks(os.environ)
    process.kill()
    process.wait()
    checker = CheckRun(_request(tmp_path, "io", "rdma"), process)
    _run(checker)
    assert [result.finding for result in checker.results] == ["io.crashed", "rdma.crashed"]
    assert {finding.scope for finding in findings_of(checker.results)} == {"software"}
    assert "before this one" in checker.results[0].result


def test_what_a_library_prints_among_the_results_ends_nobody(tmp_path: Path) -> None:
    argv = ["sh", "-c", "cat > /dev/null; echo 'lib: warning'; echo '{}'"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    checker = CheckRun(_request(tmp_path, "io"), process)
    _run(checker)
    assert [result.finding for result in checker.results] == ["io.crashed"]


def test_checks_that_are_not_wanted_any_more_end(tmp_path: Path) -> None:
    asked, waiting = start_checks(os.environ), start_checks(os.environ)
    checker = CheckRun(_request(tmp_path, "io"), asked)
    checker.cancel()
    end_checks(waiting)
    assert checker.done
    assert asked.returncode is not None and waiting.returncode is not None


def test_what_a_terminal_sends_to_the_launcher_does_not_reach_the_checks() -> None:
    waiting = start_checks(os.environ)
    try:
        assert os.getsid(waiting.pid) == waiting.pid
    finally:
        end_checks(waiting)
