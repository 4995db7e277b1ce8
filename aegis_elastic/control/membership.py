"""The master's roll: what it knows of each agent's life, and which Errors wait to be attributed.

Memory only. All of it is learned again from heartbeats when a master comes back; nothing here may be needed
to decide what has been decided already.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Mapping

from aegis_elastic.checks.contract.environments import summarise
from aegis_elastic.checks.contract.request import Scalar
from aegis_elastic.core.detection.liveness import Contact, Judgement, Patience, is_closed, judge
from aegis_elastic.core.diagnosis import peer_figures
from aegis_elastic.core.diagnosis.attribution import Evidence
from aegis_elastic.core.diagnosis.clocks import Bounds, Clock
from aegis_elastic.core.events import Error, Finish
from aegis_elastic.core.model import Status

logger = logging.getLogger(__name__)


class Membership:
    """Agents by uid: when they were heard, whether their connection was closed, what they acknowledged."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._contacts: dict[str, Contact] = {}
        self._acknowledged: dict[str, int] = {}
        self._connections: dict[str, set[int]] = {}
        self._told_at: dict[str, float] = {}
        self._jwt_until: dict[str, float] = {}
        self._keys: dict[str, str] = {}
        self.evidence: dict[str, tuple[Evidence, Error]] = {}
        self.unreachable: frozenset[str] = frozenset()
        self.moved_s = float("-inf")  # when the step counter moved last
        self._environments: dict[str, Mapping[str, Scalar]] = {}
        self._figures: dict[str, dict[str, float]] = {}
        self._clocks: dict[str, Clock] = {}
        self._malformed: collections.Counter[str] = collections.Counter()

    def follow(self, status: Status, now_s: float) -> None:
        """Know exactly the agents of this status; newcomers begin as heard now."""
        current = {worker.uid: worker.name for worker in (*status.workers, *status.spares) if not worker.gone}
        for uid in self._contacts.keys() - current.keys():
            del self._contacts[uid]
            self._acknowledged.pop(uid, None)
            self._connections.pop(uid, None)
            self._told_at.pop(uid, None)
            self._clocks.pop(uid, None)
            self._jwt_until.pop(uid, None)
            self._keys.pop(uid, None)
        for uid, name in current.items():
            self._contacts.setdefault(uid, Contact(name, uid, now_s))

    def knows(self, uid: str) -> bool:
        """Whether this life of an agent is part of the job."""
        return uid in self._contacts

    def alive_since(self, worker: str, other_than: str, since_s: float) -> bool:
        """Whether another life of this worker has been heard since then, and has not left the bus."""
        return any(
            contact.worker == worker
            and uid != other_than
            and not is_closed(contact)
            and contact.heard_s >= since_s
            for uid, contact in self._contacts.items()
        )

    def anybody_since(self, since_s: float) -> bool:
        """Whether any agent has been heard since then, and has not left the bus."""
        return any(
            not is_closed(contact) and contact.heard_s >= since_s for contact in self._contacts.values()
        )

    @property
    def connected(self) -> int:
        """How many agents there are whose connection is not known to be closed."""
        return sum(not is_closed(contact) for contact in self._contacts.values())

    def heard(self, uid: str, seq_num: int, now_s: float) -> bool:
        """A report came over the bus; returns whether it is the first one of this life of the agent."""
        contact = self._contacts.get(uid)
        if contact is None:
            return False
        first = uid not in self._acknowledged
        self._contacts[uid] = contact._replace(heard_s=now_s)
        self._acknowledged[uid] = seq_num
        return first

    def seen(self, by: str, told_at: float, workers: Iterable[str], now_s: float) -> None:
        """The agent `by` saw these workers over the training network, as it wrote at `told_at` (its clock).

        Heartbeats repeat a report until there is a newer one, and what is repeated was seen once: an agent
        whose look at the others hangs must not keep the dead alive.
        """
        if self._told_at.get(by) == told_at:
            return
        self._told_at[by] = told_at
        names = frozenset(workers)
        if not names:
            return  # only a few agents look at the others
        for uid, contact in self._contacts.items():
            if contact.worker in names:
                self._contacts[uid] = contact._replace(peers_saw_s=now_s)

    def note_clock(
        self, uid: str, sent: float, echo: tuple[float, float] | None, here: float, now_s: float
    ) -> None:
        """A report that this agent sent at `sent` by its clock was heard at `here` by ours (wall seconds);
        `echo`: when we sent an order, by ours, and when it heard that, by its own.
        """
        clock = self._clocks.get(uid, Clock()).heard(sent, here, now_s)
        self._clocks[uid] = clock.echoed(*echo, now_s) if echo is not None else clock

    def clock(self, uid: str, now_s: float) -> Bounds | None:
        """How far our clock is ahead of this agent's node's; None if that isn't known."""
        clock = self._clocks.get(uid)
        return clock.bounds(now_s) if clock is not None else None

    def opened(self, uid: str, connection: int) -> None:
        """The bus says that this agent has a connection of that number."""
        self._connections.setdefault(uid, set()).add(connection)

    def closed(self, uid: str, why: str, now_s: float, connection: int = 0) -> None:
        """The bus says that this connection of the agent was closed; it may have made another one before.

        So it does when it renews its JWT, or when it is quicker to come back than the server to notice.
        """
        others = self._connections.setdefault(uid, set())
        others.discard(connection)
        contact = self._contacts.get(uid)
        if contact is not None and not others:
            self._contacts[uid] = contact._replace(closed_s=now_s, closed_why=why)

    def forget_connections(self) -> None:
        """The bus went away, and with it all connections; a new server numbers them anew."""
        self._connections.clear()

    def note_malformed(self, subject: str, error: Exception) -> None:
        """Log a message that makes no sense: the first of a subject, then ever rarer ones, since a worker
        that floods us must not fill the disk.
        """
        count = self._malformed[subject] = self._malformed[subject] + 1
        if count & (count - 1) == 0:
            so_far = f" ({count} so far)" if count > 1 else ""
            logger.warning("ignored a malformed report on %s%s: %.300s", subject, so_far, error)

    def judge(self, now_s: float) -> Judgement:
        """Who is lost, suspected, unreachable now."""
        return judge(self._contacts.values(), now_s, self._patience, self.moved_s)

    def all_acknowledged(self, seq_num: int) -> bool:
        """Whether every known agent has answered this order."""
        return all(self._acknowledged.get(uid, -1) >= seq_num for uid in self._contacts)

    def note_checks(self, event: Finish) -> None:
        """Keep what a worker's checks said of its versions and of its storage."""
        for check in event.checks:
            if check.check_type == "env":
                self._environments[event.worker] = check.details
            elif check.check_type == "io" and check.passed:
                self._figures[event.worker] = peer_figures.storage_figures(check.details)

    def medians(self) -> dict[str, float]:
        """What the median of all workers had in its last checks, for those that are to come."""
        return peer_figures.medians(self._figures)

    def versions(self) -> str:
        """One line over all workers' environments: what they run, or where versions differ."""
        return summarise(self._environments)[0]

    def note_jwt(self, uid: str, public_key: str, until_s: float) -> None:
        """Remember until when (wall seconds) an agent's JWT is good, and for which key it was made."""
        self._jwt_until[uid] = until_s
        self._keys[uid] = public_key

    def due_for_renewal(self, before_s: float) -> list[tuple[str, str, str]]:
        """(worker, uid, public key) of agents whose JWT runs out before that wall time."""
        return [
            (contact.worker, uid, self._keys[uid])
            for uid, contact in self._contacts.items()
            if uid in self._keys and self._jwt_until[uid] < before_s
        ]
