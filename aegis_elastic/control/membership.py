"""Membership: who speaks, and what the master knows of each agent's life.

Memory only. All of it is learned again from heartbeats when a master comes back; nothing here may be needed
to decide what has been decided already.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Mapping

from aegis_elastic.bus import subjects
from aegis_elastic.checks.contract.environments import summarise
from aegis_elastic.checks.contract.request import Scalar
from aegis_elastic.core.detection.liveness import Contact, Judgement, Patience, is_closed, judge
from aegis_elastic.core.diagnosis import peer_figures
from aegis_elastic.core.diagnosis.clocks import Bounds, Clock
from aegis_elastic.core.events import Finish
from aegis_elastic.core.model import TERMINAL, JobSpec, Status
from aegis_elastic.core.protocol import directives
from aegis_elastic.core.protocol.messages import BadMessage, Message, ReportData

logger = logging.getLogger(__name__)


def check_speaker(spec: JobSpec, subject: str, report: Message) -> None:
    """The bus lets a worker publish on its own subject only; what it says there is of itself, too.

    BadMessage if it isn't.
    """
    try:
        own_subject = subjects.report(spec.namespace, spec.job_name, report.worker)
    except ValueError as error:
        raise BadMessage(f"cannot read a message: {error}") from error
    if subject != own_subject:
        raise BadMessage(f"cannot read a message: {report.worker!r} has another subject")


def reply_to_unknown(status: Status, report: Message) -> directives.Directive:
    """What a life of an agent is to do that is not a member: leave, execute itself again, or join again."""
    worker = status.worker(report.worker)
    if status.phase in TERMINAL:
        return directives.Dismissal(report.uid, f"the job has ended: {status.phase.value}")
    if worker is not None and worker.renew and (worker.gone, worker.uid) == (True, report.uid):
        # It was sent before, but the bus may lose anything.
        return directives.Reexec(report.uid, worker.renew)
    return directives.Rejoin(report.uid, "the master doesn't know this agent")


class Membership:
    """Agents by uid: when they were heard, whether their connection was closed, what they acknowledged."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._contacts: dict[str, Contact] = {}
        self._acknowledged: dict[str, int] = {}
        self._connections: dict[str, set[int]] = {}
        # uid -> when (its clock) it wrote the newest report of which workers it has seen.
        self._peers_seen_at: dict[str, float] = {}
        self._jwt_until: dict[str, float] = {}
        self._keys: dict[str, str] = {}
        self.unreachable: frozenset[str] = frozenset()
        self.moved_s = float("-inf")  # when the step counter moved last
        self._environments: dict[str, Mapping[str, Scalar]] = {}
        self._figures: dict[str, dict[str, float]] = {}
        self._clocks: dict[str, Clock] = {}
        self._malformed: collections.Counter[str] = collections.Counter()

    def update(self, status: Status, now_s: float) -> None:
        """Have exactly the agents of this status as members; newcomers begin as heard now."""
        current = {worker.uid: worker.name for worker in (*status.workers, *status.spares) if not worker.gone}
        for uid in self._contacts.keys() - current.keys():
            del self._contacts[uid]
            self._acknowledged.pop(uid, None)
            self._connections.pop(uid, None)
            self._peers_seen_at.pop(uid, None)
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

    def on_report(self, report: Message, data: ReportData, now_s: float, wall_s: float) -> bool:
        """Take what a member's report says of its life, its clock and its peers; returns whether it is the
        first one of this life. `now_s`: monotonic, `wall_s`: wall seconds.
        """
        uid = report.uid
        first = uid not in self._acknowledged
        self._contacts[uid] = self._contacts[uid]._replace(heard_s=now_s)
        self._acknowledged[uid] = report.seq_num
        self._keep_peers(report, data, now_s)
        # `data.heard`: when we sent the newest order, by ours, and when the agent heard it, by its own clock.
        clock = self._clocks.get(uid, Clock()).heard(report.time_stamp, wall_s, now_s)
        self._clocks[uid] = clock.echoed(*data.heard, now_s) if data.heard is not None else clock
        return first

    def _keep_peers(self, report: Message, data: ReportData, now_s: float) -> None:
        """The workers that this agent has seen over the training network.

        Heartbeats repeat a report until there is a newer one, and what is repeated was seen once: an agent
        whose watch of its peers hangs must not keep the dead alive.
        """
        if self._peers_seen_at.get(report.uid) == report.time_stamp:
            return
        self._peers_seen_at[report.uid] = report.time_stamp
        names = frozenset(data.alive)
        if not names:
            return  # only a few agents watch the others
        for uid, contact in self._contacts.items():
            if contact.worker in names:
                self._contacts[uid] = contact._replace(peers_saw_s=now_s)

    def clock(self, uid: str, now_s: float) -> Bounds | None:
        """How far our clock is ahead of this agent's node's; None if that isn't known."""
        clock = self._clocks.get(uid)
        return clock.bounds(now_s) if clock is not None else None

    def on_connected(self, uid: str, connection: int) -> None:
        """The bus says that this agent has a connection of that number."""
        self._connections.setdefault(uid, set()).add(connection)

    def on_disconnected(self, uid: str, why: str, now_s: float, connection: int = 0) -> None:
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

    def on_malformed(self, subject: str, error: Exception) -> None:
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

    def keep_checks(self, event: Finish) -> None:
        """Keep what a worker's checks found of its versions and of its storage."""
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

    def set_jwt(self, uid: str, public_key: str, until_s: float) -> None:
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
