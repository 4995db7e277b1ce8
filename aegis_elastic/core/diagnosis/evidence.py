"""All evidence of one failure together: what class of fault it was, which level answers it, and why. Pure.

Evidence comes from many witnesses and of different worth. A check that finds broken hardware is proof; words
in a log are a pointer, since every fault of one rank makes others speak; how a process ended says least. So
findings decide first, then stacks, then words, then exits, and only a finding can ever send a node away.
"Unknown" is an answer: nobody is blamed because nobody else is left.

Which rank died first is told by the nodes' clocks as far as they are known (`core.diagnosis.clocks`), and
"undecided by time" where they aren't known well enough.

A user's error is one that comes again: the same exception from the same line of code, and training got no
further in between. How far it got must be known for that: unknown is neither progress nor none.
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
    """The print of a failure; None without an exception or a place: then nothing can be called the same."""
    if not failure.exception or not failure.frame:
        return None
    return Fingerprint(_NUMBER.sub("#", failure.exception), failure.frame)


class Witness(msgspec.Struct, frozen=True):
    """What one worker tells of the end of an incarnation.

    `clock`: its clock's offset to the master's when it reported. `checked`: names of the checks that ran on
    it since; `figures`, `stacks` and `kernel` (lines about its ranks) are what those said beside findings.
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


class Earlier(NamedTuple):
    """The failure before: its print, and the highest step known then (-1: unknown)."""

    print: Fingerprint
    step: int


class Case(msgspec.Struct, frozen=True):
    """One failure with all of its witnesses. `root` is the worker that it was charged to.

    `step`: the highest step that training is known to have reached, `since` the same at the start of this
    incarnation (-1: unknown). `verdict`: why the guard stopped ranks that hung ("" if that is not what it
    is). `unclear`: steps were made in this incarnation, and where that is in the training is unknown.
    """

    root: str
    witnesses: tuple[Witness, ...]
    step: int = -1
    since: int = -1
    earlier: Earlier | None = None
    verdict: str = ""
    unclear: bool = False


class Conclusion(msgspec.Struct, frozen=True):
    """What it was: class and level as in section 9 of the specification, `code` for machines, and why.

    `worker`: whom it concerns, the root unless evidence says otherwise. `first`: "rank 3 of w1" if it is
    known which process died first, else "".
    """

    fault_class: str
    level: int
    code: str
    reason: str
    worker: str
    first: str = ""


def conclude(case: Case) -> Conclusion:
    """Everything weighed. Never raises level 3 for anything but a finding of a check."""
    found = _by_findings(case) or _by_stacks(case) or _by_words(case)
    first, when = first_death(case)
    reason = "; ".join(filter(None, [found.reason, when]))
    return msgspec.structs.replace(found, reason=reason, first=first)


# ------------------------------------------------------------ findings


def _by_findings(case: Case) -> Conclusion | None:
    judged = [
        (witness, finding, recovery.judge((finding,)))
        for witness in case.witnesses
        for finding in witness.findings
    ]
    hardware = [each for each in judged if each[2].level == 3]
    if hardware:
        witness, _, verdict = hardware[0]
        names = ", ".join(dict.fromkeys(each[0].worker for each in hardware))
        said = _confirming(witness)
        return Conclusion("hardware", 3, verdict.code, f"{names}: {verdict.reason}{said}", witness.worker)
    shared = _shared_by_most(case)
    if shared:
        finding, workers = shared
        text = f"{finding.check} check: {finding.finding} on {workers}: not the nodes, what they depend on"
        return Conclusion(DEPENDENCY, 1, finding.finding, text, case.root)
    container = [each for each in judged if each[2].level == 2]
    if container:
        witness, _, verdict = container[0]
        return Conclusion("container", 2, verdict.code, f"{witness.worker}: {verdict.reason}", witness.worker)
    return next((told for each in judged if (told := _lesser(*each)) is not None), None)


def _lesser(witness: Witness, finding: Finding, verdict: recovery.Verdict) -> Conclusion | None:
    """What keeps level 1 but has a name of its own; None for a check that failed by itself."""
    if finding.scope == "software":
        return None
    fault_class = verdict.fault_class
    if finding.finding == "hang.frozen":
        fault_class = HANG
    elif finding.scope == "slow":
        fault_class = SLOW
    elif finding.finding.endswith(".link"):
        fault_class = LINK
    text = f"{witness.worker}: {verdict.reason}"
    return Conclusion(fault_class, verdict.level, verdict.code, text, witness.worker)


def _shared_by_most(case: Case) -> tuple[Finding, str] | None:
    """A fault of storage or network that most of those who were checked have, two of them at least."""
    checked = [witness for witness in case.witnesses if witness.checked]
    having: dict[str, list[tuple[str, Finding]]] = {}
    for witness in checked:
        for finding in witness.findings:
            if _of_a_dependency(finding, len(checked)):
                having.setdefault(finding.check, []).append((witness.worker, finding))
    for each in having.values():
        workers = list(dict.fromkeys(worker for worker, _ in each))
        if len(workers) >= 2 and 2 * len(workers) > len(checked):
            return each[0][1], f"{len(workers)} of {len(checked)} workers"
    return None


def _of_a_dependency(finding: Finding, checked: int) -> bool:
    """Whether this may be a fault of what nodes share. A link has two ends, and both tell of it."""
    if finding.scope in ("slow", "software"):
        return False
    shared_network = finding.scope == "network" and checked > 2 and not finding.finding.endswith(".link")
    return finding.check == "io" or shared_network


def _confirming(witness: Witness) -> str:
    """Words of this worker that say the same as its finding."""
    told = [signature for failure in witness.failures if (signature := signature_of(failure)) is not None]
    classes = dict.fromkeys(signature.fault_class for signature in told if signature.action == "isolate_node")
    return f", and its ranks' words say so too ({', '.join(classes)})" if classes else ""


# ------------------------------------------------------------ stacks


def _by_stacks(case: Case) -> Conclusion | None:
    """Stacks that were taken before the stop, compared over all nodes."""
    where = {rank: witness.worker for witness in case.witnesses for rank in witness.stacks}
    read = {rank: stacks.unpack(text) for witness in case.witnesses for rank, text in witness.stacks.items()}
    compared = stacks.compare(read)
    if compared.odd and compared.desync:
        rank = compared.odd[0]
        text = f"a deadlock: odd one out is {compared.describe()}"
        return Conclusion(HANG, 1, "hang.desync", f"{where[rank]}: {text}", where[rank])
    if case.verdict:
        return Conclusion(HANG, 1, f"hang.{case.verdict}", f"{case.root}: {case.verdict}", case.root)
    return None


# ------------------------------------------------------------ words and exits

_Told = tuple[str, int, str]
# What the words of the root point at: class, level, in words. `isolate_node` sends nobody away by itself.
_BY_ACTION: Mapping[signatures.Action, _Told] = {
    "restart_in_place": ("process", 1, "a restart in place answers it"),
    "restart_container": ("container", 2, "the container's surroundings are broken"),
    "isolate_node": ("unknown", 1, "no check confirms it, and nobody is sent away for words"),
    "diagnose": ("process", 1, "the checks found no fault of a machine"),
    "wait": (DEPENDENCY, 1, "something is down for a while, and no node is to blame"),
    "fallback_checkpoint": (CHECKPOINT, 1, "RESUME FROM THE CHECKPOINT BEFORE: this one can't be read"),
    "fail_fast": ("process", 1, "an error of the user's own, it seems"),
}


def _by_words(case: Case) -> Conclusion:
    root = next((witness for witness in case.witnesses if witness.worker == case.root), None)
    slow = peer_figures.slow_storage({each.worker: each.figures for each in case.witnesses})
    if root is not None and root.lost:
        return Conclusion("process", 1, "agent.lost", "", case.root)
    failure = root_failure(root.failures) if root is not None else None
    checked = bool(root is not None and root.checked)
    if failure is None:
        why = (root.reason if root is not None else "") or "nobody says how it ended"
        return Conclusion("unknown", 1, "", f"nothing tells what it was: {why}", case.root)
    again = repetition(case)
    if again.kind == "bug":
        return Conclusion(USER_BUG, 1, "user.repeated", again.words, case.root)
    signature, speaker = _telling(failure, root.kernel if root is not None else ())
    fault_class, level, code = "process", 1, ""
    text = recovery.PROCESS.reason if checked else "the process ended by itself, and nothing was checked"
    if signature is not None:
        fault_class, level, words = _BY_ACTION.get(signature.action, ("process", 1, ""))
        if signature.action == "diagnose" and not checked:
            fault_class, words = "unknown", "nothing was checked"
        code = f"signature.{signature.fault_class}"
        text = f"{speaker} {signature.fault_class}: {words}"
    if slow:
        text += "; " + "; ".join(f"the storage of {worker} is slow: {what}" for worker, what in slow.items())
    if again.words:
        text += f"; {again.words}"
    return Conclusion(fault_class, level, code, text, case.root)


def root_failure(failures: Sequence[Failure]) -> Failure | None:
    """Of one worker's failures the one that looks most like a root, the earliest of equals."""
    return min(failures, key=lambda each: (role_of(each) != "root", each.time), default=None)


def _telling(failure: Failure, kernel: Sequence[str]) -> tuple[Signature | None, str]:
    """The signature that says most, and who speaks. The kernel knows why it killed better than the killed."""
    for line in kernel:
        signature = signatures.load().classify(line)
        if signature is not None and signature.action != "ignore":
            return signature, "the kernel says"
    return signature_of(failure), "signature"


class Repetition(NamedTuple):
    """Whether the same failure came again: "bug" (no progress in between), "unknown" or "no"."""

    kind: Literal["bug", "unknown", "no"]
    words: str = ""


def repetition(case: Case) -> Repetition:
    """The user's error is the one that comes again without any progress in between."""
    root = next((witness for witness in case.witnesses if witness.worker == case.root), None)
    failure = root_failure(root.failures) if root is not None else None
    mine = fingerprint_of(failure) if failure is not None else None
    if mine is None or case.earlier is None or case.earlier.print != mine:
        return Repetition("no")
    same = f"the same exception at the same place as before ({mine.frame})"
    if case.unclear or case.step < 0 or case.earlier.step < 0:
        return Repetition("unknown", f"{same}; whether training got further in between is unknown")
    if case.step > case.earlier.step:
        return Repetition("no", f"{same}, but training got from step {case.earlier.step} to {case.step}")
    return Repetition("bug", f"{same}, and training got no further than step {case.step}: the user's error")


def is_users(case: Case) -> str:
    """Why this is the user's own error, for `--aegis-fail-fast`; "" if it isn't known to be.

    Words count at once only as long as training isn't known to have advanced in this incarnation: a sample
    that can't be read after a day of training is no typo, and must come again to be one.
    """
    again = repetition(case)
    if again.kind == "bug":
        return again.words
    root = next((witness for witness in case.witnesses if witness.worker == case.root), None)
    failure = root_failure(root.failures) if root is not None else None
    if failure is None or role_of(failure) != "root":
        return ""
    signature = signature_of(failure)
    if signature is None or signature.action != "fail_fast" or signature.role != "root":
        return ""
    advanced = case.unclear or (case.step >= 0 and case.step > max(case.since, 0))
    return "" if advanced else f"{failure.exception or 'its last lines'} ({signature.fault_class})"


# ------------------------------------------------------------ time


class _Death(NamedTuple):
    worker: str
    name: str
    time: float
    span: clocks.Span | None


def first_death(case: Case) -> tuple[str, str]:
    """("rank 3 of w1", in words how that is known); the name is empty where time doesn't decide."""
    deaths = [
        _Death(
            witness.worker,
            f"rank {failure.rank} of {witness.worker}",
            failure.time,
            clocks.span(failure.time, witness.clock),
        )
        for witness in case.witnesses
        for failure in witness.failures
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
    if first.worker != case.root:
        text += f", though {case.root}'s report came first"
    return first.name, text


def _before(one: _Death, other: _Death) -> bool:
    if one.worker == other.worker:  # one clock
        return one.time + clocks.RESOLUTION_S < other.time
    return clocks.before(one.span, other.span)
