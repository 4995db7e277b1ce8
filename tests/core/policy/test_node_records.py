"""What is known of nodes beyond one job: who is kept out, until when, and who is taken last."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.core.policy import node_records
from aegis_elastic.core.policy.node_records import (
    ANOMALY,
    HALF_LIFE_S,
    HARDWARE,
    MANUAL,
    SLOW,
    Incident,
    Isolated,
    NodeRecord,
    NodeTaint,
    Standing,
)

NOW = 1_000_000.0
HOUR_S, DAY_S = 3600.0, 86400.0


def broken(until: float = 0.0, time: float = NOW, job: str = "team/job/1") -> NodeTaint:
    return NodeTaint("gpu.missing", HARDWARE, time, job, until)


def planned(until: float = 0.0) -> NodeTaint:
    return NodeTaint("new cables", MANUAL, NOW, "ops", until)


def record(*taints: NodeTaint) -> NodeRecord:
    made = NodeRecord("n1")
    for taint in taints:
        made = node_records.with_taint(made, taint)
    return made


def test_a_clean_node_is_free() -> None:
    assert node_records.judge(record(), NOW).free


def test_an_operators_taint_ends_by_time_and_nothing_follows() -> None:
    out = record(planned(NOW + HOUR_S))
    assert node_records.judge(out, NOW).standing is Standing.TAINTED
    assert node_records.changes_at(out, NOW) == NOW + HOUR_S
    assert node_records.judge(out, NOW + HOUR_S).free
    assert node_records.score(out, NOW) == 0  # a plan is no incident


def test_a_broken_node_does_not_heal_by_waiting() -> None:
    out = record(broken(NOW + DAY_S))
    verdict = node_records.judge(out, NOW + DAY_S)
    assert verdict.standing is Standing.PROBATION
    assert "passing check and burn" in verdict.why
    back = node_records.after_probation(out, NOW + DAY_S, "", "team/job/2", 0.0)
    assert node_records.judge(back, NOW + DAY_S).free
    still = node_records.after_probation(
        out, NOW + DAY_S, "burn: 3 wrong elements", "team/job/2", NOW + 2 * DAY_S
    )
    assert node_records.judge(still, NOW + DAY_S).standing is Standing.TAINTED
    assert "burn: 3 wrong elements" in node_records.judge(still, NOW + DAY_S).why
    assert node_records.judge(still, NOW + 2 * DAY_S).standing is Standing.PROBATION


def test_a_trial_frees_nobody_whose_taint_still_stands() -> None:
    out = record(broken())
    assert node_records.after_probation(out, NOW + DAY_S, "", "job", 0.0) == out


def test_an_operators_untaint_overrides_taint_and_probation() -> None:
    for now in (NOW, NOW + 2 * DAY_S):
        assert node_records.judge(
            node_records.without_taints(record(broken(NOW + DAY_S), planned())), now
        ).free


def test_an_operators_two_hours_do_not_shorten_what_a_check_found() -> None:
    out = record(broken(), planned(NOW + 2 * HOUR_S))
    assert node_records.judge(out, NOW + 3 * HOUR_S).standing is Standing.TAINTED
    assert node_records.judge(out, NOW).taint == broken()


def test_the_same_finding_twice_is_one_incident_also_after_an_untaint() -> None:
    out = record(broken(), broken())
    assert len(out.incidents) == 1 and node_records.score(out, NOW) == 1
    free = node_records.without_taints(out)
    assert node_records.had_taint(free, broken())
    assert not node_records.had_taint(free, broken(time=NOW + 1))


def test_repeat_offenders_are_riskier_for_days() -> None:
    once = record(broken())
    thrice = record(*(broken(time=NOW + day * DAY_S) for day in range(3)))
    later = NOW + 3 * DAY_S
    assert node_records.score(thrice, later) > 2 * node_records.score(once, later) > 0
    assert node_records.score(once, NOW + HALF_LIFE_S) == pytest.approx(0.5)
    assert node_records.score(once, NOW + 10 * HALF_LIFE_S) < 0.001


def test_the_cleanest_comes_first_and_equals_keep_their_order() -> None:
    known = {"bad": record(broken()), "was-bad": record(broken(time=NOW - 9 * DAY_S))}
    assert node_records.least_risky_first(["bad", "new", "was-bad", "other"], known, NOW) == [
        "new",
        "other",
        "was-bad",
        "bad",
    ]


def test_one_noisy_process_is_no_lemon_and_pushes_no_finding_out() -> None:
    out = record(broken())
    for second in range(3000):
        out = node_records.with_incident(out, Incident("memory.leak", ANOMALY, NOW + second, "job"))
    assert node_records.score(out, NOW) < 1.1
    for hour in range(100):
        out = node_records.with_incident(
            out, Incident("memory.leak", ANOMALY, NOW + hour * 2 * HOUR_S, "job")
        )
    assert len(out.incidents) == node_records.INCIDENTS_MAX
    assert node_records.had_taint(node_records.without_taints(out), broken())


def test_a_record_goes_when_nothing_in_it_matters_any_more() -> None:
    out = node_records.without_taints(record(broken()))
    assert not node_records.is_idle(out, NOW)
    assert node_records.is_idle(out, NOW + 30 * DAY_S)
    isolated = msgspec.structs.replace(out, isolated=Isolated("slurm", NOW, "job"))
    assert not node_records.is_idle(isolated, NOW + 30 * DAY_S)


def test_what_others_write_is_made_safe_for_a_terminal() -> None:
    assert (
        node_records.clip("a\x1b[2Jb\n" + "c" * 999) == ("a [2Jb " + "c" * 999)[: node_records.TEXT_CHARS_MAX]
    )
    with pytest.raises(ValueError, match="want one of"):
        NodeTaint("x", "haunted", NOW, "ops")


@given(st.lists(st.tuples(st.floats(0, 30 * DAY_S), st.sampled_from([HARDWARE, SLOW, ANOMALY])), max_size=5))
def test_the_score_does_not_depend_on_who_reports_first(events: list[tuple[float, str]]) -> None:
    """The dumb twin: every incident fades by its own age, in whatever order they become known."""
    incidents = [Incident(f"c{n}", kind, NOW + age, "job") for n, (age, kind) in enumerate(events)]
    end = NOW + 31 * DAY_S
    expected = sum(
        node_records.WEIGHT[each.kind] * 0.5 ** ((end - each.time) / HALF_LIFE_S) for each in incidents
    )
    for order in itertools.islice(itertools.permutations(incidents), 24):
        out = NodeRecord("n1")
        for incident in order:
            out = node_records.with_incident(out, incident)
        assert node_records.score(out, end) == pytest.approx(expected)
