"""What an agent tells of its ranks' progress, and how long this job is known to go without a step.

No time is fixed: a job that evaluates for ten minutes every hour shows by itself that ten minutes without a
step mean nothing. So patience is learned from the job's own pauses, and until there were enough steps to
learn from, nothing is judged by pauses at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

# Without a step for less than this nothing is wrong (a setting: --aegis-hang-after-s).
FLOOR_S = 60.0
# So many steps show how the job goes; before, compilation, caches and the first data make it slow.
LEARN_BEATS = 8
# Times the longest pause so far, and times a usual step.
OF_LONGEST = 2.0
OF_STEP = 20.0
# As long as nothing is learned: times the floor.
OF_FLOOR_FIRST = 10.0
RANKS_MAX = 4096

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Step = Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
_Time = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
_Word = Annotated[str, msgspec.Meta(max_length=8)]
_Text = Annotated[str, msgspec.Meta(max_length=8192)]


class Own(msgspec.Struct, frozen=True, rename="camel"):
    """Own work of one window of iterations, medians in µs: up to the first collective, up to the last, the
    whole iteration; CPU of the main thread. `serial` grows with every window, `count` are its iterations.
    """

    serial: _Count
    count: _Count
    first_us: _Time
    last_us: _Time
    step_us: _Time
    cpu_us: _Time


class RankFacts(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One rank as its agent saw it at one look.

    `step` -1: it has told of none; `beats` how many it made. `idle_s` since the last one, or since the start.
    `longest_s`, `step_s`: its longest pause so far and its usual one. `state` is the kernel's letter,
    `state_s` how long it has been that at every look. `stack` as `core.stacks.pack` writes it, read only
    while something is odd; `steady` counts the looks in a row that found it at that very place.
    """

    rank: _Count
    step: _Step = -1
    beats: _Count = 0
    idle_s: _Time = 0.0
    longest_s: _Time = 0.0
    step_s: _Time = 0.0
    state: _Word = ""
    state_s: _Time = 0.0
    stack: _Text = ""
    steady: _Count = 0
    ended: bool = False
    own: Own | None = None


class Saving(msgspec.Struct, frozen=True, rename="camel"):
    """A rank's code said that a checkpoint is complete: its number among those that it said, wall seconds."""

    rank: _Count
    calls: _Count
    step: _Step
    path: _Text
    time: _Time


class Facts(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """All ranks of one node. Repeated as it is until the next look, which has the next number.

    `reached` and `counted` are told when they have ended: the highest step that any of them has said, and how
    many steps the furthest has made since it was started; -1: nobody knows.
    """

    look: _Count
    incarnation: _Count
    ranks: Annotated[tuple[RankFacts, ...], msgspec.Meta(max_length=RANKS_MAX)] = ()
    saved: Saving | None = None
    reached: _Step = -1
    counted: _Step = -1


_decoder = msgspec.json.Decoder(Facts)


def decode(raw: msgspec.Raw) -> Facts:
    """The facts in a report. msgspec.ValidationError for whatever they can't be."""
    return _decoder.decode(raw)


def patience_s(ranks: Iterable[RankFacts], floor_s: float = FLOOR_S) -> float:
    """How long this job may go without a step before that means anything, learned from all of its ranks."""
    beats, longest_s, step_s = 0, 0.0, 0.0
    for facts in ranks:
        beats = max(beats, facts.beats)
        longest_s = max(longest_s, facts.longest_s)
        step_s = max(step_s, facts.step_s)
    if beats < LEARN_BEATS:
        return max(OF_FLOOR_FIRST * floor_s, OF_LONGEST * longest_s)
    return max(floor_s, OF_LONGEST * longest_s, OF_STEP * step_s)


def own_of(ranks: Iterable[RankFacts]) -> Mapping[int, Own]:
    """Own work by rank, of those who know it."""
    return {facts.rank: facts.own for facts in ranks if facts.own is not None}
