"""The benchmark of the signatures measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

from aegis_elastic.core.diagnosis.signatures import load
from benchmarks import signatures


def test_the_figures_are_written_down(tmp_path: Path) -> None:
    file = tmp_path / "build" / "signatures.json"
    signatures.main(["--lines", "200", "--runs", "1", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert figures["rules"] == len(load().rules)
    assert all(figures[f"lines_per_s_with_{share:g}_faults"] > 0 for share in signatures.FAULT_SHARES)


def test_the_mixed_log_has_the_faults_that_were_asked_for() -> None:
    def faults(share: float) -> int:
        return sum(load().classify(line) is not None for line in signatures.mixed(400, share))

    assert faults(0.0) == 0
    assert 10 <= faults(0.1) <= 90
    assert faults(1.0) > 350
