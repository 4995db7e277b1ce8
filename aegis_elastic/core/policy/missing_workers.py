"""Too few workers have come, and the join timeout is near: what whoever makes their machines should be asked.

A platform's record of the job says whether the platform makes the machines anew that go (`controlled`, the
seed's mark). If it does, those that run and never came are made anew, and waited for: no fault of training's,
nothing is counted, and a bound on the rounds keeps a machine that can't come from being waited for for ever.
If it doesn't, the job is outside of the normal flow: all machines are cleared, one retry is counted, and
what comes in their place runs as a plain job.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

# Beyond this it isn't chance that they don't come.
ROUNDS_MAX = 3


class Machine(NamedTuple):
    """What a worker runs in, a pod. `address` is numeric, "" as long as it has none."""

    name: str
    address: str


class Plan(enum.Enum):
    """What is to be done."""

    NOTHING = "nothing"
    RELAUNCH = "relaunch"
    CLEAR = "clear"


class Decision(NamedTuple):
    """`machines` are to be made anew, by name; none for a relaunch that merely waits."""

    plan: Plan
    machines: tuple[str, ...]
    reason: str


def decide(machines: Iterable[Machine], came: frozenset[str], controlled: bool, rounds: int) -> Decision:
    """`machines`: the job's, as the platform lists them; `came`: the addresses of the workers that are here;
    `rounds`: how often some have been made anew already.
    """
    known = tuple(machines)
    silent = tuple(one.name for one in known if one.address and one.address not in came)
    unborn = tuple(one.name for one in known if not one.address)
    if not known:
        return Decision(Plan.NOTHING, (), "the platform knows no machines of this job")
    if not silent and not unborn:
        return Decision(Plan.NOTHING, (), "every machine of this job has come")
    absent = ", ".join((*silent, *unborn))
    if not controlled:
        names = tuple(one.name for one in known)
        return Decision(Plan.CLEAR, names, f"{absent} never came, and nobody controls this job's machines")
    if rounds >= ROUNDS_MAX:
        return Decision(Plan.NOTHING, (), f"{absent} never came, though made anew {rounds} times")
    if not silent:
        return Decision(Plan.RELAUNCH, (), f"{absent} don't run yet")
    return Decision(Plan.RELAUNCH, silent, f"{', '.join(silent)} never came")
