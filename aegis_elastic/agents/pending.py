"""What waits, as data: what the agent does once its ranks have ended, or once a time has passed.

All limits of the agent's own waiting are here.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass

from aegis_elastic.agents.ranks.rank_group import RankGroup
from aegis_elastic.core.model import Failure
from aegis_elastic.core.protocol.orders import Order
from aegis_elastic.core.rank_assignment import RankAssignment

# How long an Error may stay unanswered before the agents help themselves; shorter when the bus is known to be
# down.
ANSWER_S = 5.0
RECONNECT_S = 2.0
# No ranks run, and the plane is lost: how long it may take to come back.
PLANE_RETURN_S = 60.0
# A parked agent's bus is gone: how long it may take to come back. The job may have ended unheard.
PARKED_S = 10.0
# Ranks are done and nobody closes the job: after this we close it among ourselves.
CLOSE_S = 10.0
# All is done without a plane from the start: how long a master that hears us may take to send the report.
REPORT_S = 3.0
# How long those whose ranks are not done may stay unseen before the others leave without them.
EXIT_PATIENCE_S = 60.0
# Until the store pool is asked again for a store that is not ready yet.
STORE_POLL_S = 0.1


class Step(enum.Enum):
    """What needs no data."""

    # That the ranks have ended was all that was wanted.
    NOTHING = "nothing"
    # Wait as a spare, whose node is checked meanwhile.
    WAIT_AS_SPARE = "wait as a spare"
    # Run the order's checks, or see to the end of those that run already.
    CHECK = "check"
    # Report that the order has been followed.
    FINISH = "finish"
    # Our failure was not answered: end the incarnation together with the other agents.
    END_INCARNATION = "end the incarnation"
    # The first agent says where the store of the next incarnation is.
    OFFER_NEXT_STORE = "offer the next store"
    # The plane did not come back: begin without it, or end.
    GIVE_UP_PLANE = "give up the plane"
    # Meet the other agents without a master.
    FORM_WORLD = "form a world"
    # Every rank is done and no plane closes the job.
    CLOSE_STANDALONE = "close standalone"


@dataclass(frozen=True)
class Start:
    """Start the ranks of this incarnation."""

    order: Order
    assignment: RankAssignment


@dataclass(frozen=True)
class Leave:
    """End with this exit code. `failures`: of the ranks that ran; () for those that run when it is done."""

    code: int
    reason: str
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class LeaveBySignal:
    """End as a process ends by this signal, saying how the ranks took it."""

    signum: int
    group: RankGroup


@dataclass(frozen=True)
class LeaveTogether:
    """End with this exit code when the other agents have come to the end, too."""

    code: int
    reason: str


@dataclass(frozen=True)
class Reexec:
    """End, to be executed again as a clean process."""

    reason: str


Pending = Step | Start | Leave | LeaveBySignal | LeaveTogether | Reexec


@dataclass(frozen=True)
class Deadline:
    """`at_s`: on the monotonic clock."""

    at_s: float
    pending: Pending

    @classmethod
    def after(cls, seconds: float, pending: Pending) -> Deadline:
        """That long from now."""
        return cls(time.monotonic() + seconds, pending)

    @property
    def due(self) -> bool:
        """Whether the time has come."""
        return time.monotonic() >= self.at_s
