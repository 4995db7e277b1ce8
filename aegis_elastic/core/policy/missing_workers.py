"""Missing workers: too few have joined, the join timeout is near; what the platform is asked to do.

The platform's record of the job says whether the platform recreates machines that are gone (`controlled`).
If it does, machines that run but never joined are recreated, and waited for: that is no failure of the
training, nothing is counted, and `ROUNDS_MAX` bounds the wait for a machine that can't join. If it doesn't,
the job is outside of the normal flow: all machines are cleared, one retry is counted, and what joins in
their place runs as a plain job.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

# Beyond this it isn't by chance that they don't join.
ROUNDS_MAX = 3


class Machine(NamedTuple):
    """A pod that a worker runs in. `address` is numeric, "" while it has none."""

    name: str
    address: str


class Plan(enum.Enum):
    """What is to be done."""

    NOTHING = "nothing"
    RELAUNCH = "relaunch"
    CLEAR = "clear"


class Decision(NamedTuple):
    """The plan and why. `machines`: names of those to recreate; none for a relaunch that only waits."""

    plan: Plan
    machines: tuple[str, ...]
    reason: str


def decide(machines: Iterable[Machine], joined: frozenset[str], controlled: bool, rounds: int) -> Decision:
    """What to ask of the platform. `machines`: the job's, as the platform lists them; `joined`: the addresses
    of the workers that have joined; `rounds`: how often some have been recreated already.
    """
    known = tuple(machines)
    silent = tuple(one.name for one in known if one.address and one.address not in joined)
    not_running = tuple(one.name for one in known if not one.address)
    if not known:
        return Decision(Plan.NOTHING, (), "the platform knows no machines of this job")
    if not silent and not not_running:
        return Decision(Plan.NOTHING, (), "every machine of this job has come")
    absent = ", ".join((*silent, *not_running))
    if not controlled:
        names = tuple(one.name for one in known)
        return Decision(Plan.CLEAR, names, f"{absent} never came, and nobody controls this job's machines")
    if rounds >= ROUNDS_MAX:
        return Decision(Plan.NOTHING, (), f"{absent} never came, though made anew {rounds} times")
    if not silent:
        return Decision(Plan.RELAUNCH, (), f"{absent} don't run yet")
    return Decision(Plan.RELAUNCH, silent, f"{', '.join(silent)} never came")
