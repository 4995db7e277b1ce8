"""The TLA+ models: TLC finds the known defects, and its graph is the machine's. Without Java these fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from proof import jobs, worlds
from proof.tla import conform, models, tlc
from proof.tla.models import Model


def test_tlc_and_the_machine_have_the_same_states_and_labelled_edges() -> None:
    model = conform.model_net(2, 1, 2)
    machine = conform.machine_net(worlds.phases(2, 1))
    assert not conform.compare(model, machine)
    assert len(machine.states) > 2000
    assert len(machine.edges) > 6000

    # The comparison is worth something: one edge altered, relabelled or missing on either side is seen.
    source, label, target = edge = min(machine.edges, key=repr)
    bent = machine._replace(edges=machine.edges - {edge} | {(source, label, source)})
    renamed = machine._replace(edges=machine.edges - {edge} | {(source, label + "?", target)})
    for wrong in (bent, renamed):
        difference = conform.compare(model, wrong)
        assert len(difference.only_model) == 1
        assert len(difference.only_machine) == 1
    assert len(conform.compare(model._replace(edges=model.edges - {edge}), machine).only_machine) == 1


@pytest.mark.full
@pytest.mark.parametrize("rare", worlds.RARE)
def test_so_they_have_where_holds_and_level_two_happen(rare: str) -> None:
    row = jobs.conformance(2, 0, 1, (rare,))
    assert row.ok, row.detail


@pytest.mark.parametrize("module", ["Phases", "Messages", "Nodes"])
def test_a_known_defect_is_caught(module: str) -> None:
    known = (*models.PHASES, *models.MESSAGES, *models.NODES)
    row = jobs.model(next(one for one in known if one.kind == "defect" and one.module == module))
    assert row.ok, row.detail


def test_a_defect_that_is_not_caught_is_a_miss() -> None:
    harmless = Model(
        "nothing wrong",
        "Phases",
        "defect",
        models.phases_constants(2, 0, 1),
        ("ValidPhase",),
        (),
        "ValidPhase",
    )
    row = jobs.model(harmless)
    assert not row.ok
    assert row.result == "NOT caught"


@pytest.mark.parametrize("module", ["Phases", "Messages", "Nodes"])
def test_the_translation_is_what_the_plus_cal_says(module: str) -> None:
    assert tlc.translate(module) == (tlc.SPEC / f"{module}.tla").read_text(encoding="utf-8")


def test_every_config_is_of_one_of_the_four_kinds_and_each_module_has_all_of_them() -> None:
    for module in (models.PHASES, models.MESSAGES, models.NODES):
        assert {one.kind for one in module} == {"safety", "liveness", "witness", "defect"}


def test_without_java_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(tlc.ToolMissing, match="there is no `java`"):
        tlc.java()
    row = jobs.Job(jobs.translation, ("Phases",)).run()
    assert not row.ok
    assert "java" in row.detail
