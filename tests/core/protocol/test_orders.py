"""What all agents are told of a training that hangs: that it does, and nothing to do."""

from __future__ import annotations

import msgspec
import pytest

from aegis_elastic.core.machine import create
from aegis_elastic.core.model import JobSpec, NodeMark, Phase, Status, Verdict
from aegis_elastic.core.protocol.orders import Action, derive_order


def training(*marks: NodeMark, phase: Phase = Phase.RUN_COMMAND) -> Status:
    status = create(JobSpec("job", "default", 2, 1, 3), 1.0)
    return msgspec.structs.replace(status, phase=phase, marks=marks)


def mark(verdict: Verdict) -> NodeMark:
    return NodeMark("n1", "b", verdict, "rank 2 stands at train.py:12", 5.0)


@pytest.mark.parametrize("verdict", [Verdict.FROZEN, Verdict.DESYNC, Verdict.STALLED])
def test_a_hang_is_told_to_all_and_changes_nothing_else_of_the_order(verdict: Verdict) -> None:
    healthy, hanging = derive_order(training()), derive_order(training(mark(Verdict.SLOW), mark(verdict)))
    assert hanging.hanging == f"{verdict.value}: rank 2 stands at train.py:12"
    assert msgspec.structs.replace(hanging, hanging="") == healthy
    assert healthy.action is Action.RUN


@pytest.mark.parametrize("verdict", [Verdict.SLOW, Verdict.UNREACHABLE])
def test_other_marks_are_no_hang(verdict: Verdict) -> None:
    assert derive_order(training(mark(verdict))).hanging == ""


def test_what_is_stopped_hangs_no_more() -> None:
    assert derive_order(training(mark(Verdict.DESYNC), phase=Phase.TROUBLESHOOTING)).hanging == ""
