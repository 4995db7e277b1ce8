"""What a node has and can do: hold, start and stop ranks, check itself, report, wait. It decides nothing.

The agent (`agents.agent`) says what is to be done, and is asked by `carry_out` to do what has waited. One
selector waits for everything: the guard (deaths of ranks), the mailbox (orders, the link, signals), the pipes
of checks, and one deadline.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from aegis_elastic.agents.checks import requests
from aegis_elastic.agents.checks.runner import CheckRunner
from aegis_elastic.agents.checks.spare_fitness import SpareFitness
from aegis_elastic.agents.contract import Outcome, Settings
from aegis_elastic.agents.guard.client import GuardError
from aegis_elastic.agents.mailbox.events import FactsChanged
from aegis_elastic.agents.mailbox.mailbox import Mailbox
from aegis_elastic.agents.peers.incarnation import IncarnationPeers
from aegis_elastic.agents.peers.stores import StoreGone
from aegis_elastic.agents.pending import PLANE_RETURN_S, Deadline, Pending, Step
from aegis_elastic.agents.plane.link import Identity, PlaneLink
from aegis_elastic.agents.ranks.node_ranks import NodeRanks, RankHolder
from aegis_elastic.agents.ranks.rank_group import RankGroup
from aegis_elastic.agents.ranks.warm_spares import SETTLE_S
from aegis_elastic.agents.reporter import Reporter
from aegis_elastic.agents.standalone.standalone import Standalone
from aegis_elastic.agents.state import AgentState
from aegis_elastic.agents.watch.contract import WatchedRanks, Watchers
from aegis_elastic.agents.watch.operator_checks import OperatorCheckWatcher
from aegis_elastic.core.accounts.report import Report
from aegis_elastic.core.events import Finding
from aegis_elastic.core.model import CheckResult, Failure
from aegis_elastic.core.protocol.messages import MessageType, ReportData
from aegis_elastic.core.protocol.orders import Order
from aegis_elastic.core.rank_assignment import RankAssignment

logger = logging.getLogger(__name__)

Handlers = Mapping[type, Callable[[Any], None]]


class StartFailed(Exception):
    """The ranks can't be started: no store, no guard, or no such command."""


class Node:
    """Single-threaded: everything is called from `run`. Its parts are public: the agent uses them."""

    def __init__(
        self,
        ranks: RankHolder,
        *,
        identity: Identity,
        link: PlaneLink,
        mailbox: Mailbox,
        settings: Settings,
        announce: Callable[[str], None],
        carry_out: Callable[[Pending], None],
    ) -> None:
        """`announce` writes a line for the user. `carry_out` does what has waited for the end of the
        ranks, or for its time.
        """
        self.identity = identity
        self.link = link
        self.settings = settings
        self.announce = announce
        self.selector = selectors.DefaultSelector()
        self.ranks = NodeRanks(ranks)
        self.peers = IncarnationPeers(identity.node_ip, mailbox)
        self.checks = CheckRunner(
            identity, settings.checks, self.selector, announce, self._conclude_checks, settings.first_checks
        )
        wake = partial(mailbox.put, FactsChanged())
        self.operator_checks: OperatorCheckWatcher | None = None
        self.watchers = Watchers((*settings.watchers, self._make_operator_checks), wake)
        gpus = requests.count_gpus()
        self.spare_fitness = SpareFitness(
            identity, settings.checks, settings.spare_checks, gpus, self.selector, wake
        )
        self.standalone = Standalone(identity, self.peers, settings.meeting, mailbox)
        self.reporter = Reporter(
            link,
            self.peers,
            self.standalone,
            lambda: {**self.watchers.facts(), **self.spare_fitness.facts()},
        )
        self.state = AgentState()
        # What is done when the ranks that are being stopped have ended; None: they are not, or it is.
        self.pending: Pending | None = None
        self.deadline: Deadline | None = None
        # What the master sent at the end, and how this node's part ended: then `run` returns.
        self.final_report: Report | None = None
        self.outcome: Outcome | None = None
        self.carry_out = carry_out
        self._mailbox = mailbox
        # Seconds that the steps of this recovery took, for the next Finish.
        self._timings_s: dict[str, float] = {}
        self._handlers: Handlers = {}

    # ------------------------------------------------------------ the loop

    def run(self, handlers: Handlers) -> Outcome:
        """Hand every event to the handler of its type, until there is an outcome. Leaves nothing running."""
        self._handlers = handlers
        self.selector.register(self._mailbox, selectors.EVENT_READ, self._drain_mailbox)
        self.selector.register(self.ranks.guard, selectors.EVENT_READ, self._drain_guard)
        try:
            while self.outcome is None:
                for key, _ in self.selector.select(self._timeout_s()):
                    key.data()
                # What the next failure will want, once the ranks have had their start for themselves.
                self.checks.prepare()
                self.ranks.prepare()
                if self.deadline is not None and self.deadline.due:
                    pending, self.deadline = self.deadline.pending, None
                    self.carry_out(pending)
            return self.outcome
        finally:
            self._close()

    def replace_guard(self) -> None:
        """The guard has died: have another. GuardError."""
        self.selector.unregister(self.ranks.guard)
        self.ranks.replace_guard()
        self.selector.register(self.ranks.guard, selectors.EVENT_READ, self._drain_guard)

    def _timeout_s(self) -> float | None:
        deadline_s = self.deadline.at_s if self.deadline is not None else None
        moments = [deadline_s, self.ranks.due_s, self.checks.prepare_due_s]
        waits = [moment - time.monotonic() for moment in moments if moment is not None]
        return max(min(waits), 0.0) if waits else None

    def _drain_mailbox(self) -> None:
        for event in self._mailbox.drain():
            handler = self._handlers.get(type(event))
            if self.outcome is None and handler is not None and self.state.heeds(event):
                handler(event)

    def _drain_guard(self) -> None:
        for event in self.ranks.guard.events():
            self._handlers[type(event)](event)

    def _close(self) -> None:
        self.watchers.close()
        self.checks.close()
        self.spare_fitness.cancel()
        self.ranks.close()
        self.peers.close()
        self.selector.close()
        self.standalone.close()

    # ------------------------------------------------------------ reports

    def report(self, kind: MessageType, data: ReportData) -> None:
        """Make this the newest report and send it."""
        self.reporter.update(kind, data)
        self.report_again()

    def report_again(self) -> None:
        """Send the newest report, with what has changed by itself since."""
        if not self.state.from_start:
            self.reporter.send(self.state.order)
        elif self.state.heard is not None:
            # For its accounts: what we do is not what it ordered, but it may know how we fare.
            self.reporter.send(self.state.heard)

    # ------------------------------------------------------------ what waits

    def wait(self, seconds: float, pending: Pending) -> None:
        """Carry this out when that much time has passed, instead of what has waited for its time till now."""
        self.deadline = Deadline.after(seconds, pending)

    def stop_then(self, pending: Pending, grace_s: float | None = None) -> None:
        """Stop the ranks if there are any, and carry this out when nothing of them lives."""
        self.checks.cancel()
        group = self.ranks.live
        if group is None:
            self.ranks.group = None
            self.carry_out(pending)
            return
        self.pending = pending
        if group.stopping:
            return
        self.watchers.on_ended()
        self.checks.exits = group.exits
        if grace_s is None:
            # Training is to begin again: nobody is waited for who doesn't hear that it ends. A grace that
            # somebody asked for is given to all who don't refuse it.
            given = self.settings.grace_given
            self.ranks.stop(self.settings.fault_grace_s, wait_if_ignored=False, wait_if_blocked=given)
        else:
            self.ranks.stop(grace_s)

    def on_group_stopped(self, group: RankGroup) -> None:
        """Nothing of the ranks lives any more: go on with what has waited for that."""
        self._timings_s["stop_s"] = self.ranks.stopping_for_s
        if group.unkillable:
            pids = ", ".join(map(str, group.unkillable))
            logger.error("processes %s survive SIGKILL (in the kernel); going on without them", pids)
        pending, self.pending = self.pending, None
        if pending is not None:
            # The new start needs the logs of the last one closed; anything else need not wait for that.
            self.ranks.release()
            self.carry_out(pending)

    def enter_leaving(self) -> None:
        """From now on only the end is waited for."""
        self.state, self.deadline = self.state.leaving(), None

    def leave(self, code: int, reason: str, failures: tuple[Failure, ...] = ()) -> None:
        """End. `failures`: of ranks that are released already; () for those that are not."""
        self.outcome = Outcome(code, reason, self.final_report, failures or self.ranks.failures())

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        """The ranks are gone: run the order's checks, or see to the end of those that run already."""
        if self.checks.idle:
            self._begin_checks()
        self._conclude_checks()

    def check_meanwhile(self, order: Order) -> None:
        """Begin the order's checks while the ranks still die. Collective ones wait until their devices are
        free.
        """
        if self.pending is Step.CHECK and self.checks.idle and not requests.needs_store(order):
            self._begin_checks()

    def _conclude_checks(self) -> None:
        found = self.checks.outcome
        if found is None or self.ranks.live is not None:
            return
        self.checks.outcome = None
        if self.checks.duration_s:
            self._timings_s["diagnose_s"] = self.checks.duration_s
        self.finish(*found)

    def _begin_checks(self) -> None:
        order = self.state.order
        assignment = self.assignment_in(order) if order is not None else None
        if order is None or assignment is None or not order.checks:
            self.checks.duration_s = 0.0
            self.checks.outcome = (), ()
            return
        if order.store and assignment.group_rank == 0 and requests.needs_store(order):
            self.peers.stores.use(order.store)
        self.report(MessageType.ACK, ReportData(state="checking"))
        self.checks.start(order, assignment)

    def finish(self, findings: tuple[Finding, ...] = (), checks: tuple[CheckResult, ...] = ()) -> None:
        """Report that the order has been followed, and what the checks found."""
        timings_s, self._timings_s = self._timings_s, {}
        data = ReportData(findings=findings, checks=checks, timings_s=timings_s)
        self.report(MessageType.FINISH, data)
        if not self.link.connected:
            self.wait(PLANE_RETURN_S, Step.GIVE_UP_PLANE)

    def _make_operator_checks(self, wake: Callable[[], None]) -> OperatorCheckWatcher:
        self.operator_checks = OperatorCheckWatcher(self.identity, self.settings.checks, wake)
        return self.operator_checks

    # ------------------------------------------------------------ starting

    def start_ranks(self, order: Order, assignment: RankAssignment) -> None:
        """Meet the other agents in the order's store and start our ranks. StartFailed."""
        began_s = time.monotonic()
        workers = tuple(other.worker for other in order.assignments)
        if assignment.group_rank == 0:
            self.peers.stores.use(order.store)
        self.peers.retire()
        try:
            self.peers.connect(order.store, assignment.group_rank, workers)
            rendezvous_s = time.monotonic() - began_s
            group = self.ranks.start(order, assignment, self.watchers.environment())
        except (StoreGone, GuardError, OSError) as error:
            raise StartFailed(str(error)) from error
        self._watch(order, assignment, group)
        self.checks.prepare_due_s = time.monotonic() + SETTLE_S
        timings_s = {"rendezvous_s": rendezvous_s, "start_s": time.monotonic() - began_s - rendezvous_s}
        if assignment.group_rank == 0:
            again = f", start number {order.incarnation}" if order.incarnation > 1 else ""
            self.announce(f"training starts: {len(workers)} nodes, {_world_size(order)} ranks{again}")
        self.report(MessageType.ACK, ReportData(state="running", started=True, timings_s=timings_s))

    def wait_as_spare(self) -> None:
        """Check this node and hold its ranks ready, for the case that it is asked to take part."""
        self.spare_fitness.start()
        self.ranks.expect(self.watchers.environment())

    def assignment_in(self, order: Order) -> RankAssignment | None:
        """Which ranks the order gives to this life of this worker; None: it is a spare."""
        us = (self.identity.worker, self.identity.uid)
        return next((ours for ours in order.assignments if (ours.worker, ours.uid) == us), None)

    def _watch(self, order: Order, assignment: RankAssignment, group: RankGroup) -> None:
        pids = {rank: pid for rank, pid in group.pids.items() if pid}
        if pids:  # under the stock torchrun the ranks are not ours to watch
            world_size = _world_size(order)
            group.log_lines = self.watchers.log_lines
            self.watchers.on_started(
                WatchedRanks(order.incarnation, assignment, pids, group.logs, Path.cwd(), world_size)
            )


def _world_size(order: Order) -> int:
    return sum(assignment.nproc for assignment in order.assignments)
