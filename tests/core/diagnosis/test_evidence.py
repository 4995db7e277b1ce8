"""All evidence of a failure weighed together: class, level and the reason as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.core.detection.stacks import Frame, pack
from aegis_elastic.core.diagnosis import evidence
from aegis_elastic.core.diagnosis.clocks import Bounds
from aegis_elastic.core.diagnosis.evidence import (
    FAULT_CLASSES,
    Conclusion,
    EarlierFailure,
    FailureEvidence,
    WorkerEvidence,
    conclude,
    fingerprint_of,
    user_error,
)
from aegis_elastic.core.diagnosis.signatures import load
from aegis_elastic.core.events import Finding
from aegis_elastic.core.model import Failure

CHEAP = ("io", "gpu", "runtime", "rdma", "hang")
KINDS = Path(__file__).with_name("signature_lines.jsonl")
EXACT = Bounds(-0.002, 0.002)


def died(rank: int = 0, time: float = 10.0, **how: object) -> Failure:
    how = how or {"exit_code": 1, "exception": "MyError: of our own", "frame": "train.py:7 step"}
    return Failure(rank, rank, time, **how)  # type: ignore[arg-type]


def seen_on(worker: str, *failures: Failure, **more: object) -> WorkerEvidence:
    return WorkerEvidence(worker, f"node-{worker}", failures, **{"checked": CHEAP, **more})  # type: ignore[arg-type]


def conclusion_of(*sources: WorkerEvidence, **more: object) -> Conclusion:
    return conclude(FailureEvidence(sources[0].worker, sources, **more))  # type: ignore[arg-type]


def found(check: str, code: str, scope: str) -> dict[str, tuple[Finding, ...]]:
    return {"findings": (Finding(check, code, scope),)}


def wrote(line: str) -> Failure:
    return died(exit_code=1, last_lines=(line,))


# ------------------------------------------------------------ what it was


@pytest.mark.parametrize(
    ("sources", "fault_class", "level", "worker", "expected"),
    [
        pytest.param(
            [seen_on("w0", died())], "process", 1, "w0", "every check passed", id="a plain crash"),
        pytest.param(
            [seen_on("w0", died(), checked=())], "process", 1, "w0", "nothing was checked", id="no checks"),
        pytest.param(
            [seen_on("w0", died(exit_code=1), reason="")], "process", 1, "w0", "every check passed",
            id="an exit without a word"),
        pytest.param(
            [seen_on("w0", reason="the guard was killed")], "unknown", 1, "w0",
            "nothing tells what it was: the guard was killed", id="nobody says how"),
        pytest.param(
            [seen_on("w0", wrote("NVRM: Xid (PCI:0000:04:00): 79, pid=1")),
             seen_on("w1", **found("gpu", "gpu.lost", "hardware"))],
            "hardware", 3, "w1", "w1: gpu check: gpu.lost", id="a finding elsewhere beats words here"),
        pytest.param(
            [seen_on("w0", wrote("NVRM: Xid (PCI:0000:04:00): 79, pid=1"),
                     **found("gpu", "gpu.lost", "hardware"))],
            "hardware", 3, "w0", "its ranks' words say so too (gpu_lost)", id="finding and words agree"),
        pytest.param(
            [seen_on("w0", wrote("NVRM: Xid (PCI:0000:04:00): 79, pid=1"))], "unknown", 1, "w0",
            "no check confirms it, and nobody is sent away for words", id="words alone isolate nobody"),
        pytest.param(
            [seen_on("w0", died(), **found("io", "io.read_only", "node")), seen_on("w1"), seen_on("w2")],
            "container", 2, "w0", "io.read_only", id="storage of one node"),
        pytest.param(
            [seen_on("w0", died(), **found("io", "io.stale", "network")),
             seen_on("w1", **found("io", "io.stale", "network")), seen_on("w2")],
            "dependency", 1, "w0", "io.stale on 2 of 3 workers: not the nodes", id="storage of most"),
        pytest.param(
            [seen_on("w0", died(), **found("io", "io.no_space", "node")),
             seen_on("w1", **found("io", "io.no_space", "node"))],
            "dependency", 1, "w0", "2 of 2 workers", id="no space for everybody"),
        pytest.param(
            [seen_on("w0", died(), **found("allreduce_connection", "allreduce_connection.node", "hardware"))],
            "hardware", 3, "w0", "no group forms with this node", id="a localised node"),
        pytest.param(
            [seen_on("w0", died(), **found("allreduce_connection", "allreduce_connection.link", "network"))],
            "link", 1, "w0", "no machine can be blamed", id="a link"),
        pytest.param(
            [seen_on("w0", died(), **found("allreduce_connection", "allreduce_connection.link", "network")),
             seen_on("w1", **found("allreduce_connection", "allreduce_connection.link", "network"))],
            "link", 1, "w0", "no machine can be blamed", id="a link told by both its ends"),
        pytest.param(
            [seen_on("w0", died(), **found("io", "io.crashed", "software")),
             seen_on("w1", **found("io", "io.crashed", "software"))],
            "process", 1, "w0", "", id="our own check broken everywhere is no outage"),
        pytest.param(
            [seen_on("w0", died()),
             seen_on("w1", **found("allreduce_performance", "allreduce_performance.slow", "slow"))],
            "slow node", 1, "w1", "allreduce_performance.slow", id="a slow node"),
        pytest.param(
            [seen_on("w0", died(), **found("hang", "hang.frozen", "node"))], "hang", 1, "w0", "hang.frozen",
            id="frozen"),
        pytest.param(
            [seen_on("w0", died(), **found("gpu", "gpu.crashed", "software"))], "process", 1, "w0",
            "every check passed", id="a broken check of ours is no evidence"),
        pytest.param(
            [seen_on("w0", died(signal="SIGKILL"),
                     kernel=("Out of memory: Killed process 4711 (python) total-vm:1kB, anon-rss:1kB",))],
            "process", 1, "w0", "the kernel says host_oom", id="killed for want of memory"),
        pytest.param(
            [seen_on("w0", wrote("RuntimeError: PytorchStreamReader failed reading zip archive: "
                                 "failed finding central directory"))],
            "checkpoint", 1, "w0", "RESUME FROM THE CHECKPOINT BEFORE", id="a broken checkpoint, loudly"),
        pytest.param(
            [seen_on("w0", wrote("OSError: [Errno 28] No space left on device"))], "dependency", 1, "w0",
            "no node is to blame", id="what is down for a while"),
        pytest.param(
            [seen_on("w0", wrote("CUDA error: all CUDA-capable devices are busy or unavailable"))],
            "container", 2, "w0", "the container's surroundings", id="surroundings, by words"),
        pytest.param([seen_on("w0", lost=True, checked=())], "process", 1, "w0", "", id="an agent lost"),
    ],
)  # fmt: skip
def test_what_it_was(
    sources: list[WorkerEvidence], fault_class: str, level: int, worker: str, expected: str
) -> None:
    concluded = conclusion_of(*sources)
    assert (concluded.fault_class, concluded.level, concluded.worker) == (fault_class, level, worker)
    assert expected in concluded.reason


def test_stacks_of_all_nodes_are_compared_and_the_odd_one_is_named() -> None:
    waits = pack((Frame("barrier", "/x/site-packages/torch/distributed/c10d.py", 9), Frame("f", "t.py", 3)))
    loads = pack((Frame("load", "t.py", 7),))
    stacks = [{0: waits, 1: waits}, {2: waits, 3: loads}]
    concluded = conclusion_of(
        *(seen_on(f"w{n}", stacks=each) for n, each in enumerate(stacks)), verdict="desync"
    )
    assert (concluded.fault_class, concluded.code, concluded.worker) == (evidence.HANG, "hang.desync", "w1")
    assert "odd one out is rank 3 is at t.py:7 (load)" in concluded.reason


def test_storage_far_behind_the_peers_is_told() -> None:
    took = {"w0": 0.2, "w1": 0.2, "w2": 5.0, "w3": 0.3}
    each = [seen_on(name, figures={"checkpoint_write_s": seconds}) for name, seconds in took.items()]
    concluded = conclusion_of(seen_on("w", died()), *each)
    assert "the storage of w2 is slow: checkpoint write took 5.00 s, peers 0.25 s" in concluded.reason
    assert "slow" not in conclusion_of(seen_on("w", died()), *each[:2]).reason, "two are no peers"


# ------------------------------------------------------------ the user's own error

BUG = died(exit_code=1, exception="ValueError: no sample 17", frame="train.py:9 load")
PEER_LOST = died(exit_code=1, exception="RuntimeError: Connection closed by peer")


def again(step: int, before: int, exception: str = "ValueError: no sample 99", frame: str = "train.py:9 load",
          **more: object) -> FailureEvidence:  # fmt: skip
    earlier = fingerprint_of(died(exit_code=1, exception=exception, frame=frame))
    assert earlier is not None
    earlier_failure = EarlierFailure(earlier, before)
    return FailureEvidence("w0", (seen_on("w0", BUG),), step=step, earlier=earlier_failure, **more)  # type: ignore[arg-type]


def test_the_same_exception_at_the_same_place_without_progress_is_the_user_s_bug() -> None:
    concluded = conclude(again(step=50, before=50))
    assert (concluded.fault_class, concluded.level) == (evidence.USER_BUG, 1)
    assert "training got no further than step 50" in concluded.reason


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(again(step=51, before=50), id="progress in between"),
        pytest.param(again(step=-1, before=-1), id="progress unknown"),
        pytest.param(again(step=50, before=-1), id="progress unknown before"),
        pytest.param(again(step=50, before=50, frame="train.py:10 load"), id="another place"),
        pytest.param(again(step=50, before=50, exception="KeyError: 'x'"), id="another exception"),
        pytest.param(FailureEvidence("w0", (seen_on("w0", BUG),), step=50), id="the first time"),
    ],
)
def test_anything_else_is_no_repetition(failure: FailureEvidence) -> None:
    assert conclude(failure).fault_class == "process"


def test_what_has_no_place_is_never_the_same() -> None:
    assert fingerprint_of(died(signal="SIGSEGV")) is None
    assert fingerprint_of(died(exit_code=1, exception="ValueError: no")) is None


def test_hardware_found_beats_a_repetition() -> None:
    failure = again(step=50, before=50)
    broken = seen_on("w0", BUG, **found("gpu", "gpu.ecc", "hardware"))
    assert (
        conclude(FailureEvidence("w0", (broken,), step=50, earlier=failure.earlier)).fault_class == "hardware"
    )


@pytest.mark.parametrize(
    ("failure", "is_bug"),
    [
        (FailureEvidence("w0", (seen_on("w0", BUG),)), True),
        (FailureEvidence("w0", (seen_on("w0", BUG),), step=0), True),
        # a bad sample after fifty steps is no typo
        (FailureEvidence("w0", (seen_on("w0", BUG),), step=50), False),
        (FailureEvidence("w0", (seen_on("w0", BUG),), step=50, start_step=50), True),
        (again(step=50, before=50), True),
        (FailureEvidence("w0", (seen_on("w0", died()),)), False),
        (FailureEvidence("w0", (seen_on("w0", died(signal="SIGKILL")),)), False),
        (FailureEvidence("w0", (seen_on("w0", PEER_LOST),)), False),
        (FailureEvidence("w1", (seen_on("w0", BUG),)), False),
    ],
)  # fmt: skip
def test_when_fail_fast_ends_a_job(failure: FailureEvidence, is_bug: bool) -> None:
    assert bool(user_error(failure)) == is_bug


# ------------------------------------------------------------ who died first


def test_the_first_death_over_nodes_with_different_clocks() -> None:
    ahead = Bounds(-3600.002, -3599.998)
    failure = FailureEvidence(
        "w0", (seen_on("w0", died(0, 10.0), clock=EXACT), seen_on("w1", died(4, 3609.5), clock=ahead))
    )
    concluded = conclude(failure)
    assert concluded.first == "rank 4 of w1"
    assert "rank 4 of w1 died first, 0.496 to 0.504 s before rank 0 of w0" in concluded.reason
    assert "though w0's report came first" in concluded.reason


def test_deaths_too_close_for_the_clocks_are_undecided_and_so_are_unknown_clocks() -> None:
    for clock, other in ((Bounds(-1, 1), EXACT), (None, EXACT)):
        pair = seen_on("w0", died(0, 10.0), clock=clock), seen_on("w1", died(4, 9.5), clock=other)
        concluded = conclusion_of(*pair)
        assert concluded.first == ""
        assert "which of 2 died first is undecided by time" in concluded.reason


def test_on_one_node_one_clock_tells() -> None:
    concluded = conclusion_of(seen_on("w0", died(0, 10.0), died(1, 9.9)))
    assert concluded.first == "rank 1 of w0"
    assert "rank 1 of w0 died first, 0.1 s before rank 0 of w0" in concluded.reason


# ------------------------------------------------------------ what never happens

_LINES = [json.loads(row)["line"] for row in KINDS.read_text(encoding="utf-8").splitlines()]
_HARMLESS = [
    line
    for line in _LINES
    if (known := load().classify(line))
    and (known.action in ("ignore", "fail_fast") or known.role == "cascade")
]
_NOT_HARDWARE = st.builds(
    Finding,
    st.sampled_from(CHEAP),
    st.sampled_from(["io.timeout", "gpu.temperature", "rdma.slow_link", "hang.frozen", "runtime.driver"]),
    st.sampled_from(["node", "network", "slow", "software", "unknown", ""]),
)
_FAILURES = st.builds(
    Failure,
    st.integers(0, 7),
    st.integers(0, 7),
    st.floats(0, 1e9),
    exit_code=st.sampled_from([1, None]),
    signal=st.sampled_from([None, "SIGKILL", "SIGABRT"]),
    exception=st.one_of(st.none(), st.sampled_from(_HARMLESS)),
    last_lines=st.lists(st.sampled_from(_HARMLESS), max_size=4).map(tuple),
)
_WITNESSES = st.lists(
    st.builds(
        WorkerEvidence,
        st.sampled_from(["w0", "w1", "w2"]),
        failures=st.lists(_FAILURES, max_size=3).map(tuple),
        clock=st.one_of(st.none(), st.builds(Bounds, st.floats(-9, 0), st.floats(0, 9))),
        findings=st.lists(_NOT_HARDWARE, max_size=2).map(tuple),
        kernel=st.lists(st.sampled_from(_LINES), max_size=2).map(tuple),
        checked=st.sampled_from([(), CHEAP]),
        lost=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda each: each.worker,
)


@given(_WITNESSES, st.integers(-1, 9), st.integers(-1, 9))
def test_harmless_lines_never_lead_to_isolation(
    sources: list[WorkerEvidence], step: int, start_step: int
) -> None:
    """Whatever is ignored, the user's own or a consequence, and whatever the kernel says beside it: without
    a check that found hardware nobody leaves."""
    assert len(_HARMLESS) > 50
    failure = FailureEvidence("w0", tuple(sources), step=step, start_step=start_step)
    concluded = conclude(failure)
    assert concluded.level < 3
    assert concluded.fault_class in FAULT_CLASSES
    user_error(failure)
