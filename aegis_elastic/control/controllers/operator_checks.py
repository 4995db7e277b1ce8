"""Operator checks (`aegisctl check|bootcheck|burn --job`): sends them to all agents and gathers the answers.

One at a time. Memory only: after a master has died the operator starts the check again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from aegis_elastic.checks.contract.budgets import DEFAULT_BUDGETS_S, IMPORT_BUDGET_S, TORCH
from aegis_elastic.control.controllers.contract import AdminHandler, Applied
from aegis_elastic.core.events import Event
from aegis_elastic.core.model import Phase, Status, Worker
from aegis_elastic.core.protocol import operator_checks
from aegis_elastic.core.protocol.directives import Directive, OperatorCheck
from aegis_elastic.core.protocol.messages import Message, ReportData
from aegis_elastic.core.protocol.operator_checks import Answer, NodeAnswer, Progress
from aegis_elastic.core.rank_assignment import RankAssignment, assign_ranks

logger = logging.getLogger(__name__)

_MEET = frozenset(TORCH) - {"env"}
# Beyond what the checks may take: starting them, and the transfer both ways.
MARGIN_S = 20.0
BURN_MARGIN_S = 200.0
# How long one call of aegisctl is held when there is nothing new.
HOLD_S = 5.0
BURN_S_MAX = 7 * 86400.0

Send = Callable[[str, Directive], Awaitable[None]]

_decoder = msgspec.json.Decoder(Answer)


class _CheckCall(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call."""

    checks: tuple[str, ...] = ()
    budgets_s: dict[str, float] = {}
    burn_s: float = 0.0
    while_training: bool = False


class OperatorCheckController:
    """One job's. `send` sends a directive to one worker."""

    def __init__(self, send: Send) -> None:
        self._send_to = send
        self._status: Status | None = None
        self._check_id = ""
        self._until_s = 0.0
        self._limit_s = 0.0
        self._nodes: dict[str, NodeAnswer] = {}
        self._directives: dict[str, OperatorCheck] = {}
        self._changed = asyncio.Event()

    @property
    def admin_handlers(self) -> dict[str, AdminHandler]:
        """The operations for aegisctl."""
        return {"look": self._begin, "looked": self._progress}

    def on_report(self, report: Message, now_s: float) -> None:
        """Take the answer out of a report, if there is one."""
        data = report.data
        raw = data.watched.get(operator_checks.NAME) if isinstance(data, ReportData) else None
        node = self._nodes.get(report.worker)
        if raw is None or node is None or not self._check_id:
            return
        try:
            answer = _decoder.decode(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            logger.warning("ignored what %s answers to an operator check: %s", report.worker, error)
            return
        if (
            answer.check_id == self._check_id
            and answer != node.answer
            and len(answer.results) <= operator_checks.RESULTS_MAX
        ):
            self._nodes[report.worker] = msgspec.structs.replace(node, answer=answer)
            self._changed.set()

    def on_transitions(self, status: Status, transitions: Sequence[Applied]) -> None:
        """Keep who takes part now."""
        self._status = status

    def due_s(self) -> float:
        """It waits for no time."""
        return math.inf

    def events_due(self, now_s: float) -> Sequence[Event]:
        """Never due."""
        return ()

    async def close(self) -> None:
        """Whoever waits for an answer gets it."""
        self._changed.set()

    # ------------------------------------------------------------ for aegisctl

    async def _begin(self, args: dict[str, Any]) -> Any:
        """Start an operator check; returns its progress. ValueError says why it can't be."""
        try:
            call = msgspec.convert(args, _CheckCall)
        except msgspec.ValidationError as error:
            raise ValueError(f"cannot understand the call: {error}") from error
        status = self._status
        present = (
            [worker for worker in (*status.workers, *status.spares) if not worker.gone] if status else []
        )
        if status is None or not present:
            raise ValueError("no node takes part in this job now")
        if not self._is_over():
            raise ValueError("an operator check is under way already; wait until it is done")
        _validate(call, status)
        assignments = assign_ranks(status.workers) if _MEET.intersection(call.checks) else ()
        if assignments:
            present = [worker for worker in status.workers if not worker.gone]
            if len(present) < len(assignments) or not present[0].store:
                raise ValueError("the collective checks need every node, and one is missing now")
        self._check_id = secrets.token_hex(8)
        self._limit_s = _limit_s(call)
        self._until_s = time.monotonic() + self._limit_s
        self._nodes = {worker.name: NodeAnswer(worker.name, worker.node_name) for worker in present}
        self._directives = {
            worker.name: self._directive(call, worker, assignments, present[0].store) for worker in present
        }
        await self._send_to_pending()
        return self._view()

    async def _send_to_pending(self) -> None:
        """To all who have not answered: the bus may lose a directive, and who has received it ignores it."""
        for worker, node in self._nodes.items():
            if node.answer is None:
                await self._send_to(worker, self._directives[worker])

    async def _progress(self, args: dict[str, Any]) -> Any:
        """The progress, at once if it has changed since the last call, else after a while."""
        if args.get("look") != self._check_id:
            raise ValueError("no such check: another was begun since, or the master was started anew")
        if not self._is_over():
            try:
                await asyncio.wait_for(self._changed.wait(), HOLD_S)
            except asyncio.TimeoutError:
                await self._send_to_pending()  # Nothing new is an answer, too.
        self._changed.clear()
        return self._view()

    def _view(self) -> Any:
        progress = Progress(self._check_id, tuple(self._nodes.values()), self._is_over(), self._limit_s)
        return msgspec.to_builtins(progress)

    def _is_over(self) -> bool:
        answered = all(node.answer is not None and node.answer.done for node in self._nodes.values())
        return answered or time.monotonic() >= self._until_s

    def _directive(
        self, call: _CheckCall, worker: Worker, assignments: Sequence[RankAssignment], store: str
    ) -> OperatorCheck:
        world: dict[str, int | str] = {}
        assignment = next((assignment for assignment in assignments if assignment.uid == worker.uid), None)
        if assignment is not None:
            host, _, port = store.rpartition(":")
            world = {
                "groupRank": assignment.group_rank,
                "groupWorldSize": len(assignments),
                "rankOffset": assignment.rank_offset,
                "worldSize": sum(each.nproc for each in assignments),
                "localWorldSize": assignment.nproc,
                "masterAddr": host.strip("[]"),
                "masterPort": int(port),
                "tag": f"look-{self._check_id}",
            }
        return OperatorCheck(worker.uid, self._check_id, call.checks, call.budgets_s, call.burn_s, world)


def _validate(call: _CheckCall, status: Status) -> None:
    if not call.checks and not 0 < call.burn_s <= BURN_S_MAX:
        raise ValueError(f"nothing to do: no checks, and {call.burn_s:g} s of burning")
    disturbing = sorted(set(call.checks) - operator_checks.HARMLESS) or (["burn"] if call.burn_s else [])
    if disturbing and status.phase is not Phase.PENDING and not call.while_training:
        raise ValueError(
            f"{', '.join(disturbing)} would disturb the training (it takes the network or the devices); say "
            "--while-training if that is wanted"
        )


def _limit_s(call: _CheckCall) -> float:
    if call.burn_s:
        return call.burn_s + BURN_MARGIN_S
    budgets = {name: call.budgets_s.get(name, DEFAULT_BUDGETS_S.get(name, 60.0)) for name in call.checks}
    in_turn = sum(seconds for name, seconds in budgets.items() if name in TORCH)
    side_by_side = max((seconds for name, seconds in budgets.items() if name not in TORCH), default=0.0)
    return max(in_turn + (IMPORT_BUDGET_S if in_turn else 0.0), side_by_side) + MARGIN_S
