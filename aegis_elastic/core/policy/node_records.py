"""Node records, over all jobs: which nodes must not be used and until when, and which fail repeatedly.

One record a node, shared by all jobs of a store. A *taint* keeps the node out, one of each kind at most, so
that an operator's two hours don't shorten what a check has found. When a taint of kind "hardware" runs out
the node is on *probation*: it may come back by passing check and burn, and only so, since a broken card does
not heal by waiting. An operator's untaint overrides both.

The *lemon score* adds up a node's incidents, and decays: incidents that are a half-life old count half. It
never keeps a node out; it orders nodes when there is a choice.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

HARDWARE, SLOW, HANG, MANUAL = "hardware", "slow", "hang", "manual"
KINDS = (HARDWARE, SLOW, HANG, MANUAL)
# Observations: of the machine (counts a little), or of what ran on it (for the history only).
ANOMALY, NOTICE = "anomaly", "notice"

# Repeat offenders are riskier for days: after three of them an incident counts half, after ten a tenth.
HALF_LIFE_S = 3 * 86400.0
WEIGHT = {HARDWARE: 1.0, SLOW: 0.5, HANG: 0.5, ANOMALY: 0.05}
# One leaking process is observed every second; that is one anomaly, not thousands.
ANOMALY_REPEAT_S = 3600.0
# The part of a node's history that is kept, for people and to detect repetitions; the score has the rest.
INCIDENTS_MAX = 16
TEXT_CHARS_MAX = 300


class NodeTaint(msgspec.Struct, frozen=True, rename="camel"):
    """Why a node must not be used. `until` in wall seconds, 0 for no end; `job`: the one that tainted it."""

    reason: str
    kind: str
    time: float
    job: str
    until: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"cannot taint with kind {self.kind!r}: want one of {', '.join(KINDS)}")

    def stands(self, now: float) -> bool:
        """Whether it has not run out."""
        return self.until == 0 or now < self.until


class Incident(msgspec.Struct, frozen=True, rename="camel"):
    """An incident that a job had with a node. `job` and `time` distinguish it from others of its code."""

    code: str
    kind: str
    time: float
    job: str


class Isolated(msgspec.Struct, frozen=True, rename="camel"):
    """A node that was taken from its scheduler: by which driver, when, for which job."""

    driver: str
    time: float
    job: str


class NodeRecord(msgspec.Struct, frozen=True, rename="camel"):
    """All that is known of one node. `score` is what it was at `scored_at` (wall seconds)."""

    node_name: str
    taints: tuple[NodeTaint, ...] = ()
    incidents: tuple[Incident, ...] = ()
    score: float = 0.0
    scored_at: float = 0.0
    isolated: Isolated | None = None


class Standing(str, enum.Enum):
    """Whether a node may take part."""

    FREE = "free"
    TAINTED = "tainted"
    PROBATION = "probation"


class NodeStanding(NamedTuple):
    """A node's standing now: by which taint (None when free), and the reason as text."""

    standing: Standing
    taint: NodeTaint | None
    why: str

    @property
    def free(self) -> bool:
        """Whether the node may take part."""
        return self.standing is Standing.FREE


def condemned(record: NodeRecord, now: float) -> NodeTaint | None:
    """The taint in force by a finding of a check or of the storm guard, if any; not an operator's."""
    return next((each for each in record.taints if each.kind != MANUAL and each.stands(now)), None)


def judge(record: NodeRecord, now: float) -> NodeStanding:
    """Whether this node may take part at `now` (wall seconds), and why not."""
    standing = [taint for taint in record.taints if taint.stands(now)]
    if standing:
        # The one that keeps it out longest: another would promise too early a return.
        taint = max(standing, key=lambda each: each.until or float("inf"))
        return NodeStanding(Standing.TAINTED, taint, f"{taint.kind}: {taint.reason}, says {taint.job}")
    broken = next((taint for taint in record.taints if taint.kind == HARDWARE), None)
    if broken is not None:
        how = "it returns by passing check and burn (aegisctl probation there), or by an untaint"
        why = f"on probation after {broken.reason}: {how}"
        return NodeStanding(Standing.PROBATION, broken, why)
    return NodeStanding(Standing.FREE, None, "")


def changes_at(record: NodeRecord, now: float) -> float:
    """When (wall seconds) this node's standing next changes by time alone; infinity for never."""
    return min((taint.until for taint in record.taints if taint.until > now), default=float("inf"))


def with_taint(record: NodeRecord, taint: NodeTaint) -> NodeRecord:
    """The record with this taint in place of an older one of its kind. The same one twice changes nothing."""
    if taint in record.taints:
        return record
    others = tuple(each for each in record.taints if each.kind != taint.kind)
    changed = msgspec.structs.replace(record, taints=(*others, taint))
    if taint.kind == MANUAL:
        return changed  # an operator's plan is no incident of the node
    return with_incident(changed, Incident(taint.reason, taint.kind, taint.time, taint.job))


def had_taint(record: NodeRecord, taint: NodeTaint) -> bool:
    """Whether this taint was ever entered, though it may have been lifted since."""
    return taint in record.taints or any(
        (each.job, each.time, each.kind) == (taint.job, taint.time, taint.kind) for each in record.incidents
    )


def without_taints(record: NodeRecord, kinds: Iterable[str] = KINDS) -> NodeRecord:
    """The record without its taints (of these kinds); incidents and score stay."""
    gone = set(kinds)
    return msgspec.structs.replace(
        record, taints=tuple(taint for taint in record.taints if taint.kind not in gone)
    )


def after_probation(record: NodeRecord, now: float, failure: str, job: str, until: float) -> NodeRecord:
    """The record after a probation: passed if `failure` is empty, else tainted until `until` (0: no end)."""
    if judge(record, now).standing is not Standing.PROBATION:
        return record  # an operator or another job decided otherwise meanwhile
    free = without_taints(record, (HARDWARE,))
    if not failure:
        return free
    reason = clip(f"probation not passed: {failure}")
    return with_taint(free, NodeTaint(reason, HARDWARE, now, job, until))


def with_incident(record: NodeRecord, incident: Incident) -> NodeRecord:
    """The record with one more incident, unless it has that one; a repeated anomaly changes nothing."""
    for known in record.incidents:
        if known == incident:
            return record
        lately = abs(incident.time - known.time) < ANOMALY_REPEAT_S
        same = (incident.code, incident.kind) == (known.code, known.kind)
        if same and lately and incident.kind in (ANOMALY, NOTICE):
            return record
    at = max(record.scored_at, incident.time)
    # One that arrives late has faded already by as much as its age.
    added = WEIGHT.get(incident.kind, 0.0) * _fade(at - incident.time)
    return msgspec.structs.replace(
        record,
        incidents=_newest((*record.incidents, incident)),
        score=score(record, at) + added,
        scored_at=at,
    )


def score(record: NodeRecord, now: float) -> float:
    """The node's score at `now`: 0 for a clean one, 1 for a hardware fault just found; no upper bound."""
    return record.score * _fade(now - record.scored_at)


def least_risky_first(names: Iterable[str], records: Mapping[str, NodeRecord], now: float) -> list[str]:
    """These nodes, the cleanest first; among equals the order stays."""
    return sorted(names, key=lambda name: score(records[name], now) if name in records else 0.0)


def is_idle(record: NodeRecord, now: float) -> bool:
    """Whether nothing in the record matters any more, so that it may be deleted."""
    forgotten = score(record, now) < WEIGHT[ANOMALY] / 10
    return not record.taints and record.isolated is None and forgotten


def as_row(record: NodeRecord, now: float) -> dict[str, Any]:
    """The node as `aegisctl nodes --json` shows it; times in wall seconds, ages in seconds."""
    verdict = judge(record, now)
    taint = verdict.taint
    return {
        "nodeName": record.node_name,
        "standing": verdict.standing.value,
        "kind": taint.kind if taint else "",
        "reason": taint.reason if taint else "",
        "job": taint.job if taint else "",
        "time": taint.time if taint else 0.0,
        "age_s": max(now - taint.time, 0.0) if taint else 0.0,
        "until": taint.until if taint else 0.0,
        "score": round(score(record, now), 3),
        "incidents": [msgspec.to_builtins(incident) for incident in record.incidents],
        "isolatedBy": record.isolated.driver if record.isolated else "",
    }


def clip(text: str) -> str:
    """Text from elsewhere on one line, without control characters, of bounded length."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split())[:TEXT_CHARS_MAX]


def _newest(incidents: tuple[Incident, ...]) -> tuple[Incident, ...]:
    """The newest few. Observations are dropped first: they must not displace what a taint is known by."""
    while len(incidents) > INCIDENTS_MAX:
        oldest = min(incidents, key=lambda each: (each.kind not in (ANOMALY, NOTICE), each.time))
        incidents = tuple(each for each in incidents if each is not oldest)
    return incidents


def _fade(age_s: float) -> float:
    # Clocks of nodes differ: a time ahead of ours counts as now.
    return float(0.5 ** (max(age_s, 0.0) / HALF_LIFE_S))
