"""All evidence of one failure together: what class of fault it was, which level answers it, and why. Pure.

Evidence comes from many sources of different weight. A check that finds broken hardware is proof; log output
is a hint, since the fault of one rank makes others log errors, too; how a process ended says least. So
findings decide first, then stacks, then log output, then exits, and only a finding can isolate a node.
"Unknown" is a valid conclusion: no node is blamed for lack of another.

Which rank died first is decided by the nodes' clocks as far as they are known (`core.diagnosis.clocks`), and
"undecided by time" where they aren't known well enough.

A user's error is one that repeats: the same exception from the same line of code, without progress of the
training in between. Progress must be known for that: unknown counts neither as progress nor as none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from aegis_elastic.core.detection import stacks
from aegis_elastic.core.diagnosis import clocks, peer_figures, recovery, signatures
from aegis_elastic.core.diagnosis.attribution import role_of, signature_of
from aegis_elastic.core.diagnosis.clocks import Bounds
from aegis_elastic.core.diagnosis.signatures import Signature
from aegis_elastic.core.events import Finding
from aegis_elastic.core.model import Failure

USER_BUG = "user bug"
DEPENDENCY = "dependency"
CHECKPOINT = "checkpoint"
HANG = "hang"
SLOW = "slow node"
LINK = "link"

# Every class that `conclude` gives.
FAULT_CLASSES = (
    "process", "container", "hardware", "unknown", USER_BUG, DEPENDENCY, CHECKPOINT, HANG, SLOW, LINK,
)  # fmt: skip

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


class Fingerprint(NamedTuple):
    """What makes two failures the same: the exception with its numbers left out, and where it was raised."""

    exception: str
    frame: str


def fingerprint_of(failure: Failure) -> Fingerprint | None:
    """The fingerprint of a failure; None without an exception or a frame: then nothing can be compared."""
    if not failure.exception or not failure.frame:
        return None
    return Fingerprint(_NUMBER.sub("#", failure.exception), failure.frame)


class WorkerEvidence(msgspec.Struct, frozen=True):
    """The evidence from one worker on the end of an incarnation.

    `clock`: its clock's offset to the master's when it reported. `checked`: names of the checks that ran on
    it since; `figures` (seconds by name), `stacks` (by rank) and `kernel` (log lines about its ranks) are
    what those checks returned beside findings.
    """

    worker: str
    node: str = ""
    failures: tuple[Failure, ...] = ()
    clock: Bounds | None = None
    reason: str = ""
    lost: bool = False
    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()
    figures: dict[str, float] = {}
    stacks: dict[int, str] = {}
    kernel: tuple[str, ...] = ()


class EarlierFailure(NamedTuple):
    """The previous failure: its fingerprint, and the highest step known then (-1: unknown)."""

    fingerprint: Fingerprint
    step: int


class FailureEvidence(msgspec.Struct, frozen=True):
    """One failure with the evidence from all workers. `root` is the worker that it was charged to.

    `step`: the highest step that training is known to have reached, `start_step` the same at the start of
    this incarnation (-1: unknown). `verdict`: why the storm guard stopped ranks that hung ("" if it didn't).
    `unclear`: steps were made in this incarnation, and their position in the training is unknown.
    """

    root: str
    sources: tuple[WorkerEvidence, ...]
    step: int = -1
    start_step: int = -1
    earlier: EarlierFailure | None = None
    verdict: str = ""
    unclear: bool = False


class Conclusion(msgspec.Struct, frozen=True):
    """What the failure was: class and level as in section 9 of the specification, `code` for machines, why.

    `worker`: the one concerned, the root unless evidence says otherwise. `first`: "rank 3 of w1" if it is
    known which process died first, else "".
    """

    fault_class: str
    level: int
    code: str
    reason: str
    worker: str
    first: str = ""


def conclude(evidence: FailureEvidence) -> Conclusion:
    """The conclusion from all evidence. Level 3 only for a finding of a check."""
    found = _by_findings(evidence) or _by_stacks(evidence) or _by_output(evidence)
    first, when = first_death(evidence)
    reason = "; ".join(filter(None, [found.reason, when]))
    return msgspec.structs.replace(found, reason=reason, first=first)


# ------------------------------------------------------------ findings


def _by_findings(evidence: FailureEvidence) -> Conclusion | None:
    judged = [
        (source, finding, recovery.judge((finding,)))
        for source in evidence.sources
        for finding in source.findings
    ]
    hardware = [each for each in judged if each[2].level == 3]
    if hardware:
        source, _, assessment = hardware[0]
        names = ", ".join(dict.fromkeys(each[0].worker for each in hardware))
        confirmed = _confirmed_by_output(source)
        return Conclusion(
            "hardware", 3, assessment.code, f"{names}: {assessment.reason}{confirmed}", source.worker
        )
    shared = _shared_by_most(evidence)
    if shared:
        finding, workers = shared
        text = f"{finding.check} check: {finding.finding} on {workers}: not the nodes, what they depend on"
        return Conclusion(DEPENDENCY, 1, finding.finding, text, evidence.root)
    container = [each for each in judged if each[2].level == 2]
    if container:
        source, _, assessment = container[0]
        return Conclusion(
            "container", 2, assessment.code, f"{source.worker}: {assessment.reason}", source.worker
        )
    return next((minor for each in judged if (minor := _minor(*each)) is not None), None)


def _minor(source: WorkerEvidence, finding: Finding, assessment: recovery.Assessment) -> Conclusion | None:
    """A conclusion below level 2 with a class of its own; None for a check that failed itself."""
    if finding.scope == "software":
        return None
    fault_class = assessment.fault_class
    if finding.finding == "hang.frozen":
        fault_class = HANG
    elif finding.scope == "slow":
        fault_class = SLOW
    elif finding.finding.endswith(".link"):
        fault_class = LINK
    text = f"{source.worker}: {assessment.reason}"
    return Conclusion(fault_class, assessment.level, assessment.code, text, source.worker)


def _shared_by_most(evidence: FailureEvidence) -> tuple[Finding, str] | None:
    """A fault of storage or network on most of the checked workers, at least two; with "N of M workers"."""
    checked = [source for source in evidence.sources if source.checked]
    having: dict[str, list[tuple[str, Finding]]] = {}
    for source in checked:
        for finding in source.findings:
            if _of_a_dependency(finding, len(checked)):
                having.setdefault(finding.check, []).append((source.worker, finding))
    for each in having.values():
        workers = list(dict.fromkeys(worker for worker, _ in each))
        if len(workers) >= 2 and 2 * len(workers) > len(checked):
            return each[0][1], f"{len(workers)} of {len(checked)} workers"
    return None


def _of_a_dependency(finding: Finding, checked: int) -> bool:
    """Whether this may be a fault of what nodes share. A link has two ends, and both report it."""
    if finding.scope in ("slow", "software"):
        return False
    shared_network = finding.scope == "network" and checked > 2 and not finding.finding.endswith(".link")
    return finding.check == "io" or shared_network


def _confirmed_by_output(source: WorkerEvidence) -> str:
    """A remark if the output of this worker's ranks confirms its finding."""
    found = [signature for failure in source.failures if (signature := signature_of(failure)) is not None]
    classes = dict.fromkeys(
        signature.fault_class for signature in found if signature.action == "isolate_node"
    )
    return f", and its ranks' words say so too ({', '.join(classes)})" if classes else ""


# ------------------------------------------------------------ stacks


def _by_stacks(evidence: FailureEvidence) -> Conclusion | None:
    """Stacks that were taken before the stop, compared over all nodes."""
    where = {rank: source.worker for source in evidence.sources for rank in source.stacks}
    read = {rank: stacks.unpack(text) for source in evidence.sources for rank, text in source.stacks.items()}
    compared = stacks.compare(read)
    if compared.odd and compared.desync:
        rank = compared.odd[0]
        text = f"a deadlock: odd one out is {compared.describe()}"
        return Conclusion(HANG, 1, "hang.desync", f"{where[rank]}: {text}", where[rank])
    if evidence.verdict:
        return Conclusion(
            HANG, 1, f"hang.{evidence.verdict}", f"{evidence.root}: {evidence.verdict}", evidence.root
        )
    return None


# ------------------------------------------------------------ output and exits

_Reading = tuple[str, int, str]
# What the root's output points at: class, level, text. `isolate_node` isolates nothing by itself.
_BY_ACTION: Mapping[signatures.Action, _Reading] = {
    "restart_in_place": ("process", 1, "a restart in place answers it"),
    "restart_container": ("container", 2, "the container's surroundings are broken"),
    "isolate_node": ("unknown", 1, "no check confirms it, and nobody is sent away for words"),
    "diagnose": ("process", 1, "the checks found no fault of a machine"),
    "wait": (DEPENDENCY, 1, "something is down for a while, and no node is to blame"),
    "fallback_checkpoint": (CHECKPOINT, 1, "RESUME FROM THE CHECKPOINT BEFORE: this one can't be read"),
    "fail_fast": ("process", 1, "an error of the user's own, it seems"),
}


def _by_output(evidence: FailureEvidence) -> Conclusion:
    root = next((source for source in evidence.sources if source.worker == evidence.root), None)
    slow = peer_figures.slow_storage({each.worker: each.figures for each in evidence.sources})
    if root is not None and root.lost:
        return Conclusion("process", 1, "agent.lost", "", evidence.root)
    failure = root_failure(root.failures) if root is not None else None
    checked = bool(root is not None and root.checked)
    if failure is None:
        why = (root.reason if root is not None else "") or "nobody says how it ended"
        return Conclusion("unknown", 1, "", f"nothing tells what it was: {why}", evidence.root)
    again = repetition(evidence)
    if again.kind == "bug":
        return Conclusion(USER_BUG, 1, "user.repeated", again.reason, evidence.root)
    signature, origin = _best_signature(failure, root.kernel if root is not None else ())
    fault_class, level, code = "process", 1, ""
    text = recovery.PROCESS.reason if checked else "the process ended by itself, and nothing was checked"
    if signature is not None:
        fault_class, level, remark = _BY_ACTION.get(signature.action, ("process", 1, ""))
        if signature.action == "diagnose" and not checked:
            fault_class, remark = "unknown", "nothing was checked"
        code = f"signature.{signature.fault_class}"
        text = f"{origin} {signature.fault_class}: {remark}"
    if slow:
        text += "; " + "; ".join(f"the storage of {worker} is slow: {what}" for worker, what in slow.items())
    if again.reason:
        text += f"; {again.reason}"
    return Conclusion(fault_class, level, code, text, evidence.root)


def root_failure(failures: Sequence[Failure]) -> Failure | None:
    """Of one worker's failures the one that looks most like a root, the earliest of equals."""
    return min(failures, key=lambda each: (role_of(each) != "root", each.time), default=None)


def _best_signature(failure: Failure, kernel: Sequence[str]) -> tuple[Signature | None, str]:
    """The most specific signature, and its origin. The kernel log comes first: it knows why it killed."""
    for line in kernel:
        signature = signatures.load().classify(line)
        if signature is not None and signature.action != "ignore":
            return signature, "the kernel says"
    return signature_of(failure), "signature"


class Repetition(NamedTuple):
    """Whether the same failure came again: "bug" (no progress in between), "unknown" or "no"."""

    kind: Literal["bug", "unknown", "no"]
    reason: str = ""


def repetition(evidence: FailureEvidence) -> Repetition:
    """Whether the same failure repeats without progress in between, which makes it the user's error."""
    root = next((source for source in evidence.sources if source.worker == evidence.root), None)
    failure = root_failure(root.failures) if root is not None else None
    mine = fingerprint_of(failure) if failure is not None else None
    if mine is None or evidence.earlier is None or evidence.earlier.fingerprint != mine:
        return Repetition("no")
    same = f"the same exception at the same place as before ({mine.frame})"
    if evidence.unclear or evidence.step < 0 or evidence.earlier.step < 0:
        return Repetition("unknown", f"{same}; whether training got further in between is unknown")
    if evidence.step > evidence.earlier.step:
        return Repetition(
            "no", f"{same}, but training got from step {evidence.earlier.step} to {evidence.step}"
        )
    return Repetition(
        "bug", f"{same}, and training got no further than step {evidence.step}: the user's error"
    )


def user_error(evidence: FailureEvidence) -> str:
    """Why this is the user's own error, for `--aegis-fail-fast`; "" if it isn't known to be.

    Output counts at once only as long as training isn't known to have advanced in this incarnation: a sample
    that can't be read after a day of training is no typo, and must repeat to be called one.
    """
    again = repetition(evidence)
    if again.kind == "bug":
        return again.reason
    root = next((source for source in evidence.sources if source.worker == evidence.root), None)
    failure = root_failure(root.failures) if root is not None else None
    if failure is None or role_of(failure) != "root":
        return ""
    signature = signature_of(failure)
    if signature is None or signature.action != "fail_fast" or signature.role != "root":
        return ""
    advanced = evidence.unclear or (evidence.step >= 0 and evidence.step > max(evidence.start_step, 0))
    return "" if advanced else f"{failure.exception or 'its last lines'} ({signature.fault_class})"


# ------------------------------------------------------------ time


class _Death(NamedTuple):
    worker: str
    name: str
    time: float
    span: clocks.Span | None


def first_death(evidence: FailureEvidence) -> tuple[str, str]:
    """("rank 3 of w1", how that is known); the name is empty where time doesn't decide."""
    deaths = [
        _Death(
            source.worker,
            f"rank {failure.rank} of {source.worker}",
            failure.time,
            clocks.span(failure.time, source.clock),
        )
        for source in evidence.sources
        for failure in source.failures
        if role_of(failure) == "root"
    ]
    if not deaths:
        return "", ""
    if len(deaths) == 1:
        return deaths[0].name, ""
    first = next(
        (one for one in deaths if all(_before(one, other) for other in deaths if other != one)), None
    )
    if first is None:
        names = ", ".join(death.name for death in deaths[:4])
        return "", f"which of {len(deaths)} died first is undecided by time ({names})"
    second = min(
        (each for each in deaths if each != first),
        key=lambda each: (each.worker != first.worker, each.span.low if each.span else each.time),
    )
    if second.worker == first.worker:
        how = f"{second.time - first.time:.3g} s before"
    else:
        assert first.span is not None and second.span is not None
        how = clocks.lead(first.span, second.span)
    text = f"{first.name} died first, {how} {second.name}"
    if first.worker != evidence.root:
        text += f", though {evidence.root}'s report came first"
    return first.name, text


def _before(one: _Death, other: _Death) -> bool:
    if one.worker == other.worker:  # one clock
        return one.time + clocks.RESOLUTION_S < other.time
    return clocks.before(one.span, other.span)
