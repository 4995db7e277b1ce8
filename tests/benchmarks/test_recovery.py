"""The figures of the recovery benchmark: parts that add up, and no figure for a recovery that never was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import chart
from benchmarks.launchers import Shape
from benchmarks.rows import Row, as_json, plan, table
from benchmarks.stamps import Parts, Stamp, median_of, parts_of

FIRST_LIFE = [Stamp(1, 0, "fault", 10.0), Stamp(2, 0, "stopped", 10.1), Stamp(3, 0, "stopped", 10.3)]
COLD = {"start": 10.5, "main": 10.6, "imported": 12.0, "group": 12.5, "step": 12.6}
HELD = {"start": 5.0, "main": 10.35, "imported": 10.35, "group": 10.4, "step": 10.5}


def second_life(rank: int, ends: dict[str, float], delay_s: float = 0.0, life: int = 1) -> list[Stamp]:
    return [Stamp(rank, life, what, at + delay_s) for what, at in ends.items()]


def test_each_part_ends_with_the_last_rank_and_all_add_up() -> None:
    parts = parts_of([*FIRST_LIFE, *second_life(0, COLD), *second_life(1, COLD, 0.2)], ranks=2)
    assert parts == pytest.approx((0.1, 0.2, 0.4, 1.5, 0.5, 0.1, 2.8))
    assert sum(parts[:-1]) == pytest.approx(parts.total_s)


def test_processes_held_ready_before_the_fault_begin_with_their_script() -> None:
    parts = parts_of([*FIRST_LIFE, *second_life(0, HELD)], ranks=1)
    assert parts.decide_s == pytest.approx(0.05)
    assert parts.start_s == 0.0
    assert parts.total_s == pytest.approx(0.5)


def test_only_the_last_of_several_faults_counts_and_each_rank_by_its_own_life() -> None:
    again = [
        Stamp(1, 1, "fault", 20.0),
        *second_life(0, COLD, 10.0, life=2),
        *second_life(1, COLD, 10.0, life=5),
    ]
    stamps = [*FIRST_LIFE, *second_life(0, COLD), *second_life(1, COLD), *again]
    assert parts_of(stamps, ranks=2).total_s == pytest.approx(2.6)


def test_a_rank_that_never_came_back_is_an_error_not_a_figure() -> None:
    with pytest.raises(ValueError, match="rank 1 of 2 took no step"):
        parts_of([*FIRST_LIFE, *second_life(0, COLD)], ranks=2)
    with pytest.raises(ValueError, match="no fault"):
        parts_of(second_life(0, COLD), ranks=1)


def test_a_stalled_name_lookup_is_not_averaged_in() -> None:
    quick, slow = Parts(0.1, 0.1, 0, 0.1, 0.1, 0, 0.4), Parts(0.1, 0.1, 0, 0.1, 5.1, 0, 5.4)
    assert slow.stalled
    assert median_of([quick, slow, slow]) == quick
    assert median_of([slow]) == slow, "there is nothing else"


def test_every_row_that_was_asked_for_is_in_the_table_with_its_figures_or_the_reason(tmp_path: Path) -> None:
    shape = Shape(1, 4)
    ours, theirs = Row("aegis-run", "exit", shape), Row("torchrun", "exit", shape)
    missing, never = Row("dlrover", "exit", shape), Row("torchrun", "freeze", shape)
    found = {ours: [Parts(0, 0, 0, 0, 0, 0, 0.2)], theirs: [Parts(0, 0, 0, 0, 0, 0, 4.0)]}
    why = {missing: "cannot install dlrover: no network", never: "not run: it never notices"}
    text = table(found, why, {shape: 0.05})
    assert text.splitlines()[0].startswith("aegis-run exit 1x4: 0.200 s, 20.0 times as fast as torchrun")
    assert "4.0 times the floor" in text
    assert all(reason in text for reason in why.values())
    figures = as_json(found, why, {shape: [0.05]}, quiet=False)
    assert [row["launcher"] for row in figures["rows"]] == ["aegis-run", "torchrun", "dlrover", "torchrun"]
    file, drawn = tmp_path / "recovery.json", tmp_path / "recovery.svg"
    file.write_text(json.dumps(figures))
    chart.main([str(file), str(drawn)])
    picture = drawn.read_text()
    assert picture.startswith("<svg") and "20x" in picture and "cannot install dlrover" in picture


def test_node_faults_are_measured_where_there_are_nodes_and_slow_rows_seldom() -> None:
    rows = plan(["torchrun", "aegis-run"], ["exit", "lost", "deaf"], [Shape(1, 4), Shape(2, 2)], 7)
    assert Row("aegis-run", "lost", Shape(1, 4)) not in rows
    assert rows[Row("aegis-run", "lost", Shape(2, 2))] == 3
    assert (rows[Row("torchrun", "exit", Shape(1, 4))], rows[Row("torchrun", "deaf", Shape(1, 4))]) == (7, 3)
