"""Stacks of ranks, compared: which rank is not where the others are.

When most ranks wait in a collective operation and one doesn't, that one is what they wait for. Ranks are
grouped by the places that their main threads went through: every function with its file, and the line of
every call but the innermost, where a rank that works on is at another line in every sample. So two ranks that
wait in `barrier`, called from different lines, are at different places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

# Enough to distinguish calls, and small enough to be reported for every rank.
FRAMES_MAX = 24
_SEPARATOR = " < "

# Files and functions in which a rank waits for its peers. Functions count only inside torch's or a
# communication library's own files: a user's `wait` may be anything.
_COLLECTIVE_FILES = (
    "torch/distributed/",
    "torch/nn/parallel/distributed",
    "torch/autograd/",  # backward: DDP's buckets wait there for their reduction
    "torch/cuda/",  # synchronize: the device waits, behind a collective or its own work
)
_COLLECTIVE_FUNCTIONS = frozenset(
    {
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "monitored_barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "recv",
        "send",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "batch_isend_irecv",
        "_run_backward",
        "_engine_run_backward",
        "synchronize",
        "wait",
        "get",  # of a store, in a rendezvous
    }
)
# Frames of libraries are not where a person looks first.
_INSTALLED = re.compile(r"^.*/(?:site|dist)-packages/")
_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python", "<frozen ", "<string>")


class Frame(msgspec.Struct, frozen=True):
    """One call: function, file, and the line it is at."""

    function: str
    file: str
    line: int

    def describe(self) -> str:
        """ "train.py:40 (step)", for a person."""
        return f"{self.file}:{self.line} ({self.function})"


Stack = tuple[Frame, ...]  # innermost first


class Cluster(msgspec.Struct, frozen=True):
    """Ranks that stand at the same place; `stack` is that of the first of them."""

    ranks: tuple[int, ...]
    stack: Stack
    collective: bool


class Comparison(msgspec.Struct, frozen=True):
    """All clusters, the largest first, and the ranks that are not where most are.

    `desync`: most ranks wait in a collective and the odd ones don't wait in the same: if it stays so, that is
    a deadlock. No rank is odd when there is no majority.
    """

    clusters: tuple[Cluster, ...]
    odd: tuple[int, ...]
    desync: bool

    def describe(self) -> str:
        """One line: which rank is odd, at which function and line, and where the others are."""
        if not self.odd:
            return ""
        most = self.clusters[0]
        where = {rank: cluster.stack for cluster in self.clusters for rank in cluster.ranks}
        odd = "; ".join(f"rank {rank} is at {own_frame(where[rank]).describe()}" for rank in self.odd)
        doing = "wait at" if most.collective else "are at"
        others = f"{len(most.ranks)} others {doing} {own_frame(most.stack).describe()}"
        inside = f" in {waits_in(most.stack)}" if most.collective else ""
        return f"{odd}, while {others}{inside}"


def compare(stacks: Mapping[int, Sequence[Frame]]) -> Comparison:
    """Group ranks by where they stand. Ranks without a stack (empty) are left out: unknown isn't odd."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(stacks):
        if stacks[rank]:
            groups.setdefault(place(stacks[rank]), []).append(rank)
    # The lowest rank decides between equals, so that the result is the same everywhere.
    ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    clusters = tuple(
        Cluster(tuple(ranks), tuple(stacks[ranks[0]]), bool(waits_in(stacks[ranks[0]]))) for ranks in ordered
    )
    known = sum(len(cluster.ranks) for cluster in clusters)
    if len(clusters) < 2 or len(clusters[0].ranks) <= known / 2:
        return Comparison(clusters, (), False)
    odd = tuple(sorted(rank for cluster in clusters[1:] for rank in cluster.ranks))
    return Comparison(clusters, odd, clusters[0].collective)


def waits_in(stack: Iterable[Frame]) -> str:
    """The operation in which a rank waits for its peers, "" if it doesn't."""
    for frame in stack:
        if frame.function in _COLLECTIVE_FUNCTIONS and any(part in frame.file for part in _COLLECTIVE_FILES):
            return frame.function
    return ""


def waits(stack: Iterable[Frame]) -> str:
    """As `waits_in`, unless something of the user's runs inside that operation (a hook in backward may)."""
    for frame in stack:
        operation = waits_in((frame,))
        if operation or not any(part in frame.file for part in _LIBRARIES):
            return operation
    return ""


def own_frame(stack: Sequence[Frame]) -> Frame:
    """The innermost frame of the user's own code; the innermost at all if none is."""
    return next((frame for frame in stack if not any(part in frame.file for part in _LIBRARIES)), stack[0])


def place(stack: Sequence[Frame]) -> tuple[object, ...]:
    """What is equal for two stacks at the same place: all but the line of the innermost call."""
    innermost, *callers = stack
    return (innermost.function, innermost.file, *((each.function, each.file, each.line) for each in callers))


def pack(stack: Sequence[Frame]) -> str:
    """A stack as one line of text, innermost first, cut to `FRAMES_MAX`; `unpack` reads it.

    Where a node keeps its libraries is left out: that differs between nodes and says nothing.
    """
    return _SEPARATOR.join(
        f"{frame.function}@{_INSTALLED.sub('site-packages/', frame.file)}:{frame.line}"
        for frame in stack[:FRAMES_MAX]
    )


def unpack(text: str) -> Stack:
    """The stack in a line of `pack`; what can't be read is left out, since any node may have written it."""
    frames = []
    for part in text.split(_SEPARATOR):
        function, at, place = part.partition("@")
        file, colon, line = place.rpartition(":")
        if at and colon and line.isdigit():
            frames.append(Frame(function, file, int(line)))
    return tuple(frames)
