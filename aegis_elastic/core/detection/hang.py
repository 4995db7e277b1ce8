"""Hangs: which rank or node holds training up. Four verdicts, each with its own evidence.

    frozen       a rank can't move: its process is stopped, its main thread is dead, or the kernel holds it
    desync       a deadlock that can be shown: ranks wait for one another in a collective, and one stands
                 still elsewhere, or in another collective
    stalled      no step, and none of the above: evaluation, saving, compiling, a slow network; people decide
    unreachable  an agent is silent while steps advance (control.controllers.progress knows which)

Patience comes first: as long as any rank makes steps, or the pause is no longer than this job's earlier ones,
there is no verdict. Then stacks, from several samples. A rank counts as still only if it is at the very same
place in every sample, and a rank that saves, compiles or imports is never blamed: rank 0 writing a checkpoint
ten times longer than usual looks, from outside, exactly like a rank that will never come. Nor is a rank that
is awaited at a barrier: the user's code expects there some ranks long before others, as when one of them
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

# Samples in a row at one place before a rank counts as still, and the longest wait for all ranks' samples.
STEADY_LOOKS = 3
LOOKS_WITHIN_S = 9.0
# A job that reports no steps is judged by process states alone, after this.
NO_STEPS_S = 120.0
# A process may be in the kernel for a while (a slow file system), and stopped for a moment.
STOPPED_S = 2.0
KERNEL_S = 30.0
_STOPPED = {"T": "is stopped (SIGSTOP)", "Z": "has no main thread any more", "X": "is dead"}
_KERNEL = "D"

# Work that a rank may do by itself for a long time while its peers wait: parts of file names.
_EXCUSES = (
    ("saves", ("torch/serialization.py", "torch/distributed/checkpoint/", "safetensors/", "numpy/lib/")),
    ("saves", ("/pickle.py", "/shutil.py", "/tarfile.py", "/zipfile.py", "h5py/")),
    ("compiles", ("torch/_dynamo/", "torch/_inductor/", "torch/_functorch/", "torch/utils/cpp_extension")),
    ("compiles", ("triton/", "numba/", "jax/", "/subprocess.py")),
    ("imports", ("<frozen importlib",)),
    ("transfers files", ("/ssl.py", "/socket.py", "/http/", "urllib3/", "requests/", "httpx/", "aiohttp/")),
    ("transfers files", ("fsspec/", "s3fs/", "boto", "gcsfs/", "huggingface_hub/")),
)
# A rank that reads and writes this much is at work, whatever its code is called.
IO_BYTES_S = 1e6
_BARRIERS = ("barrier", "monitored_barrier")


class ObservedRank(NamedTuple):
    """A rank, as its agent last reported it."""

    facts: RankFacts
    worker: str
    node_name: str


class Hang(NamedTuple):
    """A verdict, the rank concerned (for stalled: the first one), and why, with numbers. Not `sure`: samples
    are missing, so it is no reason to withdraw an earlier verdict.
    """

    verdict: Verdict
    observed: ObservedRank
    reason: str
    sure: bool = True


class Judgement(NamedTuple):
    """`moves`: some rank makes steps, or the pause is no longer than others were. `hang`: what holds training
    up, None if nothing does, or if it isn't known yet.
    """

    moves: bool
    hang: Hang | None = None


def judge(
    ranks: Sequence[ObservedRank], floor_s: float = FLOOR_S, no_steps_s: float = NO_STEPS_S
) -> Judgement:
    """What holds training up. `ranks`: all of the job's, ended ones too. `no_steps_s`: after how long process
    states alone decide, for a job that reports no steps.
    """
    alive = [observed for observed in ranks if not observed.facts.ended]
    stepping = [observed for observed in alive if observed.facts.beats]
    patience = patience_s([observed.facts for observed in stepping], floor_s)
    if any(observed.facts.idle_s < patience for observed in stepping) or not alive:
        return Judgement(True)
    idle_s = min((observed.facts.idle_s for observed in stepping), default=0.0)
    frozen = _frozen(alive, patience if stepping else max(no_steps_s, floor_s), bool(stepping))
    if frozen is not None or not stepping:
        return Judgement(frozen is None, frozen)
    pause = _pause(idle_s, stepping)
    gone = [str(observed.facts.rank) for observed in ranks if observed.facts.ended]
    if gone:
        pause += f", and rank {', '.join(gone[:4])} has ended already"
    return Judgement(False, _by_stacks(alive, pause, waited_s=idle_s - patience))


def _pause(idle_s: float, stepping: Sequence[ObservedRank]) -> str:
    longest_s = max(observed.facts.longest_s for observed in stepping)
    step_s = max(observed.facts.step_s for observed in stepping)
    step = max(observed.facts.step for observed in stepping)
    usual = f"usually {step_s:.2g} s, longest pause so far {longest_s:.3g} s"
    return f"no step for {idle_s:.0f} s after step {step} ({usual})"


def _frozen(alive: Sequence[ObservedRank], patience: float, stepping: bool) -> Hang | None:
    held = []
    for observed in alive:
        facts = observed.facts
        enough_s = max(STOPPED_S, 0.0 if stepping else patience)
        if facts.state in _STOPPED and facts.state_s >= enough_s:
            held.append((observed, _STOPPED[facts.state]))
        elif facts.state == _KERNEL and facts.state_s >= max(KERNEL_S, enough_s):
            held.append((observed, "is held by the kernel (D state)"))
    if not held:
        return None
    observed, how = held[0]
    others = "".join(f"; rank {other.facts.rank} {why}" for other, why in held[1:4])
    text = f"rank {observed.facts.rank} {how} for {observed.facts.state_s:.0f} s{others}"
    if 2 * len(held) > len(alive):
        # Schedulers suspend whole jobs this way, and resume them.
        return Hang(Verdict.STALLED, observed, f"{len(held)} of {len(alive)} ranks can't move: {text}")
    return Hang(Verdict.FROZEN, observed, text)


def _by_stacks(alive: Sequence[ObservedRank], pause: str, waited_s: float) -> Hang | None:
    where = {observed.facts.rank: stacks.unpack(observed.facts.stack) for observed in alive}
    all_still = all(where[observed.facts.rank] for observed in alive) and all(
        observed.facts.steady >= STEADY_LOOKS for observed in alive
    )
    if not all_still:
        moving = [
            observed
            for observed in alive
            if (stack := where[observed.facts.rank]) and not observed.facts.steady and not stacks.waits(stack)
        ]
        if waited_s < LOOKS_WITHIN_S and not moving:
            return None
        text = _standing(alive, where)
        doing = f"; rank {moving[0].facts.rank} is moving" if moving else ""
        return Hang(Verdict.STALLED, alive[0], f"{pause}: {text}{doing}", sure=bool(moving))
    waiting = [observed for observed in alive if stacks.waits(where[observed.facts.rank])]
    outside = [observed for observed in alive if observed not in waiting]
    standing = _standing(alive, where)
    if waiting and outside and len(outside) <= len(waiting):
        awaited = all(stacks.waits(where[observed.facts.rank]) in _BARRIERS for observed in waiting)
        for observed in outside:
            excuse = _excuse(where[observed.facts.rank], observed.facts.io_bytes_s)
            excuse = excuse or ("is awaited at a barrier" if awaited else "")
            if excuse:
                text = f"rank {observed.facts.rank} {excuse} while {len(waiting)} wait for it"
                return Hang(Verdict.STALLED, observed, f"{pause}: {text}; {standing}")
        return Hang(Verdict.DESYNC, outside[0], f"{pause}: {_apart(outside, waiting, where)}")
    if not outside:
        compared = stacks.compare(where)
        odd = [observed for observed in alive if observed.facts.rank in compared.odd]
        if odd:
            others = [observed for observed in alive if observed not in odd]
            return Hang(Verdict.DESYNC, odd[0], f"{pause}: {_apart(odd, others, where)}")
    return Hang(Verdict.STALLED, alive[0], f"{pause}: {standing}")


def _apart(odd: Sequence[ObservedRank], others: Sequence[ObservedRank], where: dict[int, Stack]) -> str:
    odd_places = []
    for observed in odd[:4]:
        stack = where[observed.facts.rank]
        operation = stacks.waits(stack)
        inside = f" in {operation}" if operation else ""
        place = stacks.own_frame(stack).describe()
        odd_places.append(f"rank {observed.facts.rank} of {observed.node_name} stands at {place}{inside}")
    first = where[others[0].facts.rank]
    place = stacks.own_frame(first).describe()
    return f"{', '.join(odd_places)}, while {len(others)} wait in {stacks.waits(first)} at {place}"


def _standing(alive: Sequence[ObservedRank], where: dict[int, Stack]) -> str:
    """Where all ranks stand, the largest group first."""
    known = {rank: stack for rank, stack in where.items() if stack}
    groups = stacks.compare(known).clusters
    places = [
        f"{len(group.ranks)} {'rank' if len(group.ranks) == 1 else 'ranks'} ({_some(group.ranks)}) at "
        f"{stacks.own_frame(group.stack).describe()}"
        for group in groups[:4]
    ]
    unknown = len(alive) - len(known)
    return ", ".join([*places, *([f"{unknown} at unknown lines"] if unknown else [])])


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
