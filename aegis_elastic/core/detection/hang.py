"""Training has stopped: who or what holds it up? Four verdicts, each by evidence of its own.

    frozen       a rank can't move: its process is stopped, its main thread is dead, or the kernel holds it
    desync       a deadlock that can be shown: ranks wait for one another in a collective, and one stands
                 still elsewhere, or in another collective
    stalled      no step, and none of the above: evaluation, saving, compiling, a slow network; people decide
    unreachable  an agent is silent while steps advance (control.controllers.progress knows who was heard)

Patience comes first: as long as somebody makes steps, or the pause is one that this job has made before,
there is no verdict at all. Then stacks, several looks apart. Only what stands at the very same place at every
look is called still, and what saves, compiles or imports is never held against a rank: rank 0 writing a
checkpoint ten times longer than usual looks, from outside, exactly like a rank that will never come. Nor is
whoever is awaited at a barrier: who puts one there expects some ranks long before others, as when one of them
evaluates. When in doubt the verdict is stalled, which restarts nothing.

A heartbeat is seen from outside, by the process's state: a thread of ours inside the rank would stop with
any extension that holds the interpreter, and call a healthy compilation frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aegis_elastic.core.detection import stacks
from aegis_elastic.core.detection.progress import FLOOR_S, RankFacts, patience_s
from aegis_elastic.core.detection.stacks import Stack
from aegis_elastic.core.model import Verdict

# Looks in a row at one place before a rank counts as still, and the longest wait for everybody's looks.
STEADY_LOOKS = 3
LOOKS_WITHIN_S = 9.0
# A job that tells of no steps is judged by process states alone, after this.
NO_STEPS_S = 120.0
# A process may be in the kernel for a while (a slow file system), and stopped for a moment.
STOPPED_S = 2.0
KERNEL_S = 30.0
_STOPPED = {"T": "is stopped (SIGSTOP)", "Z": "has no main thread any more", "X": "is dead"}
_KERNEL = "D"

# Work that a rank may do alone for a long time while its peers wait. Places in files, innermost call first.
_EXCUSES = (
    ("saves", ("torch/serialization.py", "torch/distributed/checkpoint/", "safetensors/", "numpy/lib/")),
    ("saves", ("/pickle.py", "/shutil.py", "/tarfile.py", "/zipfile.py", "h5py/")),
    ("compiles", ("torch/_dynamo/", "torch/_inductor/", "torch/_functorch/", "torch/utils/cpp_extension")),
    ("compiles", ("triton/", "numba/", "jax/", "/subprocess.py")),
    ("imports", ("<frozen importlib",)),
    ("transfers files", ("/ssl.py", "/socket.py", "/http/", "urllib3/", "requests/", "httpx/", "aiohttp/")),
    ("transfers files", ("fsspec/", "s3fs/", "boto", "gcsfs/", "huggingface_hub/")),
)
# Who reads and writes so much is at work, whatever its code is called.
IO_BYTES_S = 1e6
_BARRIERS = ("barrier", "monitored_barrier")


class ObservedRank(NamedTuple):
    """A rank, as its agent told of it last."""

    facts: RankFacts
    worker: str
    node_name: str


class Hang(NamedTuple):
    """A verdict, whom it is about (for stalled: the first rank), and why, with numbers. Not `sure`: looks are
    missing, so it is no reason to take back what was seen before.
    """

    verdict: Verdict
    seen: ObservedRank
    reason: str
    sure: bool = True


class Judgement(NamedTuple):
    """`moves`: somebody makes steps, or the pause is no longer than others were. `hang`: what holds it up,
    None if nothing does, or if it can't be said yet.
    """

    moves: bool
    hang: Hang | None = None


def judge(
    ranks: Sequence[ObservedRank], floor_s: float = FLOOR_S, no_steps_s: float = NO_STEPS_S
) -> Judgement:
    """What holds the training up. `ranks`: all of the job, those that have ended too. `untold_s`: after how
    long process states alone tell, of a job that tells of no steps.
    """
    alive = [seen for seen in ranks if not seen.facts.ended]
    told = [seen for seen in alive if seen.facts.beats]
    patience = patience_s([seen.facts for seen in told], floor_s)
    if any(seen.facts.idle_s < patience for seen in told) or not alive:
        return Judgement(True)
    idle_s = min((seen.facts.idle_s for seen in told), default=0.0)
    frozen = _frozen(alive, patience if told else max(no_steps_s, floor_s), bool(told))
    if frozen is not None or not told:
        return Judgement(frozen is None, frozen)
    pause = _pause(idle_s, told)
    gone = [str(seen.facts.rank) for seen in ranks if seen.facts.ended]
    if gone:
        pause += f", and rank {', '.join(gone[:4])} has ended already"
    return Judgement(False, _by_stacks(alive, pause, waited_s=idle_s - patience))


def _pause(idle_s: float, told: Sequence[ObservedRank]) -> str:
    longest_s = max(seen.facts.longest_s for seen in told)
    step_s = max(seen.facts.step_s for seen in told)
    step = max(seen.facts.step for seen in told)
    usual = f"usually {step_s:.2g} s, longest pause so far {longest_s:.3g} s"
    return f"no step for {idle_s:.0f} s after step {step} ({usual})"


def _frozen(alive: Sequence[ObservedRank], patience: float, told: bool) -> Hang | None:
    held = []
    for seen in alive:
        facts = seen.facts
        enough_s = max(STOPPED_S, 0.0 if told else patience)
        if facts.state in _STOPPED and facts.state_s >= enough_s:
            held.append((seen, _STOPPED[facts.state]))
        elif facts.state == _KERNEL and facts.state_s >= max(KERNEL_S, enough_s):
            held.append((seen, "is held by the kernel (D state)"))
    if not held:
        return None
    seen, how = held[0]
    others = "".join(f"; rank {other.facts.rank} {why}" for other, why in held[1:4])
    text = f"rank {seen.facts.rank} {how} for {seen.facts.state_s:.0f} s{others}"
    if 2 * len(held) > len(alive):
        # Schedulers suspend whole jobs this way, and wake them again.
        return Hang(Verdict.STALLED, seen, f"{len(held)} of {len(alive)} ranks can't move: {text}")
    return Hang(Verdict.FROZEN, seen, text)


def _by_stacks(alive: Sequence[ObservedRank], pause: str, waited_s: float) -> Hang | None:
    where = {seen.facts.rank: stacks.unpack(seen.facts.stack) for seen in alive}
    seen_enough = all(where[seen.facts.rank] for seen in alive) and all(
        seen.facts.steady >= STEADY_LOOKS for seen in alive
    )
    if not seen_enough:
        moving = [
            seen
            for seen in alive
            if (stack := where[seen.facts.rank]) and not seen.facts.steady and not stacks.waits(stack)
        ]
        if waited_s < LOOKS_WITHIN_S and not moving:
            return None
        text = _standing(alive, where)
        doing = f"; rank {moving[0].facts.rank} is moving" if moving else ""
        return Hang(Verdict.STALLED, alive[0], f"{pause}: {text}{doing}", sure=bool(moving))
    waiting = [seen for seen in alive if stacks.waits(where[seen.facts.rank])]
    outside = [seen for seen in alive if seen not in waiting]
    standing = _standing(alive, where)
    if waiting and outside and len(outside) <= len(waiting):
        awaited = all(stacks.waits(where[seen.facts.rank]) in _BARRIERS for seen in waiting)
        for seen in outside:
            excuse = _excuse(where[seen.facts.rank], seen.facts.io_bytes_s)
            excuse = excuse or ("is awaited at a barrier" if awaited else "")
            if excuse:
                told = f"rank {seen.facts.rank} {excuse} while {len(waiting)} wait for it"
                return Hang(Verdict.STALLED, seen, f"{pause}: {told}; {standing}")
        return Hang(Verdict.DESYNC, outside[0], f"{pause}: {_apart(outside, waiting, where)}")
    if not outside:
        compared = stacks.compare(where)
        odd = [seen for seen in alive if seen.facts.rank in compared.odd]
        if odd:
            others = [seen for seen in alive if seen not in odd]
            return Hang(Verdict.DESYNC, odd[0], f"{pause}: {_apart(odd, others, where)}")
    return Hang(Verdict.STALLED, alive[0], f"{pause}: {standing}")


def _apart(odd: Sequence[ObservedRank], others: Sequence[ObservedRank], where: dict[int, Stack]) -> str:
    told = []
    for seen in odd[:4]:
        stack = where[seen.facts.rank]
        operation = stacks.waits(stack)
        inside = f" in {operation}" if operation else ""
        place = stacks.own_frame(stack).describe()
        told.append(f"rank {seen.facts.rank} of {seen.node_name} stands at {place}{inside}")
    first = where[others[0].facts.rank]
    place = stacks.own_frame(first).describe()
    return f"{', '.join(told)}, while {len(others)} wait in {stacks.waits(first)} at {place}"


def _standing(alive: Sequence[ObservedRank], where: dict[int, Stack]) -> str:
    """Where everybody is, the largest group first."""
    known = {rank: stack for rank, stack in where.items() if stack}
    groups = stacks.compare(known).clusters
    said = [
        f"{len(group.ranks)} {'rank' if len(group.ranks) == 1 else 'ranks'} ({_some(group.ranks)}) at "
        f"{stacks.own_frame(group.stack).describe()}"
        for group in groups[:4]
    ]
    unknown = len(alive) - len(known)
    return ", ".join([*said, *([f"{unknown} at unknown lines"] if unknown else [])])


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")


def _excuse(stack: Stack, io_bytes_s: float) -> str:
    if io_bytes_s >= IO_BYTES_S:
        return f"moves {io_bytes_s / 1e6:.3g} MB/s"
    for frame in stack:
        for excuse, files in _EXCUSES:
            if any(part in frame.file for part in files):
                return excuse
    return ""
