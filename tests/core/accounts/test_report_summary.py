"""A report that is too large for a message loses what people look for last."""

from __future__ import annotations

import msgspec
import pytest

from aegis_elastic.core.accounts.report import CheckEntry, FailureEntry, Incarnation, Recovery, Report
from aegis_elastic.core.accounts.report_summary import fit_report
from aegis_elastic.core.accounts.status_view import worker_views
from aegis_elastic.core.diagnosis.attribution import Role
from tests.core.accounts.test_report import Run

ROLES: tuple[tuple[int, Role], ...] = ((0, "root"), (1, "consequence"))
LINES = tuple("x" * 500 for _ in range(20))


def large(failures: int, checks: int, workers: int) -> Report:
    """Of many failures, each a root and its consequence, and many checks that passed but one."""
    entries = [
        FailureEntry(
            "w0", "node0", rank, 1, None, "ValueError: no", LINES, role, "process", 1, "why", float(n)
        )
        for n in range(failures)
        for rank, role in ROLES
    ]
    looks = [
        CheckEntry("w0", "troubleshoot", n, "io", n != 7, "io: fine", 1.0, 0.1, "", "") for n in range(checks)
    ]
    run = Run(workers=workers)
    return Report(
        outcome="failed", phase="Failed", fail_reason="retries used up", max_retry=3, recover_count=4,
        workers=worker_views(run.status),
        incarnations=tuple(Incarnation(n, 1.0, 2.0, "c") for n in range(failures)),
        failures=tuple(entries), recoveries=(Recovery(*[1.0] * 8),) * failures, checks=tuple(looks),
        error_nodes=(), reschedules=0, summary="at most 3 restarts, 4 used",
    )  # fmt: skip


def test_what_fits_is_left_as_it_is() -> None:
    report = large(3, 10, 2)
    assert fit_report(report, 1 << 20) is report


@pytest.mark.parametrize("most", [1 << 20, 1 << 18, 1 << 16, 1 << 13])
def test_what_doesnt_fit_is_cut_until_it_does(most: int) -> None:
    report = large(300, 5000, 4)
    short = fit_report(report, most)
    assert len(msgspec.json.encode(short)) <= most < len(msgspec.json.encode(report))
    assert (short.outcome, short.recover_count, short.fail_reason) == ("failed", 4, "retries used up")
    assert short.failures[-1].role == "root"
    assert "shortened" in short.summary


def test_the_roots_own_words_and_findings_go_later_than_their_peers() -> None:
    short = fit_report(large(60, 100, 2), 800_000)
    assert [entry.role for entry in short.failures[:2]] == ["root", "consequence"]
    assert [bool(entry.last_lines) for entry in short.failures[:2]] == [True, False]
    short = fit_report(large(60, 4000, 2), 800_000)
    assert [check.incarnation for check in short.checks] == [7]
