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
def report(story: Callable[..., object]) -> Callable[..., Report]:
    def make(**about: int) -> Report:
        told = story("digits", **about)
        return build(told.lines, told.final)  # type: ignore[attr-defined]

    return make


def test_a_job_with_one_crash_is_told_on_one_screen(report: Callable[..., Report]) -> None:
    said = final_report.text(report(), "digits")
    assert said.splitlines()[0] == "aegis: job digits succeeded"
    assert "at most 3 restarts, 1 used; 0 reschedules for hardware" in said
    assert "root cause: rank 1 of w0, exit code 1, ValueError: boom [class process, level 1]" in said
    assert "consequences: 1 rank (1 x SIGTERM)" in said
    assert "w0 on node0" in said and "ranks 0-1" in said and "retries 1 of 3" in said
    assert "bootcheck: 2 passed, 0 failed; troubleshoot: 2 passed, 0 failed" in said
    assert '| File "train.py", line 7, in main: raise ValueError("boom")' in said
    detect, stop = "0.06 s", "0.02 s"
    assert detect in said and stop in said
    assert len(said.splitlines()) <= LINES_MAX


def test_a_job_that_used_up_its_restarts_says_so_first(report: Callable[..., Report]) -> None:
    said = final_report.text(report(max_retry=1, crashes=2)).splitlines()
    assert said[0].startswith("aegis: failed: ")
    assert said[1].startswith("at most 1 restarts, 1 used")


def test_a_job_without_trouble_has_no_empty_sections(report: Callable[..., Report]) -> None:
    said = final_report.text(report(crashes=0))
    assert "0 used" in said
    for title in ("failures", "recovery times", "nodes not to be used"):
        assert title not in said


def test_a_huge_job_still_fits_on_the_screen(report: Callable[..., Report]) -> None:
    huge = report(workers=100, max_retry=100, crashes=12)
    nodes = tuple(ErrorNode(f"node{n}", "gpu.missing", "hardware", 0.0, "digits") for n in range(20))
    huge = msgspec.structs.replace(huge, error_nodes=nodes)
    said = final_report.text(huge).splitlines()
    assert len(said) <= LINES_MAX
    assert any("... 94 more" in line for line in said)
    assert any("root causes" in line for line in said)
    assert any(line.startswith("  1 ") for line in said) and any(line.startswith("  13 ") for line in said)


def test_what_ranks_said_cannot_draw_on_the_terminal(report: Callable[..., Report]) -> None:
    bare = report()
    evil = msgspec.structs.replace(
        bare.failures[0],
        last_lines=("[red]not markup[/red] \x1b[2J\x1b]0;title\x07 wiped\r\nfoo",),
        worker="w\x1b0",
    )
    said = final_report.text(msgspec.structs.replace(bare, failures=(evil,)))
    assert "\x1b" not in said and "\x07" not in said
    assert "[red]not markup[/red]" in said


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
def test_ranks_are_told_as_ranges(numbers: list[int], text: str) -> None:
    assert formatting.ranges(numbers) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.064, "0.06 s"), (41.4, "41 s"), (600, "10 min"), (7500, "2 h 05 min")],
)
def test_times_are_short_to_read(seconds: float | None, text: str) -> None:
    assert formatting.duration(seconds) == text


def test_a_success_with_doubts_is_not_celebrated(report: Callable[..., Report]) -> None:
    doubts = tuple(f"w{n}: its tracker can't be read" for n in range(5))
    said = final_report.text(msgspec.structs.replace(report(), doubts=doubts)).splitlines()
    assert [line for line in said if "DOUBTFUL SUCCESS" in line] == [
        "DOUBTFUL SUCCESS: w0: its tracker can't be read",
        "DOUBTFUL SUCCESS: w1: its tracker can't be read",
        "DOUBTFUL SUCCESS: and 3 more of this kind",
    ]
