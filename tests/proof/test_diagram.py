"""The diagram in the documentation is the table's, not somebody's memory of it."""

from __future__ import annotations

from aegis_elastic.core.machine import RULES
from aegis_elastic.core.model import Phase
from proof import diagram


def test_the_files_are_what_the_table_gives() -> None:
    hint = "run python -m proof.diagram"
    assert (diagram.DOCS / "phases.svg").read_text(encoding="utf-8") == diagram.svg(), hint
    assert (diagram.DOCS / "phases.md").read_text(encoding="utf-8") == diagram.table(), hint


def test_every_change_of_phase_in_the_table_has_its_arrow() -> None:
    arrows = diagram.arrows()
    for rule in RULES:
        for source in rule.phases:
            for target in rule.to - {source}:
                assert any(label.startswith(rule.name) for label in arrows[source, target])
    assert all(source not in (Phase.SUCCEED, Phase.FAILED) for source, _ in arrows)
