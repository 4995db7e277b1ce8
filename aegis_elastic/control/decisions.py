"""What follows from events: all go through `step`, then `Reconcile` until nothing is left to decide."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from aegis_elastic.control.controllers.contract import Applied
from aegis_elastic.core.events import Event, Reconcile
from aegis_elastic.core.machine import step
from aegis_elastic.core.model import Status

# One decision leads to the next, but never in circles: a long chain is an error of ours.
CHAIN_MAX = 64


class Decision(NamedTuple):
    """The status that events have led to, and what is to be written down and performed of the way there."""

    status: Status
    transitions: tuple[Applied, ...]


def decide(status: Status, events: Iterable[Event], now: float) -> Decision:
    """Apply these events, then decide until at rest. `now`: wall seconds.

    Repetitions that changed nothing are not among the transitions. AssertionError for an endless chain.
    """
    transitions = list[Applied]()
    for event in events:
        transition = step(status, event, now)
        if transition.status is not status or event.in_journal_unchanged or transition.effects:
            transitions.append(Applied(event, transition))
        status = transition.status
    for _ in range(CHAIN_MAX):
        transition = step(status, Reconcile(), now)
        if transition.status is status:
            return Decision(status, tuple(transitions))
        transitions.append(Applied(Reconcile(), transition))
        status = transition.status
    raise AssertionError(f"decisions don't come to rest: {transitions[-1].transition.reason}")
