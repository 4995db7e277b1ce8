"""Which node or link breaks a collective: adaptive group testing, pure.

Nodes are tested in rounds. A round is a set of disjoint groups of nodes; each group tries to form a process
group and to run an all-reduce, and passes or fails. `plan` gives, from the rounds so far, the next round or
the result.

Model: at most `faults_max` (k) faults. A fault is a broken node (every group with it fails) or a broken link
(every group with both its ends fails); a group without any fault passes. So a passing group proves all its
nodes sound and all its links good, and nothing that has been proven sound is blamed later, whoever it is
paired with. A failing pair means "this node, that node, or the link between them". *Explanations* are the
sets of at most k faults that account for all failing pairs; a node or link is named only if every explanation
has it. What differs between them is returned as `ambiguous`: nothing is isolated for it.

The rounds, n nodes, and why they are few:

1. All nodes at once: 1 round. A healthy world ends here.
2. n >= 4k + 2. All in pairs (an odd one makes a three): 1 round. Groups are disjoint, so each fault spoils at
   most one: at most 2k + 1 nodes are in failing groups, the *suspects*; at least 2k + 1 others are sound.
3. Every suspect meets a sound node of its own, in each round another one (suspect i in round t meets sound
   node i + t; there are at least as many sound ones as suspects, so all of a round are different, and a
   suspect meets no node twice): at most k + 1 rounds. A suspect that passes once is sound. One that fails
   k + 1 times is broken: without it, k + 1 different links would have to be. Every node is decided now.
4. What is left are links among sound nodes. Test the largest groups that avoid the links known to be broken,
   until every two sound nodes have been together in a passing group. Let l links be broken. A passing group
   holds all nodes but some ends of known broken links, so it settles, for good, an end against all that are
   no ends, or two ends against each other; of these there are at most 2l + 2l(l - 1): at most max(1, 2 l^2)
   passing rounds. A failing group has a broken link that wasn't known: halving finds the shortest failing
   prefix, whose last node is one end, and halving again the other end; the pair alone confirms it: at most
   1 + 2 ceil(log2 n) + 1 rounds for each of the l.

Together `rounds_max`: k + 4 for broken nodes, whatever n. With n < 4k + 2 step 2 can leave too few sound
nodes to compare with; then all pairs are tried by the circle method in n - 1 rounds (n if odd), and one more
try of all sound nodes at once, which mostly ends it sooner. There, and only there, explanations can stay
different: of two nodes that fail together nobody can say which it is.

Real faults come and go. Results that no explanation fits (more than k faults, or a failure that doesn't
repeat) end in a result that names no node, with the reason.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

FAULTS_MAX = 2

Group = tuple[int, ...]
Round = tuple[Group, ...]
Link = tuple[int, int]
# (node,) or (node, node) with the smaller first.
Fault = tuple[int, ...]
_Rounds = Generator[Round, tuple[bool, ...], None]


class Tried(NamedTuple):
    """A round that was run: its groups as planned, and for each whether it passed."""

    groups: Round
    passed: tuple[bool, ...]


class Localization(NamedTuple):
    """The result of all rounds.

    `nodes` and `links` are certain. `ambiguous` holds the alternatives for the rest, each a minimal set of
    faults; empty if nothing is left open. `conclusive` is False where the results fit no explanation.
    """

    nodes: tuple[int, ...]
    links: tuple[Link, ...]
    ambiguous: tuple[tuple[Fault, ...], ...]
    rounds: int
    conclusive: bool
    reason: str

    @property
    def healthy(self) -> bool:
        """Nothing is broken."""
        return self.conclusive and not (self.nodes or self.links or self.ambiguous)


def plan(nodes: int, history: Sequence[Tried], faults_max: int = FAULTS_MAX) -> Round | Localization:
    """The next round among nodes 0 to `nodes` - 1, or the result. Pure: the same history, the same answer.

    `history` holds the rounds that `plan` gave, in order; anything else raises `ValueError`.
    """
    if nodes < 2 or faults_max < 1:
        raise ValueError(
            f"cannot plan for {nodes} nodes and {faults_max} faults: at least 2 and 1 are needed"
        )
    search = _Search(nodes, faults_max)
    rounds = search.run()
    try:
        wanted = next(rounds)
        for number, tested in enumerate(history, start=1):
            if tested.groups != wanted or len(tested.passed) != len(wanted):
                raise ValueError(f"round {number} of the history is {tested}, planned was {wanted}")
            wanted = rounds.send(tested.passed)
    except StopIteration:
        return search.verdict()
    return wanted


def rounds_max(nodes: int, faults_max: int = FAULTS_MAX, links: int | None = None) -> int:
    """Proven bound on the rounds to a result where `links` of the faults are links (None: all may be)."""
    if nodes < 4 * faults_max + 2:
        return 1 if nodes == 2 else nodes + 1 + nodes % 2
    count = faults_max if links is None else links
    halvings = (nodes - 1).bit_length()
    return 2 + (faults_max + 1) + max(1, 2 * count**2) + count * (2 + 2 * halvings)


def pair_rounds(nodes: int, rounds_max: int) -> list[list[Link]]:
    """Up to `rounds_max` rounds of disjoint pairs of `nodes` nodes; no pair comes twice (the circle method).

    With an odd count one node sits out in every round.
    """
    slots: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    rounds = []
    for _ in range(min(rounds_max, len(slots) - 1)):
        half = len(slots) // 2
        facing = zip(slots[:half], reversed(slots[half:]), strict=True)
        rounds.append([_link(a, b) for a, b in facing if a is not None and b is not None])
        slots = [slots[0], slots[-1], *slots[1:-1]]
    return rounds


def explanations(
    failing: Iterable[Link], sound: Iterable[int], good: Iterable[Link], faults_max: int
) -> list[frozenset[Fault]]:
    """All minimal sets of at most `faults_max` faults that account for every failing pair.

    Nodes in `sound` and links in `good` are no candidates.
    """
    pairs, innocent, cleared = sorted(set(failing)), set(sound), set(good)
    found: set[frozenset[Fault]] = set()

    def extend(chosen: frozenset[Fault]) -> None:
        for a, b in pairs:
            if not chosen & {(a,), (b,), (a, b)}:
                break
        else:
            found.add(chosen)
            return
        if len(chosen) == faults_max:
            return
        for fault in [(node,) for node in (a, b) if node not in innocent] + [(a, b)]:
            if fault not in cleared:
                extend(chosen | {fault})

    extend(frozenset())
    return [each for each in found if not any(other < each for other in found)]


class _Search:
    """What is known so far, and the strategy, written as a generator of rounds that is sent their results."""

    def __init__(self, nodes: int, faults_max: int) -> None:
        self._nodes, self._faults_max = nodes, faults_max
        # Bit b of entry a: a and b have been in one passing group. Bits, because thousands of nodes may come.
        self._with = [0] * nodes
        self._failed: set[Group] = set()
        self._rounds = 0
        self._unfit = ""

    def run(self) -> _Rounds:
        """Yield rounds until the result is clear."""
        world = tuple(range(self._nodes))
        yield from self._run_round([world])
        if self._clean(world):
            return
        if self._nodes < 4 * self._faults_max + 2:
            yield from self._every_pair()
        else:
            yield from self._suspects()
            if not self._unfit:
                yield from self._links()

    def verdict(self) -> Localization:
        """What is known now, as the result."""
        pairs = self._failing_pairs()
        if not self._failed:
            return self._localization(reason="all nodes together pass")
        found = self._explanations()
        if not self._unfit and not pairs:
            self._unfit = "all nodes together failed, and then every part of them passed"
        elif not self._unfit and not found:
            self._unfit = f"no {self._faults_max} faults account for the failures of {_pairs(pairs)}"
        if self._unfit:
            return self._localization(conclusive=False, reason=self._unfit)
        certain = frozenset.intersection(*found)
        left = sorted(tuple(sorted(each - certain)) for each in found if each != certain)
        tried = f"{_pairs(pairs)} fail"
        if left:
            return self._localization(certain, left, reason=f"{tried}, which {len(found)} explanations fit")
        return self._localization(certain, reason=f"{tried}, which nothing else explains")

    def _localization(
        self,
        certain: frozenset[Fault] = frozenset(),
        ambiguous: Sequence[tuple[Fault, ...]] = (),
        conclusive: bool = True,
        reason: str = "",
    ) -> Localization:
        nodes = tuple(sorted(fault[0] for fault in certain if len(fault) == 1))
        links = tuple(sorted((fault[0], fault[1]) for fault in certain if len(fault) == 2))
        return Localization(nodes, links, tuple(ambiguous), self._rounds, conclusive, reason)

    def _run_round(self, groups: Sequence[Group]) -> _Rounds:
        passed = yield tuple(groups)
        self._rounds += 1
        for group, good in zip(groups, passed, strict=True):
            if not good:
                self._failed.add(group)
                continue
            mask = sum(1 << node for node in group)
            for node in group:
                self._with[node] |= mask

    def _sound(self, node: int) -> bool:
        return self._with[node] != 0

    def _good(self, a: int, b: int) -> bool:
        return bool(self._with[a] >> b & 1)

    def _clean(self, group: Group) -> bool:
        """Every two of the group have been in a passing one, so it would pass itself."""
        mask = sum(1 << node for node in group)
        return len(group) < 2 or all(self._with[node] & mask == mask for node in group)

    def _failing_pairs(self) -> list[Link]:
        return sorted((group[0], group[1]) for group in self._failed if len(group) == 2)

    def _explanations(self) -> list[frozenset[Fault]]:
        pairs = self._failing_pairs()
        sound = [node for node in range(self._nodes) if self._sound(node)]
        good = [(a, b) for a, b in pairs if self._good(a, b)]
        return explanations(pairs, sound, good, self._faults_max)

    def _broken(self) -> set[int]:
        """The nodes that every explanation has."""
        found = self._explanations()
        certain = frozenset[Fault]().union(*found[:1]).intersection(*found)
        return {fault[0] for fault in certain if len(fault) == 1}

    def _every_pair(self) -> _Rounds:
        """All pairs in turn; ends as soon as all sound nodes have passed together."""
        tried_rest = False
        for pairs in pair_rounds(self._nodes, self._nodes):
            broken = self._broken()
            ask = [pair for pair in pairs if not broken.intersection(pair) and self._unknown(*pair)]
            if ask:
                yield from self._run_round(ask)
            broken = self._broken()
            rest = tuple(node for node in range(self._nodes) if node not in broken)
            if not broken or not all(map(self._sound, rest)) or self._clean(rest):
                continue
            if not tried_rest and not any(set(pair) <= set(rest) for pair in self._failing_pairs()):
                tried_rest = True
                yield from self._run_round([rest])

    def _unknown(self, a: int, b: int) -> bool:
        return not self._good(a, b) and (a, b) not in self._failed

    def _suspects(self) -> _Rounds:
        """Decide every node: sound or broken."""
        starts = range(0, self._nodes - 1, 2)
        pairs: list[Group] = [(start, start + 1) for start in starts]
        if self._nodes % 2:
            pairs[-1] = (*pairs[-1], self._nodes - 1)
        yield from self._run_round(pairs)
        sound = [node for node in range(self._nodes) if self._sound(node)]
        suspects = [node for node in range(self._nodes) if not self._sound(node)]
        bad = sum(pair in self._failed for pair in pairs)
        if bad > self._faults_max:
            self._unfit = f"{bad} of {len(pairs)} disjoint groups fail: more than {self._faults_max} faults"
            return
        for turn in range(self._faults_max + 1):
            broken = self._broken()
            ask = [
                _link(node, sound[(index + turn) % len(sound)])
                for index, node in enumerate(suspects)
                if not self._sound(node) and node not in broken
            ]
            if not ask:
                return
            yield from self._run_round(ask)

    def _links(self) -> _Rounds:
        """Find every broken link between sound nodes."""
        broken = self._broken()
        rest = [node for node in range(self._nodes) if node not in broken]
        # Also a limit for results that contradict each other: each turn settles two nodes at least.
        while (group := self._unsettled(rest)) and self._explanations():
            if group not in self._failed:
                yield from self._run_round([group])
            if group in self._failed:
                yield from self._find_link(group)
            if self._unfit:
                return

    def _unsettled(self, rest: Sequence[int]) -> Group:
        """A largest group without a broken link that has two nodes of which nothing is known; () if none."""
        whole = sum(1 << node for node in rest)
        broken = dict.fromkeys(rest, 0)
        for a, b in self._failing_pairs():
            if a in broken and b in broken:
                broken[a] |= 1 << b
                broken[b] |= 1 << a
        for first in rest:
            unknown = whole & ~(self._with[first] | broken[first] | 1 << first)
            if unknown:
                second = unknown.bit_length() - 1
                chosen = 1 << first | 1 << second
                for node in rest:
                    if not broken[node] & chosen:
                        chosen |= 1 << node
                return tuple(node for node in rest if chosen >> node & 1)
        return ()

    def _find_link(self, group: Group) -> _Rounds:
        """One broken link in a failing group of sound nodes."""
        end = yield from self._shortest_failing(group, ())
        other = yield from self._shortest_failing(group[:end], (group[end],))
        pair = _link(group[end], group[other])
        if self._unknown(*pair):
            yield from self._run_round([pair])
        if pair not in self._failed:
            a, b = pair
            self._unfit = (
                f"{len(group)} nodes failed together, but {a} and {b}, left over as the cause, pass alone"
            )

    def _shortest_failing(self, group: Group, last: Group) -> Generator[Round, tuple[bool, ...], int]:
        """Index of the node with which `last` and the nodes of `group` up to it fail; all of them do."""
        low, high = 0 if last else 1, len(group)
        while high - low > 1:
            middle = (low + high) // 2
            part = tuple(sorted((*group[:middle], *last)))
            if not self._clean(part) and part not in self._failed:
                yield from self._run_round([part])
            low, high = (low, middle) if part in self._failed else (middle, high)
        return high - 1


def _link(a: int, b: int) -> Link:
    return (a, b) if a < b else (b, a)


def _pairs(pairs: Sequence[Link]) -> str:
    shown = ", ".join(f"{a}-{b}" for a, b in pairs[:8])
    return f"{shown} and {len(pairs) - 8} more" if len(pairs) > 8 else shown
