"""Attribution: of the many Errors after one crash, which worker's failure is the root.

When a rank dies, its peers' collectives fail within milliseconds, and their agents report too; over a
network, in any order. What distinguishes them is *how* they failed: a process that died by its own fault
doesn't report a lost peer. So a failure that looks like a root is decided on at once, and one that looks
like a consequence waits `WINDOW_S` for its root. If an agent itself may be lost, all other failures may be
its consequence: wait until that is known. Of several roots known at that moment the one that died first is
the root, if the nodes' clocks can tell (`core.diagnosis.clocks`), else the one whose report came first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import msgspec

from aegis_elastic.core.diagnosis import clocks, signatures
from aegis_elastic.core.diagnosis.clocks import Bounds, Span
from aegis_elastic.core.diagnosis.signatures import Signature
from aegis_elastic.core.model import Failure

WINDOW_S = 1.0

# Messages of a process that has lost a peer: gloo, NCCL, the TCPStore, torchelastic. Matched ignoring case.
PEER_LOSS = (
    r"connection closed by (remote )?peer",
    r"connection reset by (remote )?peer",
    r"broken pipe",
    r"\bgloo\b",
    r"remote process exited",
    r"ncclRemoteError",
    r"processgroup\w*.{0,200}connection",
    r"recvValue failed",
    r"sendBytes failed",
    r"failed to recv, got 0 bytes",
    r"store is (no longer available|unavailable)",
    r"\b(RendezvousConnectionError|DistStoreError|DistNetworkError)\b",
)
# What points at communication by itself, beyond a peer's death. First the collectives that timed out.
COLLECTIVE_TIMEOUT = (
    r"collective operation timeout",
    r"watchdog caught collective",
    r"timed out waiting \d+ ?ms for (recv|send) operation",
    r"monitoredbarrier.{0,80}timed? ?out",
    r"\bDistBackendError\b.{0,200}time(d )?out",
)
NETWORK = (
    r"no route to host",
    r"network is (unreachable|down)",
    r"connection (refused|timed out)",
    r"temporary failure in name resolution|name or service not known",
    r"ncclsystemerror|unhandled system error",
    r"\bibv_\w+.{0,80}(fail|error)",
    r"NET/IB.{0,120}(error|fail|timeout)",
)


def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)


_PEER_LOSS, _TIMEOUT, _NETWORK = _any_of(PEER_LOSS), _any_of(COLLECTIVE_TIMEOUT), _any_of(NETWORK)

# SIGTERM: it was asked to end; SIGABRT: C++ ends so on an error that its last lines describe.
_TERMINATED = ("SIGTERM", "TERM", "15")
_ABORTED = ("SIGABRT", "ABRT", "6")
_EXIT_BY_SIGTERM = 143  # how a shell between us and the process passes SIGTERM on

# Signatures that point at communication: collectives that timed out, and faults between the machines.
_TIMED_OUT = ("nccl_collective_timeout", "nccl_watchdog_stuck", "gloo_timeout")
_OF_THE_NETWORK = ("gloo", "rdma", "ucx")
_ROLES_BY_WEIGHT: tuple[signatures.SignatureRole, ...] = ("root", "either", "cascade", "context")

Role = Literal["root", "consequence"]


class ReportedError(msgspec.Struct, frozen=True):
    """One worker's Error, and when it arrived by the master's clock (seconds). `clock`: what the master knows
    of that node's clock, in wall seconds."""

    worker: str
    arrived: float
    failures: tuple[Failure, ...] = ()
    reason: str = ""
    clues: tuple[str, ...] = ()
    clock: Bounds | None = None


class Attribution(msgspec.Struct, frozen=True):
    """The worker at the root, or None: then attribute again at `wait_until`, or when something changes.

    `wait_until` is in seconds of the master's clock; infinite when only new evidence or the end of a
    suspicion can decide (a suspicion ends by itself: `liveness.Patience` bounds it).
    """

    root: str | None
    wait_until: float
    reason: str


def role_of(failure: Failure) -> Role:
    """Whether a process failed by itself, as far as this failure alone shows."""
    if failure.after_stop or failure.signal in _TERMINATED or failure.exit_code == _EXIT_BY_SIGTERM:
        return "consequence"
    if failure.signal and failure.signal not in _ABORTED:
        return "root"
    return "consequence" if _PEER_LOSS.search(_text_of(failure)) else "root"


def _text_of(failure: Failure) -> str:
    """The process's output about its end: its exception if it recorded one. Its last lines may then be about
    other things (a warning about a peer an hour ago); without an exception they are all there is."""
    return failure.exception or "\n".join(failure.last_lines)


class FailureText(Protocol):
    """The texts of a failed process, as `Failure` and the report's `FailureEntry` have them."""

    @property
    def exception(self) -> str | None: ...
    @property
    def last_lines(self) -> tuple[str, ...]: ...
    @property
    def signal(self) -> str | None: ...


def signature_of(failure: FailureText) -> Signature | None:
    """The most telling signature of this failure: of its exception, else of its last lines, else of its
    signal; None if none matches.

    The role "root" is preferred to "either", that to "cascade"; of equals the first counts, since what is
    printed later is often about the end itself. "ignore" lines don't count.
    """
    exception = (failure.exception or "").splitlines()
    for lines in (
        exception,
        failure.last_lines,
        (f"killed by signal {failure.signal}",) if failure.signal else (),
    ):
        found = [signature for line in lines if (signature := signatures.load().classify(line)) is not None]
        found = [signature for signature in found if signature.action != "ignore"]
        best = min(found, key=lambda signature: _ROLES_BY_WEIGHT.index(signature.role), default=None)
        if best is not None:
            return best
    return None


def needs_earlier_checkpoint(failure: FailureText) -> bool:
    """Whether a checkpoint could not be read, so that training must resume from an earlier one."""
    signature = signature_of(failure)
    return signature is not None and signature.action == "fallback_checkpoint"


def _communication_clue(signature: Signature | None) -> str:
    """The clue in a signature: a collective that timed out, or a fault of the network itself; "" for none."""
    if signature is None or signature.action not in ("diagnose", "isolate_node", "wait"):
        return ""
    if signature.fault_class in _TIMED_OUT:
        return "collective_timeout"
    by_itself = signature.role in ("root", "either")
    return "network" if signature.component in _OF_THE_NETWORK and by_itself else ""


def clues_of(failures: Iterable[Failure]) -> tuple[str, ...]:
    """What these failures point at beyond the processes: codes of `recovery.COMMUNICATION_CLUES`, and
    "container" where a root's output shows broken surroundings that a restart in place would find again.

    A plain consequence points at nothing: that a peer is gone is no fault of the network.
    """
    failures = tuple(failures)
    clues = set()
    for failure in failures:
        text = "\n".join((failure.exception or "", *failure.last_lines))
        signature = signature_of(failure)
        clue = _communication_clue(signature)
        if clue == "collective_timeout" or _TIMEOUT.search(text):
            clues.add("collective_timeout")
        elif role_of(failure) == "root" and (clue or _NETWORK.search(text)):
            clues.add("network")
        if signature is not None and signature.action == "restart_container" and role_of(failure) == "root":
            clues.add("container")
        if failure.exit_code is None and not failure.signal and not failure.exception:
            clues.add("cause_unknown")
    return tuple(sorted(clues)) if failures else ("cause_unknown",)


def _is_root_like(error: ReportedError) -> bool:
    if not error.failures:  # the agent itself gives the reason, for example that it couldn't start the ranks
        return not _PEER_LOSS.search(error.reason)
    return any(role_of(failure) == "root" for failure in error.failures)


def attribute(
    errors: Sequence[ReportedError],
    suspects: frozenset[str],
    expected: int,
    now: float,
    window_s: float = WINDOW_S,
) -> Attribution:
    """Which worker failed first, or until when to wait.

    `errors`: the Errors of one incarnation. `suspects`: workers whose agent may be lost (its connection has
    closed, and whether it comes back is not known yet). `expected`: how many workers can report at all.
    """
    if not errors:
        return Attribution(None, math.inf, "no worker has reported a failure")
    ordered = sorted(errors, key=lambda item: (item.arrived, item.worker))
    if suspects:
        names = ", ".join(sorted(suspects))
        return Attribution(None, math.inf, f"{names} may be lost: all else may be a consequence of that")
    roots = [item for item in ordered if _is_root_like(item)]
    if roots:
        root, how = _first_of(roots)
        return Attribution(
            root.worker, now, f"{root.worker} failed by itself, {how} of {len(ordered)} reports"
        )
    first = ordered[0]
    if len({item.worker for item in ordered}) >= expected:
        return Attribution(
            first.worker, now, f"every worker complains of a lost peer; {first.worker} did first"
        )
    until = first.arrived + window_s
    if now >= until:
        return Attribution(first.worker, now, f"no root within {window_s:g} s of {first.worker}'s lost peer")
    return Attribution(None, until, f"{first.worker} complains of a lost peer: waiting for the root")


def _first_of(roots: Sequence[ReportedError]) -> tuple[ReportedError, str]:
    """Of roots in the order of their arrival the one that died first, and how that is known."""
    if len(roots) == 1:
        return roots[0], "first"
    spans = [_death(item) for item in roots]
    for item, mine in zip(roots, spans, strict=True):
        if all(clocks.before(mine, other) for other in spans if other is not mine):
            return item, "first by the clocks"
    return roots[0], "undecided by time and first to arrive"


def _death(error: ReportedError) -> Span | None:
    times = [failure.time for failure in error.failures if role_of(failure) == "root"]
    return clocks.span(min(times), error.clock) if times else None
