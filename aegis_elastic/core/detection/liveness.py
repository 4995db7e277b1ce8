"""Liveness: which agents are lost, which are merely unreachable, and which are suspected for the moment.

Three sources show that an agent lives: the bus (its connection and its reports), the training network (its
peers see it at the incarnation's TCPStore), and the step counter, which stops when one node is gone. An agent
is *lost* when its process is known to have ended, which its closed connection shows unless it reconnects at
once, or when all sources have been silent for the timeout. Silent on the bus but seen by its peers, or while
steps advance, it is *unreachable*: a broken management network must not stop a healthy training. And when
most agents fall silent together, the control plane is in trouble, not they.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CLEAN_CLOSE = "Client Closed"
# The bus had no answer to its pings, which is silence: the process may live.
STALE_CLOSE = "Stale Connection"
# Closings within this time count as simultaneous: a bus that fails doesn't lose all at the same moment.
TOGETHER_S = 2.0
# After its own restart a master doesn't know which agents have gone meanwhile: all are to reconnect.
AWAY = "not back after the master's restart"


class Contact(NamedTuple):
    """What the master knows of one agent's life. Times on the master's monotonic clock, in seconds.

    `closed_s`: when its bus connection was last closed, None if never; heard later than that, it has
    reconnected. `closed_why` is the server's reason. `peers_saw_s`: when it was last seen over the training
    network.
    """

    worker: str
    uid: str
    heard_s: float
    closed_s: float | None = None
    closed_why: str = ""
    peers_saw_s: float = float("-inf")


class Patience(NamedTuple):
    """How long to wait, in seconds: for a closed connection to come back, and for a silent agent.

    `away_s`: for those whose connection closed together with the plane's, or with most others'.
    `hindsight_s`: peers report what they saw a while ago, so only reports later than that show life.
    """

    clean_close_s: float = 1.0
    broken_close_s: float = 4.0
    hindsight_s: float = 1.5
    away_s: float = 10.0
    silent_s: float = 30.0


class Judgement(NamedTuple):
    """`lost`: (worker, uid, reason); `suspects`: closed, not yet confirmed; `next_s`: when to judge again."""

    lost: tuple[tuple[str, str, str], ...]
    suspects: frozenset[str]
    unreachable: frozenset[str]
    next_s: float


def judge(
    contacts: Iterable[Contact], now_s: float, patience: Patience, moved_s: float = float("-inf")
) -> Judgement:
    """Judge every agent by what is known of it now. `moved_s`: when the training's step counter last advanced
    by others' reports: ranks step together, so an agent that has been silent since before that trains on.
    """
    known = tuple(contacts)
    lost: list[tuple[str, str, str]] = []
    suspects: set[str] = set()
    silent: list[Contact] = []
    next_s = float("inf")
    closings = sorted(contact.closed_s for contact in known if contact.closed_s is not None)
    # If no agent at all has reconnected, the plane can't be reached: no reason to call any of them lost.
    any_connected = not all(is_closed(contact) for contact in known)
    for contact in known:
        if is_closed(contact):
            assert contact.closed_s is not None
            # A bus that hung or was cut off loses all at once, and they reconnect one by one.
            together = _plane_in_trouble(_count_near(closings, contact.closed_s), len(known))
            confirm_s = contact.closed_s + _confirm_s(contact, patience)
            if together:
                confirm_s = max(confirm_s, contact.closed_s + patience.away_s)
            if contact.closed_why == STALE_CLOSE:
                # A process that is stopped or starved for a while reconnects, and its ranks have trained on.
                confirm_s = max(confirm_s, contact.heard_s + patience.silent_s)
            shown_s = contact.peers_saw_s
            if contact.closed_why == STALE_CLOSE:
                shown_s = max(shown_s, moved_s)
            seen_since = shown_s > contact.closed_s + patience.hindsight_s
            if contact.closed_why == AWAY and not any_connected:
                continue
            if not seen_since or (contact.closed_why == CLEAN_CLOSE and not together):
                if now_s >= confirm_s:
                    reason = f"its connection is gone: {contact.closed_why}"
                    lost.append((contact.worker, contact.uid, reason))
                else:
                    suspects.add(contact.worker)
                    next_s = min(next_s, confirm_s)
                continue
        if now_s - contact.heard_s >= patience.silent_s:
            silent.append(contact)
        else:
            next_s = min(next_s, contact.heard_s + patience.silent_s)
    unreachable = {contact.worker for contact in silent}
    if not _plane_in_trouble(len(silent), len(known)):
        for contact in silent:
            shown_s = max(contact.peers_saw_s, moved_s)
            if now_s - shown_s >= patience.silent_s:
                quiet_s = now_s - contact.heard_s
                lost.append((contact.worker, contact.uid, f"silent for {quiet_s:.0f} s on every way"))
                unreachable.discard(contact.worker)
            else:
                next_s = min(next_s, shown_s + patience.silent_s)
    return Judgement(tuple(lost), frozenset(suspects), frozenset(unreachable), next_s)


def _count_near(closings: Sequence[float], closed_s: float) -> int:
    """How many connections were closed at about that time, reconnected since or not."""
    first = bisect.bisect_left(closings, closed_s - TOGETHER_S)
    return bisect.bisect_right(closings, closed_s + TOGETHER_S) - first


def is_closed(contact: Contact) -> bool:
    """Whether its connection was closed and nothing has been heard from it since."""
    return contact.closed_s is not None and contact.heard_s <= contact.closed_s


def _confirm_s(contact: Contact, patience: Patience) -> float:
    waits = {CLEAN_CLOSE: patience.clean_close_s, AWAY: patience.away_s}
    return waits.get(contact.closed_why, patience.broken_close_s)


def _plane_in_trouble(silent: int, known: int) -> bool:
    # The only agent of a job counts as a majority: it can't be told which side is cut off.
    return silent * 2 > known
