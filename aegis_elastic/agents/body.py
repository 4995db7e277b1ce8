"""What a node can do: hold ranks, stop and start them, run checks, say how it is, wait. The agent's
mechanics.

One selector waits for everything: the guard's descriptor (deaths of ranks), the inbox (orders, news of the
link, signals), the checks' pipe, and one deadline. What any of it means is for `agents.agent`.
"""

from __future__ import annotations

import logging
import selectors
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.api import LogsSpecs

from aegis_elastic.agents.checks import requests
from aegis_elastic.agents.checks.forked_process import ChecksProcess
from aegis_elastic.agents.checks.requests import CheckSettings
from aegis_elastic.agents.checks.runner import CheckRunner
from aegis_elastic.agents.checks.spare_fitness import SpareFitness
from aegis_elastic.agents.guard import orphans
from aegis_elastic.agents.guard.client import (
    Event,
    Exited,
    GatePassed,
    GuardClient,
    GuardDied,
    GuardError,
    SpareGone,
    SpareReady,
    Stopped,
)
from aegis_elastic.agents.mailbox.events import IncarnationEnded, NextStoreKnown
from aegis_elastic.agents.mailbox.mailbox import Mailbox
from aegis_elastic.agents.peers.peers import Peers
from aegis_elastic.agents.peers.stores import StoreGone, StorePool
from aegis_elastic.agents.plane.link import Identity, PlaneLink
from aegis_elastic.agents.ranks.rank_group import RankGroup
from aegis_elastic.agents.ranks.torch_seam import SeamAgent
from aegis_elastic.agents.ranks.warm_spares import SETTLE_S, Spares
from aegis_elastic.agents.standalone.fallback import Meeting
from aegis_elastic.agents.standalone.unreported_ends import UnreportedEnds
from aegis_elastic.agents.watch.contract import WatchedRanks, WatcherFactory, Watchers
from aegis_elastic.agents.watch.operator_checks import OperatorCheckWatcher
from aegis_elastic.core.accounts.report import Report
from aegis_elastic.core.events import Finding
from aegis_elastic.core.model import CheckResult, Failure
from aegis_elastic.core.protocol.messages import MessageType, ReportData, WirePhase
from aegis_elastic.core.protocol.orders import WIRE_PHASE, Order
from aegis_elastic.core.rank_assignment import RankAssignment
from aegis_elastic.worker.environment import prepare_env

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What the user may set of the agent. Times in seconds; `signals` end the launcher, others are passed
    on. `grace_given`: somebody asked for `fault_grace_s`.
    """

    meeting: Meeting
    fault_grace_s: float = 1.0
    grace_given: bool = False
    shutdown_timeout_s: float = 30.0
    signals: frozenset[int] = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
    checks: CheckSettings = field(default_factory=CheckSettings)
    isolate_exit_code: int = 1
    warm_spares: str = "auto"
    spare_checks: tuple[str, ...] = ()
    first_checks: ChecksProcess | None = None
    watchers: tuple[WatcherFactory, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How it ended for this launcher. `report` is the job's, if the master sent one; `renew`: the job goes
    on, and wants a clean process in our place.
    """

    code: int
    reason: str = ""
    report: Report | None = None
    failures: tuple[Failure, ...] = ()
    renew: bool = False


class Guard(Protocol):
    """What holds the ranks and tells of their deaths, as `GuardClient` says of each method."""

    def fileno(self) -> int: ...

    def events(self) -> list[Event]: ...

    def stop(self, grace_s: float, signum: int = ..., patient: bool = ..., heed: bool = ...) -> None: ...

    def signal(self, signum: int) -> None: ...

    def close(self) -> None: ...


class NodeBody(SeamAgent):
    """torchelastic's agent with a loop of our own; everything below the loop (the ranks' environment) is
    torch's.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        log_line_prefix_template: str | None,
        identity: Identity,
        link: PlaneLink,
        mailbox: Mailbox,
        settings: Settings,
        narrate: Callable[[str], None],
    ) -> None:
        super().__init__(
            spec,
            logs_specs,
            log_line_prefix_template=log_line_prefix_template,
            prepare_env=self._environment_of_rank,
        )
        self._me = identity
        self._link = link
        self._mailbox = mailbox
        self._set = settings
        self._narrate = narrate
        self._selector = selectors.DefaultSelector()
        self._guard = self._open_guard()
        # under torchrun's own agent the ranks are its children: nothing of ours can be held ready for it
        guard = self._guard
        self._spares = Spares(guard, settings.warm_spares) if isinstance(guard, GuardClient) else None
        self._stores = StorePool(identity.node_ip, lambda: mailbox.put("store"))
        self._order: Order | None = None
        self._ranks: RankGroup | None = None
        self._peers: Peers | None = None
        self._old_peers: Peers | None = None
        self._checks = CheckRunner(
            identity, settings.checks, self._selector, narrate, self._conclude_checks, settings.first_checks
        )
        look = partial(mailbox.put, "look")
        self._looking: OperatorCheckWatcher | None = None
        self._watchers = Watchers((*settings.watchers, self._make_looking), look)
        gpus = requests.count_gpus()
        self._spare_fitness = SpareFitness(
            identity, settings.checks, settings.spare_checks, gpus, self._selector, look
        )
        self._ledger = UnreportedEnds()
        self._generation = 0
        self._then: Callable[[], None] | None = None
        self._deadline: tuple[float, Callable[[], None]] | None = None
        self._said: tuple[MessageType, ReportData] = (MessageType.ACK, ReportData())
        self._times: dict[str, float] = {}
        self._stop_began_s = 0.0
        self._outcome: Outcome | None = None
        self._report: Report | None = None

    def _open_guard(self) -> Guard:
        """Whoever is to hold the ranks, anew. GuardError."""
        orphans.adopt()
        return GuardClient.start(self._me.job)

    def _replace_guard(self) -> None:
        """The guard has died: end what it has left behind, and have another."""
        self._selector.unregister(self._guard)
        self._guard.close()
        left = orphans.end() if isinstance(self._guard, GuardClient) else ()
        if left:
            logger.error("processes %s survive SIGKILL (in the kernel); going on without them", left)
        self._guard = self._open_guard()
        if self._spares is not None and isinstance(self._guard, GuardClient):
            self._spares.moved(self._guard)
        self._selector.register(self._guard, selectors.EVENT_READ, self._drain_guard)

    def _start_ranks(self, order: Order, assignment: RankAssignment) -> RankGroup:
        """Start the ranks that the order seats here. SpawnError, GuardError."""
        assert isinstance(self._guard, GuardClient)
        return RankGroup.start(self, self._guard, order, assignment, self._generation, self._spares)

    # ------------------------------------------------------------ the loop

    def supervise(self) -> Outcome:
        """Take part in the job until it ends for this node. Leaves nothing running."""
        self._selector.register(self._mailbox, selectors.EVENT_READ, self._drain_inbox)
        self._selector.register(self._guard, selectors.EVENT_READ, self._drain_guard)
        try:
            while self._outcome is None:
                for key, _ in self._selector.select(self._timeout_s()):
                    key.data()
                self._prepare()
                if self._deadline is not None and time.monotonic() >= self._deadline[0]:
                    _, act = self._deadline
                    self._deadline = None
                    act()
            return self._outcome
        finally:
            self._clear_up()

    def _timeout_s(self) -> float | None:
        moments = [
            self._deadline[0] if self._deadline is not None else None,
            self._spares.due_s if self._spares is not None else None,
            self._checks.due_s,
        ]
        waits = [moment - time.monotonic() for moment in moments if moment is not None]
        return max(min(waits), 0.0) if waits else None

    def _prepare(self) -> None:
        """What the next failure will want, once the ranks have had their start for themselves."""
        spares, ranks = self._spares, self._ranks
        self._checks.prepare()
        if spares is None or spares.due_s is None or time.monotonic() < spares.due_s:
            return
        if spares.expecting or (ranks is not None and ranks.running and not ranks.stopping):
            spares.act()
        else:
            spares.on_ranks_ended()

    def _clear_up(self) -> None:
        self._watchers.close()
        self._checks.close()
        self._spare_fitness.forget()
        self._guard.close()
        self.finish_ranks()
        seen = [peers for peers in (self._peers, self._old_peers) if peers is not None]
        for peers in seen:
            peers.close()
        # With a store of ours its clients' waiting ends, here and elsewhere.
        self._stores.close()
        for peers in seen:
            peers.join()
        self._selector.close()

    def _drain_inbox(self) -> None:
        for item in self._mailbox.drain():
            if self._outcome is None:
                self._on_item(item)

    @abstractmethod
    def _on_item(self, item: object) -> None:
        """Something came into the inbox."""

    def _drain_guard(self) -> None:
        for event in self._guard.events():
            if isinstance(event, GuardDied):
                self._on_guard_died()
            elif isinstance(event, (GatePassed, SpareReady, SpareGone)):
                if self._spares is not None:
                    self._spares.on_event(event)
            elif self._ranks is not None:
                was_stopped = self._ranks.stopped
                self._ranks.on_event(event)
                if isinstance(event, Exited):
                    if self._ranks.failed or not self._ranks.running:
                        self._watchers.on_ended()
                    self._on_exited()
                elif isinstance(event, Stopped) and self._ranks.stopped and not was_stopped:
                    self._on_stopped()

    @abstractmethod
    def _on_exited(self) -> None:
        """A rank has ended."""

    @abstractmethod
    def _on_guard_died(self) -> None:
        """The guard has ended, and the ranks with it."""

    @abstractmethod
    def _fail(self, reason: str, failures: tuple[Failure, ...], detect_s: float = 0.0) -> None:
        """Training can't go on here."""

    # ------------------------------------------------------------ what an order asks for

    def _stop_then(self, then: Callable[[], None], grace_s: float | None = None) -> None:
        """Stop the ranks if there are any, and go on with `then` when nothing of them lives."""
        self._checks.forget()
        if self._ranks is None or self._ranks.stopped:
            self._ranks = None
            then()
            return
        self._then = then
        if not self._ranks.stopping:
            self._watchers.on_ended()
            self._checks.exits = self._ranks.exits
            self._ranks.stopping = True
            self._stop_began_s = time.monotonic()
            if grace_s is None:
                # training is to begin again: nobody is waited for who doesn't hear that it ends
                # A grace that somebody asked for is given to all who don't refuse it.
                heed = not self._set.grace_given
                self._guard.stop(self._set.fault_grace_s, patient=False, heed=heed)
            else:
                self._guard.stop(grace_s)

    def _on_stopped(self) -> None:
        assert self._ranks is not None
        self._times["stop_s"] = time.monotonic() - self._stop_began_s
        if self._ranks.unkillable:
            pids = ", ".join(map(str, self._ranks.unkillable))
            logger.error("processes %s survive SIGKILL (in the kernel); going on without them", pids)
        then, self._then = self._then, None
        if then is not None:
            # The new start needs the logs of the last one closed; anything else need not wait for that.
            self.finish_ranks()
            self._ranks = None
            then()

    def _check(self) -> None:
        """The ranks are gone: run the order's checks, or see to the end of those that run already."""
        if self._checks.idle:
            self._begin_checks()
        self._conclude_checks()

    def _check_meanwhile(self, order: Order) -> None:
        """Begin the order's checks while the ranks still die. Collective ones wait until their devices are
        free."""
        if self._then == self._check and self._checks.idle and not requests.needs_store(order):
            self._begin_checks()

    def _conclude_checks(self) -> None:
        found = self._checks.found
        if found is None or (self._ranks is not None and not self._ranks.stopped):
            return
        self._checks.found = None
        if self._checks.took_s:
            self._times["diagnose_s"] = self._checks.took_s
        self._finish(*found)

    def _begin_checks(self) -> None:
        order = self._order
        assignment = self._seat(order) if order is not None else None
        if order is None or assignment is None or not order.checks:
            self._checks.took_s = 0.0
            self._checks.found = (), ()
            return
        if order.store and assignment.group_rank == 0 and requests.needs_store(order):
            self._stores.use(order.store)
        self._say(MessageType.ACK, ReportData(state="checking"))
        self._checks.begin(order, assignment)

    def _start(self, order: Order, assignment: RankAssignment) -> None:
        began_s = time.monotonic()
        workers = tuple(other.worker for other in order.assignments)
        if assignment.group_rank == 0:
            self._stores.use(order.store)
        if self._old_peers is not None:
            self._old_peers.close()
        self._old_peers, self._peers = self._peers, None
        self._generation += 1
        try:
            self._peers = Peers(
                order.store,
                assignment.group_rank,
                workers,
                lambda peers: self._mailbox.put(IncarnationEnded(peers)),
                lambda peers, address: self._mailbox.put(NextStoreKnown(peers, address)),
                lambda: self._mailbox.put("look"),
            )
            rendezvous_s = time.monotonic() - began_s
            self._ranks = self._start_ranks(order, assignment)
        except (StoreGone, GuardError, OSError) as error:
            self._narrate(f"cannot start training: {error}")
            self._fail(str(error), ())
            return
        self._watch(order, assignment, self._ranks)
        self._checks.due_s = time.monotonic() + SETTLE_S
        times = {"rendezvous_s": rendezvous_s, "start_s": time.monotonic() - began_s - rendezvous_s}
        if assignment.group_rank == 0:
            again = f", start number {order.incarnation}" if order.incarnation > 1 else ""
            self._narrate(f"training starts: {len(workers)} nodes, {_world_size(order)} ranks{again}")
        self._say(MessageType.ACK, ReportData(state="running", started=True, timings_s=times))

    def _watch(self, order: Order, assignment: RankAssignment, ranks: RankGroup) -> None:
        pids = {rank: pid for rank, pid in ranks.pids.items() if pid}
        if pids:  # under the stock torchrun the ranks are not ours to look at
            world = _world_size(order)
            ranks.log_lines = self._watchers.log_lines
            self._watchers.on_started(
                WatchedRanks(order.incarnation, assignment, pids, ranks.logs, Path.cwd(), world)
            )

    def _make_looking(self, wake: Callable[[], None]) -> OperatorCheckWatcher:
        self._looking = OperatorCheckWatcher(self._me, self._set.checks, wake)
        return self._looking

    def _environment_of_rank(self, env: Mapping[str, str]) -> dict[str, str]:
        return prepare_env({**env, **self._watchers.environment()})

    def _finish(self, findings: tuple[Finding, ...] = (), checks: tuple[CheckResult, ...] = ()) -> None:
        times, self._times = self._times, {}
        self._say(MessageType.FINISH, ReportData(findings=findings, checks=checks, timings_s=times))

    # ------------------------------------------------------------ saying and waiting

    def _say(self, kind: MessageType, data: ReportData) -> None:
        self._said = (kind, data)
        self._say_again()

    def _say_again(self) -> None:
        """Our newest report, with what changes by itself: the store we hold, the ends that are not
        settled.
        """
        order = self._order
        if order is None:
            self._link.report(
                MessageType.ACK,
                WirePhase.BOOTCHECK,
                0,
                0,
                ReportData(state="joining", store=self._stores.ready),
            )
            return
        self._report_on(order)

    def _report_on(self, order: Order) -> None:
        """Report as an answer to that order."""
        kind, data = self._said
        alive: tuple[str, ...] = tuple(sorted(self._peers.alive)) if self._peers is not None else ()
        full = msgspec.structs.replace(
            data,
            store=self._stores.ready,
            independent=self._ledger.ends,
            alive=alive,
            watched={**self._watchers.facts(), **self._spare_fitness.facts()},
        )
        self._link.report(kind, WirePhase(WIRE_PHASE[order.action]), order.seq_num, order.incarnation, full)

    def _wait(self, seconds: float, act: Callable[[], None]) -> None:
        self._deadline = (time.monotonic() + seconds, act)

    def _leave(self, code: int, reason: str) -> None:
        failures = self._ranks.failures() if self._ranks is not None else ()
        self._outcome = Outcome(code, reason, self._report, failures)

    def _seat(self, order: Order) -> RankAssignment | None:
        return next(
            (
                assignment
                for assignment in order.assignments
                if (assignment.worker, assignment.uid) == (self._me.worker, self._me.uid)
            ),
            None,
        )


def _world_size(order: Order) -> int:
    return sum(assignment.nproc for assignment in order.assignments)
