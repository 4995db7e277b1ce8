"""The elastic agent of one node: it follows the newest order and reports what it did; it decides nothing of
the job.

The one exception is a rank that dies while the plane is out of reach: then the agents agree among themselves
(`agents.without_plane`), and tell the master when it is back.

What an agent has and can do is its `Node`. What it is in is one value, `state.AgentState`, whose module says
which event is heeded when. What waits is data, `pending.Pending`. Here are the reactions: one method for each
type of event, found by one table.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from aegis_elastic.agents.checks import requests
from aegis_elastic.agents.contract import Outcome, Settings
from aegis_elastic.agents.guard.client import (
    Exited,
    GatePassed,
    GuardDied,
    SpareGone,
    SpareReady,
    Stopped,
)
from aegis_elastic.agents.mailbox.events import (
    AllFinished,
    BusChanged,
    FactsChanged,
    FinalReportArrived,
    IncarnationEnded,
    Joined,
    NextStoreKnown,
    NotJoined,
    ReexecRequested,
    Refused,
    StoreReady,
    TorchrunEnded,
    WorldFormed,
)
from aegis_elastic.agents.mailbox.mailbox import Mailbox, SignalReceived
from aegis_elastic.agents.node import Node, StartFailed
from aegis_elastic.agents.pending import (
    ANSWER_S,
    CLOSE_S,
    PARKED_S,
    PLANE_RETURN_S,
    RECONNECT_S,
    REPORT_S,
    Leave,
    LeaveBySignal,
    LeaveTogether,
    Pending,
    Reexec,
    Start,
    Step,
)
from aegis_elastic.agents.plane.link import Identity, PlaneLink
from aegis_elastic.agents.ranks.exit_text import describe_exit, describe_exits
from aegis_elastic.agents.ranks.node_ranks import RankHolder
from aegis_elastic.agents.ranks.rank_group import RankGroup
from aegis_elastic.agents.standalone.unreported_ends import UnreportedEnds
from aegis_elastic.agents.state import AgentMode, AgentState
from aegis_elastic.agents.without_plane import WithoutPlane
from aegis_elastic.core.diagnosis.attribution import clues_of, needs_earlier_checkpoint
from aegis_elastic.core.model import Failure
from aegis_elastic.core.protocol.directives import OperatorCheck
from aegis_elastic.core.protocol.messages import MessageType, ReportData
from aegis_elastic.core.protocol.orders import Action, Order
from aegis_elastic.core.rank_assignment import RankAssignment

logger = logging.getLogger(__name__)

# Asks for another process in our place: what schedulers know as "please start this again".
EXIT_REQUEUE = 75


class AegisElasticAgent:
    """`supervise` is the agent's life; everything else is called from its loop."""

    # Replaced by `aegis_elastic.testing.faults`, whose nodes stop at given points.
    node_type: type[Node] = Node

    def __init__(
        self,
        ranks: RankHolder,
        *,
        identity: Identity,
        link: PlaneLink,
        mailbox: Mailbox,
        settings: Settings,
        announce: Callable[[str], None],
    ) -> None:
        """`link` puts what it hears into `mailbox`; neither is closed by the agent, `ranks` are. `announce`
        writes a line for the user.
        """
        self._node = self.node_type(
            ranks,
            identity=identity,
            link=link,
            mailbox=mailbox,
            settings=settings,
            announce=announce,
            carry_out=self._carry_out,
        )
        self._without_plane = WithoutPlane(self._node)

    def supervise(self) -> Outcome:
        """Take part in the job until it ends for this node. Leaves nothing running."""
        return self._node.run(self._handlers())

    def _handlers(self) -> Mapping[type, Callable[[Any], None]]:
        node, without_plane = self._node, self._without_plane
        return {
            # From the master.
            Order: self._on_order,
            OperatorCheck: self._on_operator_check,
            FinalReportArrived: self._on_final_report,
            ReexecRequested: self._on_reexec_requested,
            # From the link to it.
            Joined: self._on_joined,
            NotJoined: self._on_not_joined,
            Refused: self._on_refused,
            BusChanged: self._on_bus_changed,
            # From the other agents.
            IncarnationEnded: without_plane.on_incarnation_ended,
            NextStoreKnown: without_plane.on_next_store,
            WorldFormed: without_plane.on_world_formed,
            AllFinished: without_plane.on_all_finished,
            # From this node.
            StoreReady: self._on_reportable,
            FactsChanged: self._on_reportable,
            SignalReceived: self._on_signal,
            TorchrunEnded: self._on_torchrun_ended,
            # From the guard.
            Exited: self._on_exited,
            Stopped: self._on_stopped,
            GuardDied: self._on_guard_died,
            GatePassed: node.ranks.on_spare_event,
            SpareReady: node.ranks.on_spare_event,
            SpareGone: node.ranks.on_spare_event,
        }

    # ------------------------------------------------------------ orders

    def _on_order(self, order: Order) -> None:
        node = self._node
        mode, newest = node.state.mode, node.state.order
        if mode is AgentMode.PARKED:
            if order.action is Action.CLOSE:
                node.leave(_exit_code_of(order), order.reason)
        elif mode is AgentMode.STANDALONE_FROM_START:
            self._without_plane.on_order(order)
        elif mode is AgentMode.STANDALONE and not self._without_plane.back_in_step(order):
            return
        elif newest is not None and order.seq_num <= newest.seq_num:
            self._on_order_repeated(order)
        else:
            self._follow(order)

    def _follow(self, order: Order) -> None:
        node = self._node
        previous = node.state.order
        node.state = node.state.following(order)
        node.deadline = None
        assignment = node.assignment_in(order)
        if assignment is not None:
            node.spare_fitness.cancel()
        if order.action is Action.CLOSE:
            self._close_job(order)
        elif order.action is Action.INDEPENDENT:
            self._without_plane.fall_back(order.reason or "not enough nodes reached the master in time")
        elif assignment is None:
            node.report(MessageType.ACK, ReportData(state="spare"))
            if previous is None or node.assignment_in(previous) is not None:
                node.announce("waiting as a spare: every seat of the job is taken")
            node.stop_then(Step.WAIT_AS_SPARE)
        elif order.action is Action.RUN:
            self._run_ranks(order, assignment)
        else:
            self._acknowledge()
            if order.action is Action.BOOTCHECK:
                node.stop_then(Step.CHECK)
            elif requests.suspects_hang(order):
                self._check_hang(order)
            else:
                checks = order.action is Action.TROUBLESHOOT
                self._end_by_plane(Step.CHECK if checks else Step.FINISH)
                node.check_meanwhile(order)

    def _on_order_repeated(self, order: Order) -> None:
        """Our Error is unanswered, and yet the master speaks: it lives, and is finding out whose failure came
        first. Who helped themselves now would have the failure counted twice.
        """
        node = self._node
        self._note_hanging(order)
        newest = node.state.order
        waiting = node.reporter.kind is MessageType.ERROR and node.deadline is not None
        led = node.state.mode is not AgentMode.STANDALONE
        if waiting and led and newest is not None and order.seq_num == newest.seq_num:
            node.wait(ANSWER_S, Step.END_INCARNATION)
        elif node.link.echo_due:
            node.report_again()

    def _note_hanging(self, order: Order) -> None:
        """All agents are told when training hangs, whoever holds it up. They say so, and kill nothing."""
        node = self._node
        kind, data = node.reporter.kind, node.reporter.data
        state, newest = "hanging" if order.hanging else "running", node.state.order
        ours = newest is not None and order.seq_num == newest.seq_num
        if ours and {data.state, state} == {"running", "hanging"}:
            what = f"hangs, and nothing is stopped: {order.hanging}" if order.hanging else "moves again"
            node.announce(f"the control plane says that training {what}")
            node.report(kind, msgspec.structs.replace(data, state=state))

    def _acknowledge(self) -> None:
        """Our report on the last order says nothing of this one: a Finish must not be repeated under its
        number.
        """
        self._node.report(MessageType.ACK, ReportData(state="heard"))

    def _run_ranks(self, order: Order, assignment: RankAssignment) -> None:
        node = self._node
        group = node.ranks.group
        if group is not None and group.incarnation == order.incarnation and not group.stopping:
            node.report_again()  # The start that this order tells of has been made: only its number is new.
            return
        self._acknowledge()
        node.stop_then(Start(order, assignment))

    def _end_by_plane(self, pending: Pending) -> None:
        """The plane ends the incarnation: stop at once, unless the agents have ended it by themselves
        already.
        """
        group = self._node.ranks.group
        self._node.stop_then(pending)
        self._claim_end_by_plane(group)

    def _claim_end_by_plane(self, group: RankGroup | None) -> bool:
        """Write down that the plane ends the incarnation of these ranks. False if the agents have ended it
        by themselves before: then we go with them.
        """
        order = self._node.state.order
        if group is None or order is None or group.incarnation != order.incarnation:
            return True
        end = self._node.standalone.claim_end_by_plane(group.incarnation)
        if end is not None:
            self._without_plane.go_on(end)
        return end is None

    def _check_hang(self, order: Order) -> None:
        """A hang is suspected: where the ranks stand is seen only as long as they live."""
        node, group = self._node, self._node.ranks.group
        # Under the stock torchrun their pids are not ours to know.
        pids = {rank: pid for rank, pid in group.pids.items() if pid} if group is not None else {}
        if group is None or group.stopping or not pids:
            self._end_by_plane(Step.CHECK)
            node.check_meanwhile(order)
        elif self._claim_end_by_plane(group):
            node.watchers.on_ended()
            node.checks.cancel()
            node.checks.check_hang(order, pids, partial(self._stop_and_check, order))

    def _stop_and_check(self, order: Order) -> None:
        self._node.stop_then(Step.CHECK)
        self._node.check_meanwhile(order)

    def _close_job(self, order: Order) -> None:
        node = self._node
        failures = node.ranks.failures()
        node.report(MessageType.FINISH, ReportData(state="closing"))
        leave = Leave(_exit_code_of(order), order.reason, failures)
        node.stop_then(leave, node.settings.shutdown_timeout_s)

    # ------------------------------------------------------------ what has waited

    def _carry_out(self, pending: Pending) -> None:
        """Do what has waited for the ranks' end, or for its time."""
        node = self._node
        if isinstance(pending, Step):
            self._carry_out_step(pending)
        elif isinstance(pending, Start):
            self._start(pending.order, pending.assignment)
        elif isinstance(pending, Leave):
            node.leave(pending.code, pending.reason, pending.failures)
        elif isinstance(pending, LeaveBySignal):
            name = signal.Signals(pending.signum).name
            exits = describe_exits(pending.group.failures())
            node.leave(128 + pending.signum, f"ended by {name}: {exits}")
        elif isinstance(pending, LeaveTogether):
            self._without_plane.leave_together(pending.code, pending.reason)
        else:
            node.outcome = Outcome(EXIT_REQUEUE, pending.reason, renew=True)

    def _carry_out_step(self, step: Step) -> None:
        node = self._node
        if step is Step.WAIT_AS_SPARE:
            node.wait_as_spare()
        elif step is Step.CHECK:
            node.check()
        elif step is Step.FINISH:
            node.finish()
        elif step is Step.END_INCARNATION:
            self._without_plane.end_incarnation()
        elif step is Step.OFFER_NEXT_STORE:
            self._without_plane.offer_next_store()
        elif step is Step.GIVE_UP_PLANE:
            self._without_plane.give_up_plane()
        elif step is Step.FORM_WORLD:
            self._without_plane.form_world()
        elif step is Step.CLOSE_STANDALONE:
            self._without_plane.close_job()

    def _on_operator_check(self, check: OperatorCheck) -> None:
        if self._node.operator_checks is not None:
            self._node.operator_checks.start(check)

    def _start(self, order: Order, assignment: RankAssignment) -> None:
        try:
            self._node.start_ranks(order, assignment)
        except StartFailed as error:
            self._node.announce(f"cannot start training: {error}")
            self._fail(str(error), ())

    # ------------------------------------------------------------ the ranks end

    def _on_exited(self, exited: Exited) -> None:
        node = self._node
        group = node.ranks.group
        if group is None:
            return
        group.on_event(exited)
        if group.failed or not group.running:
            node.watchers.on_ended()
        if group.stopping or node.checks.checking_hang or node.reporter.kind is MessageType.ERROR:
            return
        if group.failed:
            detect_s = time.monotonic() - group.first_failure_s
            failures = group.failures()
            node.announce(describe_exit(failures[0]))
            if any(needs_earlier_checkpoint(failure) for failure in failures):
                node.announce("THE CHECKPOINT CAN'T BE READ: training has to resume from the one before")
            self._fail(describe_exit(failures[0]), failures, detect_s)
        elif not group.running:
            node.report(MessageType.FINISH, ReportData(state="finished"))
            if node.state.from_start:
                node.wait(REPORT_S if node.link.connected else 0.0, Step.CLOSE_STANDALONE)
            elif not node.link.connected:
                node.wait(CLOSE_S, Step.CLOSE_STANDALONE)

    def _on_stopped(self, stopped: Stopped) -> None:
        group = self._node.ranks.group
        if group is None:
            return
        was_stopped = group.stopped
        group.on_event(stopped)
        if group.stopped and not was_stopped:
            self._node.on_group_stopped(group)

    def _on_guard_died(self, _: GuardDied) -> None:
        node = self._node
        logger.error("the guard process ended; the kernel has killed the ranks")
        node.replace_guard()
        group = node.ranks.live
        if group is not None:
            node.watchers.on_ended()
            was_stopping, group.stopped = group.stopping, True
            if was_stopping:
                node.on_group_stopped(group)
            else:
                self._fail("the guard process of the ranks was killed", group.failures())

    def _fail(self, reason: str, failures: tuple[Failure, ...], detect_s: float = 0.0) -> None:
        """Training can't go on here."""
        node = self._node
        clues = (*clues_of(failures), *node.watchers.clues())
        error = ReportData(failures=failures, clues=clues, reason=reason, timings_s={"detect_s": detect_s})
        if node.state.from_start:
            # Sent when it is the job's end: no master counts what is restarted without it.
            node.reporter.update(MessageType.ERROR, error)
            self._without_plane.end_incarnation()
            return
        node.report(MessageType.ERROR, error)
        if node.state.mode is AgentMode.STANDALONE:
            self._without_plane.end_incarnation()
        else:
            node.wait(ANSWER_S if node.link.connected else RECONNECT_S, Step.END_INCARNATION)

    # ------------------------------------------------------------ the plane

    def _on_joined(self, _: Joined) -> None:
        """If we had orders, they were of a job that has ended without us: what we did counts no more."""
        node = self._node
        node.state = node.state.unparked()
        if node.state.order is not None and not node.state.from_start:
            node.announce("the control plane leads a new job of this name: starting anew with it")
            node.peers.retire()
            node.state, node.deadline = AgentState(), None
            node.standalone.unreported = UnreportedEnds()
            node.stop_then(Step.NOTHING)
        node.report_again()

    def _on_not_joined(self, event: NotJoined) -> None:
        self._without_plane.fall_back(event.reason)

    def _on_refused(self, refused: Refused) -> None:
        node = self._node
        if refused.parked:
            self._park(refused.reason)
        elif node.state.mode is AgentMode.PARKED:
            # Our place in line has come to an end with the job.
            node.leave(0 if refused.reason.endswith(": Succeed") else 1, refused.reason)
        elif node.state.from_start or (node.ranks.group is not None and refused.usage):
            logger.warning("%s", refused.reason)
        elif refused.usage:
            node.leave(2, refused.reason)
        else:
            # The order that goes to those who stay would make us wait as a spare.
            node.enter_leaving()
            node.stop_then(
                Leave(_exit_code_of_refusal(refused, node.settings.isolate_exit_code), refused.reason)
            )

    def _on_reexec_requested(self, request: ReexecRequested) -> None:
        node = self._node
        if node.state.from_start:
            return
        if not node.ranks.can_reexec:
            # The process is torchrun's, and so are its ranks: it isn't ours to execute again.
            logger.warning("no clean process under torchrun's own launcher (%s): going on", request.reason)
            node.link.contact_again("going on in the same process")
            return
        node.announce(f"starting anew in a clean process: {request.reason}")
        node.enter_leaving()
        node.stop_then(Reexec(request.reason))

    def _park(self, reason: str) -> None:
        """Take no part, but stay: srun returns the highest code of its tasks, so ours is to be the job's."""
        node = self._node
        if node.state.mode is not AgentMode.PARKED:
            node.state, node.deadline = node.state.parked(), None
            node.announce(f"{reason}; parked until the job ends, to return its exit code")
            node.stop_then(Step.NOTHING)

    def _on_bus_changed(self, change: BusChanged) -> None:
        node = self._node
        if node.state.mode is AgentMode.PARKED:
            node.deadline = None
            if not change.connected:
                gone = "the control plane is gone, and with it the news of the job's end: the others tell"
                node.wait(PARKED_S, Leave(0, gone))
        elif change.connected:
            node.announce("the control plane can be reached again")
            node.report_again()
        elif node.state.order is not None and not node.state.from_start:
            self._on_bus_gone(node.state.order)

    def _on_bus_gone(self, order: Order) -> None:
        node = self._node
        if node.ranks.live is None:
            node.announce("the control plane can't be reached; waiting for it")
            node.wait(PLANE_RETURN_S, Step.GIVE_UP_PLANE)
            return
        node.announce("the control plane can't be reached; training is not touched")
        if node.reporter.kind is MessageType.FINISH and order.action is Action.RUN:
            node.wait(CLOSE_S, Step.CLOSE_STANDALONE)

    def _on_final_report(self, event: FinalReportArrived) -> None:
        self._node.final_report = event.report

    # ------------------------------------------------------------ signals

    def _on_signal(self, received: SignalReceived) -> None:
        node = self._node
        signum, grace_s = received.signum, node.settings.shutdown_timeout_s
        if signum not in node.settings.signals:
            node.ranks.guard.signal(signum)
            return
        name, group = signal.Signals(signum).name, node.ranks.live
        if group is None:
            node.leave(128 + signum, f"ended by {name}")
            return
        again = group.stopping
        node.announce(f"{name}: passed on to the ranks, {grace_s:g} s to end")
        node.watchers.on_ended()
        node.enter_leaving()
        node.pending = LeaveBySignal(signum, group)
        node.ranks.stop(0.0 if again else grace_s, signum)

    def _on_reportable(self, _: StoreReady | FactsChanged) -> None:
        self._node.report_again()

    def _on_torchrun_ended(self, event: TorchrunEnded) -> None:
        self._node.leave(1, event.reason)


def _exit_code_of(close: Order) -> int:
    """The exit code that the job's end asks for."""
    return {"Succeed": 0, "Requeue": EXIT_REQUEUE}.get(close.outcome, 1)


def _exit_code_of_refusal(refused: Refused, isolate_exit_code: int) -> int:
    """A job that is over says how it ended; every other refusal is about this node."""
    over = {"the job has ended: Succeed": 0, "the job has ended: Failed": 1}
    codes = (code for end, code in over.items() if refused.reason.endswith(end))
    return next(codes, isolate_exit_code)
