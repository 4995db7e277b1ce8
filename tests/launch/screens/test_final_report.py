from __future__ import annotations

import io
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Console

from aegis_elastic.core.accounts.report import Report, build
from aegis_elastic.core.model import ErrorNode
from aegis_elastic.launch.screens import final_report, formatting

LINES_MAX = 45


@pytest.fixture
def report(recorded_job: Callable[..., object]) -> Callable[..., Report]:
    def make(**about: int) -> Report:
        recorded = recorded_job("digits", **about)
        return build(recorded.lines, recorded.final)  # type: ignore[attr-defined]

    return make


def test_a_job_with_one_crash_fits_on_one_screen(report: Callable[..., Report]) -> None:
    screen = final_report.text(report(), "digits")
    assert screen.splitlines()[0] == "aegis: job digits succeeded"
    assert "at most 3 restarts, 1 used; 0 reschedules for hardware" in screen
    assert "root cause: rank 1 of w0, exit code 1, ValueError: boom [class process, level 1]" in screen
    assert "consequences: 1 rank (1 x SIGTERM)" in screen
    assert "w0 on node0" in screen and "ranks 0-1" in screen and "retries 1 of 3" in screen
    assert "bootcheck: 2 passed, 0 failed; troubleshoot: 2 passed, 0 failed" in screen
    assert '| File "train.py", line 7, in main: raise ValueError("boom")' in screen
    detect, stop = "0.06 s", "0.02 s"
    assert detect in screen and stop in screen
    assert len(screen.splitlines()) <= LINES_MAX


def test_a_job_that_used_up_its_restarts_says_so_first(report: Callable[..., Report]) -> None:
    screen = final_report.text(report(max_retry=1, crashes=2)).splitlines()
    assert screen[0].startswith("aegis: failed: ")
    assert screen[1].startswith("at most 1 restarts, 1 used")


def test_a_job_without_trouble_has_no_empty_sections(report: Callable[..., Report]) -> None:
    screen = final_report.text(report(crashes=0))
    assert "0 used" in screen
    for title in ("failures", "recovery times", "nodes not to be used"):
        assert title not in screen


def test_a_huge_job_still_fits_on_the_screen(report: Callable[..., Report]) -> None:
    huge = report(workers=100, max_retry=100, crashes=12)
    nodes = tuple(ErrorNode(f"node{n}", "gpu.missing", "hardware", 0.0, "digits") for n in range(20))
    huge = msgspec.structs.replace(huge, error_nodes=nodes)
    screen = final_report.text(huge).splitlines()
    assert len(screen) <= LINES_MAX
    assert any("... 94 more" in line for line in screen)
    assert any("root causes" in line for line in screen)
    assert any(line.startswith("  1 ") for line in screen) and any(
        line.startswith("  13 ") for line in screen
    )


def test_output_of_ranks_cannot_control_the_terminal(report: Callable[..., Report]) -> None:
    bare = report()
    evil = msgspec.structs.replace(
        bare.failures[0],
        last_lines=("[red]not markup[/red] \x1b[2J\x1b]0;title\x07 wiped\r\nfoo",),
        worker="w\x1b0",
    )
    screen = final_report.text(msgspec.structs.replace(bare, failures=(evil,)))
    assert "\x1b" not in screen and "\x07" not in screen
    assert "[red]not markup[/red]" in screen


def test_colours_only_on_a_terminal(report: Callable[..., Report]) -> None:
    file = io.StringIO()
    final_report.show(report(), file=file)
    assert "\x1b[" not in file.getvalue()
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=100)
    with terminal.capture() as capture:
        final_report.show(report(), console=terminal)
    assert "\x1b[" in capture.get()


@pytest.mark.parametrize(
    ("numbers", "text"), [([], "-"), ([3], "3"), ([0, 1, 2, 3, 8], "0-3, 8"), ([5, 4, 1], "1, 4-5")]
)
def test_ranks_are_shown_as_ranges(numbers: list[int], text: str) -> None:
    assert formatting.ranges(numbers) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.064, "0.06 s"), (41.4, "41 s"), (600, "10 min"), (7500, "2 h 05 min")],
)
def test_times_are_short_to_read(seconds: float | None, text: str) -> None:
    assert formatting.duration(seconds) == text


def test_a_success_with_doubts_is_not_celebrated(report: Callable[..., Report]) -> None:
    doubts = tuple(f"w{n}: its tracker can't be read" for n in range(5))
    screen = final_report.text(msgspec.structs.replace(report(), doubts=doubts)).splitlines()
    assert [line for line in screen if "DOUBTFUL SUCCESS" in line] == [
        "DOUBTFUL SUCCESS: w0: its tracker can't be read",
        "DOUBTFUL SUCCESS: w1: its tracker can't be read",
        "DOUBTFUL SUCCESS: and 3 more of this kind",
    ]
