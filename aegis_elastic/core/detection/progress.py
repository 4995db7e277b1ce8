"""Progress: what an agent reports of its ranks' steps, and how long this job may go without one.

No time is fixed: a job that evaluates for ten minutes every hour shows by itself that ten minutes without a
step mean nothing. So patience is learned from the job's own pauses, and until there were enough steps to
learn from, nothing is judged by pauses at all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec

# Without a step for less than this nothing is wrong (a setting: --aegis-hang-after-s).
FLOOR_S = 60.0
# After this many steps the usual pace is known; before, compilation, caches and the first data make it slow.
LEARN_BEATS = 8
# Times the longest pause so far, and times a usual step.
OF_LONGEST = 2.0
OF_STEP = 20.0
# While the pace is unknown: times the floor.
OF_FLOOR_FIRST = 10.0
RANKS_MAX = 4096

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Step = Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
_Time = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
_ShortText = Annotated[str, msgspec.Meta(max_length=8)]
_Text = Annotated[str, msgspec.Meta(max_length=8192)]


class WindowWork(msgspec.Struct, frozen=True, rename="camel"):
    """A rank's own work in one window of iterations, as `usual` computes it, in µs: up to the first
    collective, up to the last, the whole iteration; CPU of the main thread. `serial` grows with every window,
    `count` is its number of iterations. `first_error_us` and `last_error_us`: standard errors of the first
    two. `timed`: the waits between its collectives are subtracted from the second.

    `groups`: ids of the process groups with the rank's equals; the same id on another rank is the same group.
    () if unknown.
    """

    serial: _Count
    count: _Count
    first_us: _Time
    last_us: _Time
    step_us: _Time
    cpu_us: _Time
    groups: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=8)] = ()
    first_error_us: _Time = 0.0
    last_error_us: _Time = 0.0
    timed: bool = False


class RankFacts(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One rank in one sample of its agent.

    `step` -1: it has reported none; `beats`: steps made, the first `first_s` after the start. `idle_s`: since
    the last one, or since the start. `longest_s`, `step_s`: its longest pause so far and its usual one.
    `state` is the kernel's letter, `state_s` how long it has been that in every sample. `stack` as
    `core.detection.stacks.pack` writes it, read only while something is odd; `steady` counts the samples in a
    row at that very place, 0 if it moves; `io_bytes_s` is what it read and wrote between them. On the wire
    `stack_at` is the index of the stack in `Facts.stacks` instead: most ranks wait at the same place.
    """

    rank: _Count
    step: _Step = -1
    beats: _Count = 0
    first_s: _Time = 0.0
    idle_s: _Time = 0.0
    longest_s: _Time = 0.0
    step_s: _Time = 0.0
    state: _ShortText = ""
    state_s: _Time = 0.0
    stack: _Text = ""
    steady: _Count = 0
    io_bytes_s: _Time = 0.0
    ended: bool = False
    own: WindowWork | None = None
    stack_at: _Step = -1


class Saving(msgspec.Struct, frozen=True, rename="camel"):
    """A rank's code reported a complete checkpoint: number of such calls so far, time in wall seconds."""

    rank: _Count
    calls: _Count
    step: _Step
    path: _Text
    time: _Time


class Facts(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """All ranks of one node in one sample, whose number is `look`. Repeated unchanged until the next sample.

    `reached` and `counted` are given when the ranks have ended: the highest step that any of them reported,
    and how many steps the furthest made since its start; -1: unknown.
    """

    look: _Count
    incarnation: _Count
    ranks: Annotated[tuple[RankFacts, ...], msgspec.Meta(max_length=RANKS_MAX)] = ()
    saved: Saving | None = None
    reached: _Step = -1
    counted: _Step = -1
    stacks: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=64)] = ()


_decoder = msgspec.json.Decoder(Facts)
# A watcher's facts are bounded (`core.protocol.messages`): a few distinct stacks are enough, and own work
# goes first.
STACKS_BYTES_MAX = 12_000
FACTS_BYTES_MAX = 30_000


def decode(raw: msgspec.Raw) -> Facts:
    """The facts in a report, as they were before `packed`. Raises msgspec.ValidationError if invalid."""
    facts = _decoder.decode(raw)
    ranks = tuple(
        msgspec.structs.replace(rank, stack=facts.stacks[rank.stack_at], stack_at=-1)
        if 0 <= rank.stack_at < len(facts.stacks)
        else rank
        for rank in facts.ranks
    )
    return msgspec.structs.replace(facts, ranks=ranks, stacks=())


def packed(facts: Facts) -> Facts:
    """The same for the wire: equal stacks once, and of a node with very many ranks only what fits."""
    index: dict[str, int] = {}
    bytes_left = STACKS_BYTES_MAX
    ranks = []
    for rank in facts.ranks:
        stack = rank.stack
        if stack and stack not in index and len(stack) <= bytes_left:
            index[stack] = len(index)
            bytes_left -= len(stack)
        ranks.append(msgspec.structs.replace(rank, stack="", stack_at=index.get(stack, -1)))
    made = msgspec.structs.replace(facts, ranks=tuple(ranks), stacks=tuple(index))
    if len(msgspec.json.encode(made)) > FACTS_BYTES_MAX:
        bare = tuple(msgspec.structs.replace(rank, own=None) for rank in ranks)
        made = msgspec.structs.replace(made, ranks=bare)
    return made


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


def usual(times: Sequence[float]) -> float:
    """The usual time of an iteration in this window: the mean without the quickest and the slowest tenth, one
    of each at least. A throttled rank computes in bursts, so half of its iterations, and so the median, may
    show nothing. A single outlier is left out, as by a median.
    """
    ordered, cut = _cut(times)
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def error_of_usual(times: Sequence[float]) -> float:
    """The standard error of `usual`, from how much the iterations differ among themselves."""
    ordered, cut = _cut(times)
    if len(ordered) < 2:
        return 0.0
    last = len(ordered) - cut - 1
    winsorised = [ordered[min(max(place, cut), last)] for place in range(len(ordered))]
    share = 1 - 2 * cut / len(ordered)
    return statistics.stdev(winsorised) / (share * math.sqrt(len(ordered)))


def _cut(times: Sequence[float]) -> tuple[list[float], int]:
    return sorted(times), max(1, len(times) // 10) if len(times) > 2 else 0


def own_of(ranks: Iterable[RankFacts]) -> Mapping[int, WindowWork]:
    """Own work by rank, of those who know it."""
    return {facts.rank: facts.own for facts in ranks if facts.own is not None}
