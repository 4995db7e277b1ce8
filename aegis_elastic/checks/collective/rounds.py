"""The rounds of `core.diagnosis.localization` among real nodes, coordinated through the check's store.

Group rank 0 coordinates: it writes each round to the store (key "round/<n>": the groups and the seconds that
the round may take, or the verdict), and decides on the next when all reports ("report/<n>/<rank>") are there
or overdue. Every node, rank 0 too, waits for the round's key, tests with its group, and reports. A group
passes if all its members report success; a missing report counts as a failure.

Each test is a child process of its own: forming a communicator with a dead partner can hang beyond the reach
of any timeout, and the next round must not wait for it.
"""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from aegis_elastic.checks.collective.process_group import ProcessGroupError, connect, first_line, form_group
from aegis_elastic.checks.contract import child_process
from aegis_elastic.checks.contract.child_process import OnStep, Outcome, failed, passed
from aegis_elastic.checks.contract.request import World
from aegis_elastic.core.diagnosis.localization import FAULTS_MAX, Group, Localization, Tried, plan, rounds_max

# The first round's share of the time: the group of all nodes takes longest to form.
_FIRST_SHARE = 0.25
# A shorter round depends more on the machine's load than on its network; a longer one gains nothing, since
# all partners are already waiting.
ROUND_S_MIN, ROUND_S_MAX = 2.0, 30.0
# Shares of a round: for each operation of the group, and for leaving it. The rest is for the fork, the
# connection to the store and the report.
_OPERATION_SHARE, _LEAVE_SHARE = 0.6, 0.1
# After a round's time, for a report to arrive.
_REPORT_S = 1.0
_ELEMENTS = 1024


class _Round(msgspec.Struct, frozen=True):
    """The coordinator's message: the next round, or the verdict."""

    groups: tuple[tuple[int, ...], ...] = ()
    timeout_s: float = 0.0
    verdict: Localization | None = None


class Member:
    """This node's part in the rounds. `failures`: for each of its groups that failed, why."""

    def __init__(self, world: World, kind: str, store: Store, deadline: float, on_step: OnStep) -> None:
        """`store`: from `process_group.connect`, after all peers have come. `deadline`: monotonic, in
        seconds.
        """
        self.failures: list[str] = []
        self._world, self._kind, self._store = world, kind, store
        self._deadline, self._on_step = deadline, on_step
        self._size, self._rank = world.group_world_size, world.group_rank
        # Among three nodes, two broken links look like their common node, so one fault is assumed there.
        self._faults_max = max(1, min(FAULTS_MAX, self._size - 2))
        self._history: list[Tried] = []
        self._time_s = 0.0
        self._overdue = 0.0

    def run(self) -> Localization:
        """Take part until the verdict, the same on all nodes. Raises `ProcessGroupError` without store or
        coordinator.
        """
        self._set(f"left/{self._rank}", str(self._deadline - time.monotonic()))
        if self._rank == 0:
            self._agree_on_deadline()
        number = 0
        while True:
            if self._rank == 0:
                self._set(f"round/{number}", msgspec.json.encode(self._next(number)).decode())
            current = self._wait_round(number)
            if current.verdict is not None:
                return current.verdict
            own_groups = [(index, group) for index, group in enumerate(current.groups) if self._rank in group]
            for index, group in own_groups:
                self._on_step(f"testing node ranks {', '.join(map(str, group))} in round {number}")
                failure = self._test(f"test/{number}/{index}", group, current.timeout_s)
                self._set(f"report/{number}/{self._rank}", failure)
            if self._rank == 0:
                self._history.append(self._collect(number, current))
            number += 1

    def _agree_on_deadline(self) -> None:
        """Find the earliest deadline of all nodes, since they start their checks at different times."""
        met = time.monotonic()
        keys = self._present([f"left/{rank}" for rank in range(self._size)], _REPORT_S)
        self._deadline = met + min(float(self._store.get(key)) for key in keys)
        self._time_s = self._deadline - time.monotonic()

    def _next(self, number: int) -> _Round:
        planned = plan(self._size, self._history, self._faults_max)
        if isinstance(planned, Localization):
            return _Round(verdict=planned)
        left_s = self._deadline - time.monotonic() - _REPORT_S
        timeout_s = min(ROUND_S_MAX, max(ROUND_S_MIN, self._share_s(number, left_s)))
        if timeout_s > left_s:
            reason = f"no time left for round {number + 1}"
            return _Round(verdict=Localization((), (), (), number, False, reason))
        self._overdue = time.monotonic() + timeout_s + _REPORT_S
        return _Round(planned, timeout_s)

    def _share_s(self, number: int, left_s: float) -> float:
        """The seconds for this round, out of those left, if each of the next ones fails and takes all its
        time.
        """
        if number == 0:
            return self._time_s * _FIRST_SHARE
        # As many as one broken link takes. Two may take more: then the time left is shared again.
        rounds = rounds_max(self._size, self._faults_max, links=1) - number
        for_nodes = self._faults_max + 3 - number
        if rounds > 2 * for_nodes > 0:
            # Many rounds for links may follow, but these first ones are about nodes, and none must be found
            # broken for being slow to answer.
            rounds = 2 * for_nodes
        return left_s / max(2, rounds) - _REPORT_S / 2

    def _wait_round(self, number: int) -> _Round:
        left_s = max(0.1, self._deadline - time.monotonic())
        try:
            self._store.wait([f"round/{number}"], timedelta(seconds=left_s))
            return msgspec.json.decode(self._store.get(f"round/{number}"), type=_Round)
        except RuntimeError as error:
            text = f"no word on round {number + 1} from node rank 0, which plans them: {first_line(error)}"
            raise ProcessGroupError("failed", text) from error

    def _set(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise ProcessGroupError("store", f"lost the store in the rounds: {first_line(error)}") from error

    def _test(self, prefix: str, group: Group, timeout_s: float) -> str:
        """Why the group failed here; "" if it formed and the sum was right."""
        attempt = partial(self._attempt, prefix, group, timeout_s)
        (result,) = child_process.run([child_process.task("group", attempt, timeout_s)])
        if result.passed:
            return ""
        failure = result.result.removeprefix("group: ")
        self.failures.append(f"with {_partners(group, self._rank)}: {failure}")
        return failure

    def _attempt(self, prefix: str, group: Group, timeout_s: float, on_step: OnStep) -> Outcome:
        """In the child, with its own client of the store, since the parent's can't be shared."""
        rank, size = group.index(self._rank), len(group)
        operation_s, leave_s = timeout_s * _OPERATION_SHARE, timeout_s * _LEAVE_SHARE
        try:
            store = PrefixStore(prefix, connect(self._world, self._kind, operation_s, on_step))
            with form_group(
                store, self._world.device, rank, size, 0, operation_s, leave_s, on_step
            ) as device:
                on_step("summing up")
                return _sum_up(rank, size, device)
        except ProcessGroupError as error:
            return failed(error.code, "network", str(error))

    def _collect(self, number: int, current: _Round) -> Tried:
        """Wait for all reports of the round, until it is overdue."""
        keys = {rank: f"report/{number}/{rank}" for group in current.groups for rank in group}
        there = self._present(list(keys.values()), max(0.1, self._overdue - time.monotonic()))
        passed_ranks = {rank for rank, key in keys.items() if key in there and self._store.get(key) == b""}
        return Tried(current.groups, tuple(passed_ranks.issuperset(group) for group in current.groups))

    def _present(self, keys: list[str], timeout_s: float) -> set[str]:
        """The keys that are there, when all are or the time is up."""
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
            return set(keys)
        except RuntimeError:
            pass  # Time is up, or the store is lost: checking each key shows which.
        try:
            return {key for key in keys if self._store.check([key])}
        except RuntimeError as error:
            raise ProcessGroupError("store", f"lost the store in the rounds: {first_line(error)}") from error


def _sum_up(rank: int, size: int, device: torch.device) -> Outcome:
    value = torch.full((_ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(value)
    wrong = int((value != size * (size + 1) / 2).sum())
    if wrong:
        text = f"{wrong} of {_ELEMENTS} sums over {size} nodes are wrong here"
        return failed("wrong_value", "hardware", text)
    return passed("right")


def _partners(group: Group, own_rank: int) -> str:
    others = [rank for rank in group if rank != own_rank]
    return f"node rank {others[0]}" if len(others) == 1 else f"{len(others)} others"
