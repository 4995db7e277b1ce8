"""Who failed first: from the words of the dead, in any order of arrival."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis_elastic.core.diagnosis.attribution import (
    WINDOW_S,
    ReportedError,
    attribute,
    clues_of,
    role_of,
    signature_of,
)
from aegis_elastic.core.diagnosis.clocks import Bounds
from aegis_elastic.core.diagnosis.recovery import COMMUNICATION_CLUES, CONTAINER_CLUE
from aegis_elastic.core.model import Failure

NOBODY: frozenset[str] = frozenset()
GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer "
    "[10.88.0.3]:41552"
)
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or "
    "there was a network error, NCCL version 2.21.5"
)
STORE = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"
WATCHDOG = "[rank3]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600000 ms"


def failed(
    exception: str | None = None, lines: tuple[str, ...] = (), signal: str | None = None, **more: object
) -> Failure:
    exit_code = None if signal else 1
    return Failure(0, 0, 1.0, exit_code, signal, exception, lines, **more)  # type: ignore[arg-type]


def told(worker: str, arrived: float, *failures: Failure, reason: str = "") -> ReportedError:
    return ReportedError(worker, arrived, failures, reason)


ROOT, PEER = failed("ValueError: bad sample"), failed(GLOO)


@pytest.mark.parametrize(
    "failure",
    [
        failed(signal="SIGKILL"), failed(signal="SIGSEGV"),
        failed(signal="SIGABRT", lines=("malloc(): corrupted",)),
        failed("ValueError: no"), failed("torch.OutOfMemoryError: CUDA out of memory"), failed(),
        failed("ValueError: no", lines=("an hour ago: Connection reset by peer, retrying",)),
        failed(WATCHDOG),
    ],
)  # fmt: skip
def test_root_like(failure: Failure) -> None:
    assert role_of(failure) == "root"


@pytest.mark.parametrize(
    "failure",
    [
        failed(GLOO), failed(NCCL), failed(STORE), failed(lines=("...", GLOO)),
        failed("BrokenPipeError: Broken pipe"),
        failed("RendezvousConnectionError: The connection to the C10d store has failed."),
        failed(signal="SIGTERM"), failed("ValueError: no", after_stop=True),
        failed(signal="SIGKILL", after_stop=True),
        failed(signal="SIGABRT", lines=("terminate called", NCCL)),
        Failure(0, 0, 1.0, exit_code=143),
    ],
)  # fmt: skip
def test_consequence_like(failure: Failure) -> None:
    assert role_of(failure) == "consequence"


def test_a_root_is_decided_at_once_whatever_came_before_it() -> None:
    evidence = [told("w0", 1.0, PEER), told("w2", 1.1, PEER), told("w1", 1.2, ROOT)]
    assert attribute(evidence, NOBODY, 8, now=1.2).root == "w1"


def test_of_two_roots_the_first_to_arrive() -> None:
    evidence = [told("w2", 1.3, ROOT), told("w1", 1.2, ROOT), told("w0", 1.0, PEER)]
    assert attribute(evidence, NOBODY, 8, now=1.3).root == "w1"


def at(worker: str, arrived: float, died: float, clock: Bounds | None) -> ReportedError:
    failure = Failure(0, 0, died, 1, None, "ValueError: bad sample")
    return ReportedError(worker, arrived, (failure,), clock=clock)


def test_of_two_roots_the_first_to_die_if_the_clocks_can_tell() -> None:
    # w2's clock is an hour ahead: by itself it died an hour after w1, in truth before it.
    exact, ahead = Bounds(-0.01, 0.01), Bounds(-3600.01, -3599.99)
    evidence = [at("w1", 9.0, 8.9, exact), at("w2", 9.1, 3608.5, ahead)]
    found = attribute(evidence, NOBODY, 8, now=9.1)
    assert (found.root, found.reason) == ("w2", "w2 failed by itself, first by the clocks of 2 reports")


@pytest.mark.parametrize("clock", [None, Bounds(-1.0, 1.0)])
def test_of_two_roots_whose_order_no_clock_tells_the_first_to_arrive(clock: Bounds | None) -> None:
    evidence = [at("w1", 9.0, 8.9, clock), at("w2", 9.1, 8.5, Bounds(-0.01, 0.01))]
    found = attribute(evidence, NOBODY, 8, now=9.1)
    assert found.root == "w1"
    assert "undecided by time" in found.reason


def test_one_root_among_a_workers_ranks_makes_it_the_root() -> None:
    evidence = [told("w0", 1.0, PEER, PEER), told("w1", 1.1, PEER, failed(signal="SIGKILL"))]
    assert attribute(evidence, NOBODY, 8, now=1.1).root == "w1"


def test_consequences_wait_for_their_root_but_not_for_ever() -> None:
    evidence = [told("w0", 5.0, PEER), told("w2", 5.1, PEER)]
    waiting = attribute(evidence, NOBODY, 3, now=5.1)
    assert (waiting.root, waiting.wait_until) == (None, 5.0 + WINDOW_S)
    assert attribute(evidence, NOBODY, 3, now=waiting.wait_until).root == "w0"


def test_when_everybody_has_reported_there_is_nothing_to_wait_for() -> None:
    evidence = [told("w1", 5.1, PEER), told("w0", 5.0, PEER)]
    assert attribute(evidence, NOBODY, 2, now=5.1).root == "w0"


def test_the_same_worker_twice_is_one_report() -> None:
    evidence = [told("w0", 5.0, PEER), told("w0", 5.1, PEER)]
    assert attribute(evidence, NOBODY, 2, now=5.1).root is None


@pytest.mark.parametrize("failure", [ROOT, PEER])
def test_while_an_agent_may_be_lost_nothing_is_decided(failure: Failure) -> None:
    evidence = [told("w0", 1.0, failure)]
    waiting = attribute(evidence, frozenset({"w1"}), 1, now=100.0)
    assert (waiting.root, waiting.wait_until) == (None, math.inf)
    assert "w1" in waiting.reason
    assert attribute(evidence, NOBODY, 1, now=100.0).root == "w0"


def test_an_agent_that_says_itself_what_is_wrong() -> None:
    evidence = [told("w0", 1.0, PEER), told("w1", 1.5, reason="cannot start the ranks: no such file")]
    assert attribute(evidence, NOBODY, 8, now=1.5).root == "w1"


def test_without_a_report_nothing_happens() -> None:
    assert attribute([], NOBODY, 3, now=1.0).root is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["w0", "w1", "w2"]), st.floats(0, 3), st.sampled_from([ROOT, PEER])),
        max_size=5,
    ),
    st.floats(0, 5),
)
def test_the_verdict_does_not_depend_on_the_order_of_the_list(
    reports: list[tuple[str, float, Failure]], now: float
) -> None:
    evidence = [told(*item) for item in reports]
    verdicts = {attribute(list(some), NOBODY, 3, now).root for some in itertools.permutations(evidence)}
    assert len(verdicts) == 1
    root = verdicts.pop()
    if root is not None:
        assert any(item.worker == root for item in evidence)
    elif evidence:
        assert now < min(item.arrived for item in evidence) + WINDOW_S


@pytest.mark.parametrize(
    ("failures", "clues"),
    [
        ((failed(WATCHDOG),), ("collective_timeout",)),
        ((failed(signal="SIGABRT", lines=(WATCHDOG, NCCL)),), ("collective_timeout",)),
        ((failed("OSError: [Errno 113] No route to host"),), ("network",)),
        ((failed("DistBackendError: NCCL error: unhandled system error"),), ("network",)),
        (
            (failed("RuntimeError: Rank 0 failed to pass monitoredBarrier in 5000 ms"),),
            ("collective_timeout",),
        ),
        (
            (failed(signal="SIGABRT", lines=("NCCL WARN NET/IB : mlx5_4:1 Got async event : port error",)),),
            ("network",),
        ),
        ((failed("torch.OutOfMemoryError: CUDA out of memory"),), ()),
        ((failed(GLOO),), ()),
        ((failed(NCCL), failed(STORE)), ()),
        ((failed(signal="SIGKILL"),), ()),
        ((failed(),), ()),
        ((failed("ValueError: no"), failed(GLOO)), ()),
        (
            (failed("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"),),
            ("container",),
        ),
        ((Failure(0, 0, 1.0),), ("cause_unknown",)),
        ((), ("cause_unknown",)),
    ],
)
def test_clues(failures: tuple[Failure, ...], clues: tuple[str, ...]) -> None:
    assert clues_of(failures) == clues
    assert set(clues) <= COMMUNICATION_CLUES | {CONTAINER_CLUE}


@pytest.mark.parametrize(
    ("failure", "fault_class"),
    [
        (failed("ValueError: no"), "user_value_error"),
        (failed("torch.OutOfMemoryError: CUDA out of memory", lines=("KeyError: 'x'",)), "cuda_oom"),
        (failed("MyError: of our own", lines=("step 1", "OSError: [Errno 28] No space left on device")),
         "storage_enospc"),
        # A root among the last lines says more than the consequences around it, whichever came first.
        (failed(lines=("BrokenPipeError: [Errno 32] Broken pipe", "NVRM: Xid (PCI:0000:04:00): 79, pid=1",
                       "Sending process 81 closing signal SIGTERM")), "gpu_lost"),
        (failed(signal="SIGSEGV"), "signal_sigsegv"),
        (failed(signal="SIGKILL", lines=("step 7 loss 0.1",)), "signal_sigkill"),
    ],
)  # fmt: skip
def test_what_a_failure_speaks_of(failure: Failure, fault_class: str) -> None:
    found = signature_of(failure)
    assert found is not None and found.fault_class == fault_class


@pytest.mark.parametrize(
    "failure",
    [
        failed(), failed("MyError: of our own"), failed(signal="SIGTERM"),
        failed(lines=("step 7 loss 0.1", "For debugging consider passing CUDA_LAUNCH_BLOCKING=1")),
    ],
)  # fmt: skip
def test_what_tells_nothing_has_no_signature(failure: Failure) -> None:
    assert signature_of(failure) is None
