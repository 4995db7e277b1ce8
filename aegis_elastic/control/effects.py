"""Effects of decisions: orders and directives on the bus, the end of the job.

An order is repeated until everybody has acknowledged it; after that now and then, since agents answer it with
its time, by which the clocks of their nodes are known.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from aegis_elastic.bus import subjects
from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.control.final_report import write_final_report
from aegis_elastic.control.journal_file import Journal
from aegis_elastic.control.membership import Membership
from aegis_elastic.control.run_files import STATUS_FILE, write_if_possible
from aegis_elastic.core.accounts import report_summary
from aegis_elastic.core.accounts.report import Report
from aegis_elastic.core.events import (
    Close,
    Dismiss,
    Effect,
    Page,
    Publish,
    RecordErrorNode,
    Remake,
    Renew,
)
from aegis_elastic.core.model import TERMINAL, Phase, Status
from aegis_elastic.core.protocol import directives, messages, orders
from aegis_elastic.core.protocol.messages import MESSAGE_BYTES_MAX, Message, MessageType, WirePhase

logger = logging.getLogger(__name__)

REPEAT_S = 1.0
# The larger the job is, the more rarely an order that all have acknowledged is repeated, as it grows with the
# job. So does the rest between two for newcomers.
CLOCK_S, CLOCK_S_PER_WORKER, REST_S_PER_WORKER = 60.0, 0.1, 0.001
# What a message has beside the report in it.
ENVELOPE_BYTES_MAX = 4096


class Publisher:
    """Sends the master's messages of one job."""

    def __init__(self, bus: BusConnection, namespace: str, job: str) -> None:
        self._bus = bus
        self._namespace = namespace
        self._job = job

    async def publish_order(self, status: Status, peers: dict[str, float] | None = None) -> None:
        """Send the order that this status wants; `peers` are the figures that checks compare with."""
        order = orders.derive_order(status)
        if peers:
            order = msgspec.structs.replace(order, peers=peers)
        message = Message(
            aegis_name=self._job,
            aegis_namespace=self._namespace,
            worker="master",
            type=MessageType.ORDER,
            phase=WirePhase(orders.WIRE_PHASE[order.action]),
            data=order,
            time_stamp=time.time(),
            seq_num=status.seq_num,
            uid="",
            incarnation=status.incarnation,
        )
        await self._bus.publish(subjects.order_all(self._namespace, self._job), messages.encode(message))

    async def send(self, worker: str, directive: directives.Directive) -> None:
        """Send a directive to one worker."""
        subject = subjects.order(self._namespace, self._job, worker)
        await self._bus.publish(subject, directives.encode(directive))

    async def send_final_report(self, status: Status, final: Report) -> None:
        """Send the report to everybody who is still there, as far as it fits into a message."""
        fitted = report_summary.fit_report(final, MESSAGE_BYTES_MAX - ENVELOPE_BYTES_MAX)
        for worker in (*status.workers, *status.spares):
            if not worker.gone:
                await self.send(worker.name, directives.FinalReport(worker.uid, fitted))


class Effects:
    """Performs the effects of one job's decisions, and repeats its order."""

    def __init__(
        self,
        publisher: Publisher,
        membership: Membership,
        journal: Journal,
        run_dir: Path,
        *,
        answer_join: Callable[[str, str], None],
        view: Callable[[], dict[str, Any]],
    ) -> None:
        """`answer_join` takes an agent's uid and why it is refused; `view` gives what `status.json` says."""
        self._publisher = publisher
        self._membership = membership
        self._journal = journal
        self._run_dir = run_dir
        self._answer_join = answer_join
        self._view = view
        # Monotonic seconds: when the order is to be looked at again, and when it was sent.
        self.repeat_at_s = 0.0
        self._published_at_s = 0.0
        self._hanging = ""
        # Set when the job has ended: its report is written and sent, and the order to close is published.
        self.closed = asyncio.Event()

    async def perform(self, effect: Effect, status: Status) -> None:
        """Perform one effect of the decision that led to this status."""
        match effect:
            case Publish():
                await self._publish_newest(effect, status)
            case Dismiss():
                self._answer_join(effect.uid, effect.reason)
                await self._publisher.send(effect.worker, directives.Dismissal(effect.uid, effect.reason))
            case Renew():
                await self._publisher.send(effect.worker, directives.Reexec(effect.uid, effect.reason))
            case Close():
                await self.close(status)
            case Remake():
                logger.warning("made anew: %s (%s)", ", ".join(effect.machines), effect.reason)
            case RecordErrorNode():
                logger.warning("node %s is not to be used: %s", effect.node_name, effect.reason)
            case Page():
                logger.warning("a human is wanted: %s", effect.text)

    async def publish_order(self, status: Status) -> None:
        """Send the order to all workers."""
        self._published_at_s = time.monotonic()
        medians = self._membership.medians() if status.checks else {}
        await self._publisher.publish_order(status, medians)

    async def publish_if_hang_changed(self, status: Status) -> None:
        """Send the order if it says something else of a hang than the last one; no decision wants that."""
        if orders.hanging(status) != self._hanging:
            self._hanging = orders.hanging(status)
            await self.publish_order(status)

    async def repeat_order(self, status: Status, now_s: float, *, errors_waiting: bool) -> None:
        """Send the order again if somebody needs it. `now_s`: monotonic seconds."""
        if now_s < self.repeat_at_s:
            return
        self.repeat_at_s = now_s + REPEAT_S
        every_s = max(CLOCK_S, CLOCK_S_PER_WORKER * len(status.workers))
        stale = now_s - self._published_at_s >= every_s
        # Whoever waits for the answer to an Error must hear that the master is there.
        if stale or errors_waiting or not self._membership.all_acknowledged(status.seq_num):
            await self.publish_order(status)

    def repeat_soon(self, status: Status, now_s: float) -> None:
        """Have the order repeated for a newcomer, but not for each of many who come at once."""
        rest_s = REST_S_PER_WORKER * len(status.workers)
        self.repeat_at_s = min(self.repeat_at_s, max(now_s, self._published_at_s + rest_s))

    async def close(self, status: Status) -> None:
        """End the job: report, status.json, the order to close. Nothing if that has been done."""
        if self.closed.is_set():
            return
        final = await write_final_report(self._run_dir, self._journal, status)
        await self._publisher.send_final_report(status, final)
        if status.phase is Phase.FAILED:
            logger.warning("job %s failed: %s", status.spec.job_name, status.fail_reason)
        write_if_possible(self._run_dir / STATUS_FILE, msgspec.json.encode(self._view()))
        await self.publish_order(status)
        self.closed.set()

    async def _publish_newest(self, effect: Publish, status: Status) -> None:
        # An order that another has overtaken is not worth sending, and `close` sends the last one: after the
        # report, which agents that have left can't hear.
        if effect.seq_num == status.seq_num and status.phase not in TERMINAL:
            self.repeat_at_s = time.monotonic() + REPEAT_S
            await self.publish_order(status)
