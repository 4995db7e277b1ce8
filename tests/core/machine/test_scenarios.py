"""The machine told as stories: `scenarios/*.txt`, each with what must come of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.core.machine import scenario


@pytest.mark.parametrize("path", scenario.scenarios(), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    told = path.read_text(encoding="utf-8")
    came = scenario.rewrite(told)
    if os.environ.get("AEGIS_REWRITE") == "1":
        path.write_text(came, encoding="utf-8")
    assert came == told or os.environ.get("AEGIS_REWRITE") == "1"


def test_there_are_scenarios() -> None:
    assert len(scenario.scenarios()) > 10
