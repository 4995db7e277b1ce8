"""The arithmetic of the progress benchmark, and one small run of each of its measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import progress


def test_the_interval_holds_the_median_and_widens_with_few_pairs() -> None:
    median, low, high = progress.interval([float(n) for n in range(15)])
    assert (median, low, high) == (7.0, 3.0, 11.0)
    assert progress.interval([1.0, 2.0, 3.0]) == (2.0, 1.0, 3.0)


@pytest.mark.full
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "progress.json"
    argv = ["--calls", "2000", "--pairs", "2", "--steps", "40", "--json", str(file)]
    assert progress.main(argv) == 0
    found = json.loads(file.read_text())
    assert found["calls"]["median_ns"] < 20_000
    assert len(found["runs"]) == 2
    assert "95 % interval" in capsys.readouterr().out
