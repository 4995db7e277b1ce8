"""A run of checks beside the agent's loop: results as they come, and one for each check that gave none."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path

from aegis_elastic.agents.checks.process import CheckRun, end_checks, findings_of, start_checks
from aegis_elastic.checks.contract.request import CheckRequest

WAIT_S = 60.0


def _wait(run: CheckRun) -> None:
    while not run.done:
        assert select.select([run], [], [], WAIT_S)[0], "the checks are silent"
        run.read()


def _request(folder: Path, *checks: str) -> CheckRequest:
    return CheckRequest(checks=checks, worker="w", node="n", paths={"checkpoint": str(folder)})


def test_checks_run_and_their_findings_are_what_did_not_pass(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    for folder, passes in ((tmp_path, True), (file, False)):
        run = CheckRun(_request(folder, "io"), start_checks(os.environ))
        _wait(run)
        (result,) = run.results
        assert (result.check_type, result.passed) == ("io", passes), result
        assert [finding.check for finding in findings_of(run.results)] == ([] if passes else ["io"])


def test_checks_that_are_killed_blame_no_hardware(tmp_path: Path) -> None:
    process = start_checks(os.environ)
    process.kill()
    process.wait()
    run = CheckRun(_request(tmp_path, "io", "rdma"), process)
    _wait(run)
    assert [result.finding for result in run.results] == ["io.crashed", "rdma.crashed"]
    assert {finding.scope for finding in findings_of(run.results)} == {"software"}
    assert "before this one" in run.results[0].result


def test_what_a_library_prints_among_the_results_is_ignored(tmp_path: Path) -> None:
    argv = ["sh", "-c", "cat > /dev/null; echo 'lib: warning'; echo '{}'"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    run = CheckRun(_request(tmp_path, "io"), process)
    _wait(run)
    assert [result.finding for result in run.results] == ["io.crashed"]


def test_checks_that_are_not_wanted_any_more_end(tmp_path: Path) -> None:
    requested, waiting = start_checks(os.environ), start_checks(os.environ)
    run = CheckRun(_request(tmp_path, "io"), requested)
    run.cancel()
    end_checks(waiting)
    assert run.done
    assert requested.returncode is not None and waiting.returncode is not None


def test_what_a_terminal_sends_to_the_launcher_does_not_reach_the_checks() -> None:
    waiting = start_checks(os.environ)
    try:
        assert os.getsid(waiting.pid) == waiting.pid
    finally:
        end_checks(waiting)
