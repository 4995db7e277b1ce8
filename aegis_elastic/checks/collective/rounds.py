"""The rounds of `core.diagnosis.localization` among real nodes: who tests with whom is agreed through the
check's store.

Group rank 0 coordinates: it writes each round to the store (key "round/<n>": the groups and the seconds that
the round may take, or the verdict), and decides on the next when all reports ("report/<n>/<rank>") are there
or overdue. Everybody, rank 0 too, waits for the round's key, tests with its group, and reports. A group
passes if all its members say so; who is silent has failed.

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

from aegis_elastic.checks.collective.process_group import WorldError, connect, first_line, formed
from aegis_elastic.checks.contract import child_process
from aegis_elastic.checks.contract.child_process import Note, Outcome, failed, passed
from aegis_elastic.checks.contract.request import World
from aegis_elastic.core.diagnosis.localization import FAULTS_MAX, Group, Localization, Tried, plan, rounds_max

# Of all the time there is, the share of the first round: the whole world takes longest to form.
_FIRST_SHARE = 0.25
# A round shorter than this says more about the machine's load than about its network; a longer one than that
# tells nothing new, for the partners are all there and waiting.
ROUND_S_MIN, ROUND_S_MAX = 2.0, 30.0
# Of a round: for each operation of the group, and for leaving it in good order. The rest is for the fork, the
# connection to the store and the report.
_OPERATION_SHARE, _LEAVE_SHARE = 0.6, 0.1
# After a round's time, for a report to arrive.
_REPORT_S = 1.0
_ELEMENTS = 1024


class _Call(msgspec.Struct, frozen=True):
    """What the coordinator says: the next round, or the verdict."""

    groups: tuple[tuple[int, ...], ...] = ()
    timeout_s: float = 0.0
    verdict: Localization | None = None


class Member:
    """This node's part in the rounds. `failures` are its own words about the groups that it saw fail."""

    def __init__(self, world: World, kind: str, store: Store, deadline: float, note: Note) -> None:
        """`store` as from `world.connect`, all peers being there; `deadline` on the monotonic clock."""
        self.failures: list[str] = []
        self._world, self._kind, self._store = world, kind, store
        self._deadline, self._note = deadline, note
        self._size, self._me = world.group_world_size, world.group_rank
        # Of three nodes' links two can't be told from their common node, so there one fault is assumed.
        self._faults_max = max(1, min(FAULTS_MAX, self._size - 2))
        self._history: list[Tried] = []
        self._time_s = 0.0
        self._overdue = 0.0

    def run(self) -> Localization:
        """Take part until the verdict, the same for all. Raises `WorldError` without store or coordinator."""
        self._set(f"left/{self._me}", str(self._deadline - time.monotonic()))
        if self._me == 0:
            self._agree_on_time()
        number = 0
        while True:
            if self._me == 0:
                self._set(f"round/{number}", msgspec.json.encode(self._next(number)).decode())
            call = self._hear(number)
            if call.verdict is not None:
                return call.verdict
            mine = [(index, group) for index, group in enumerate(call.groups) if self._me in group]
            for index, group in mine:
                self._note(f"testing node ranks {', '.join(map(str, group))} in round {number}")
                said = self._test(f"test/{number}/{index}", group, call.timeout_s)
                self._set(f"report/{number}/{self._me}", said)
            if self._me == 0:
                self._history.append(self._collect(number, call))
            number += 1

    def _agree_on_time(self) -> None:
        """The rounds must end while everybody still listens; nodes start their checks at different times."""
        met = time.monotonic()
        keys = self._present([f"left/{rank}" for rank in range(self._size)], _REPORT_S)
        self._deadline = met + min(float(self._store.get(key)) for key in keys)
        self._time_s = self._deadline - time.monotonic()

    def _next(self, number: int) -> _Call:
        wanted = plan(self._size, self._history, self._faults_max)
        if isinstance(wanted, Localization):
            return _Call(verdict=wanted)
        left_s = self._deadline - time.monotonic() - _REPORT_S
        timeout_s = min(ROUND_S_MAX, max(ROUND_S_MIN, self._share_s(number, left_s)))
        if timeout_s > left_s:
            reason = f"no time left for round {number + 1}"
            return _Call(verdict=Localization((), (), (), number, False, reason))
        self._overdue = time.monotonic() + timeout_s + _REPORT_S
        return _Call(wanted, timeout_s)

    def _share_s(self, number: int, left_s: float) -> float:
        """What the time that is left allows for this round, if it fails and so takes all its time."""
        if number == 0:
            return self._time_s * _FIRST_SHARE
        # As many as one broken link takes. Two may take more: then what is left is shared anew.
        rounds = rounds_max(self._size, self._faults_max, links=1) - number
        for_nodes = self._faults_max + 3 - number
        if rounds > 2 * for_nodes > 0:
            # Many rounds for links may follow, but these few are about nodes: nobody must be named for being
            # slow to answer.
            rounds = 2 * for_nodes
        return left_s / max(2, rounds) - _REPORT_S / 2

    def _hear(self, number: int) -> _Call:
        left_s = max(0.1, self._deadline - time.monotonic())
        try:
            self._store.wait([f"round/{number}"], timedelta(seconds=left_s))
            return msgspec.json.decode(self._store.get(f"round/{number}"), type=_Call)
        except RuntimeError as error:
            text = f"no word on round {number + 1} from node rank 0, which plans them: {first_line(error)}"
            raise WorldError("failed", text) from error

    def _set(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise WorldError("store", f"lost the store in the rounds: {first_line(error)}") from error

    def _test(self, prefix: str, group: Group, timeout_s: float) -> str:
        """Empty if the group forms and sums up rightly here, else why not."""
        attempt = partial(self._attempt, prefix, group, timeout_s)
        (result,) = child_process.run([child_process.task("group", attempt, timeout_s)])
        if result.passed:
            return ""
        said = result.result.removeprefix("group: ")
        self.failures.append(f"with {_partners(group, self._me)}: {said}")
        return said

    def _attempt(self, prefix: str, group: Group, timeout_s: float, note: Note) -> Outcome:
        """In the child: a client of the store of its own, for the parent's can't be shared."""
        rank, size = group.index(self._me), len(group)
        operation_s, leave_s = timeout_s * _OPERATION_SHARE, timeout_s * _LEAVE_SHARE
        try:
            store = PrefixStore(prefix, connect(self._world, self._kind, operation_s, note))
            with formed(store, self._world.device, rank, size, 0, operation_s, leave_s, note) as device:
                note("summing up")
                return _sum_up(rank, size, device)
        except WorldError as error:
            return failed(error.code, "network", str(error))

    def _collect(self, number: int, call: _Call) -> Tried:
        """Wait for all reports of the round, but no longer than it may take."""
        keys = {rank: f"report/{number}/{rank}" for group in call.groups for rank in group}
        there = self._present(list(keys.values()), max(0.1, self._overdue - time.monotonic()))
        good = {rank for rank, key in keys.items() if key in there and self._store.get(key) == b""}
        return Tried(call.groups, tuple(good.issuperset(group) for group in call.groups))

    def _present(self, keys: list[str], timeout_s: float) -> set[str]:
        """Those of the keys that are there, when all are or the time is up."""
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
            return set(keys)
        except RuntimeError:
            pass  # Time is up, or the store is lost: the look at each key says which.
        try:
            return {key for key in keys if self._store.check([key])}
        except RuntimeError as error:
            raise WorldError("store", f"lost the store in the rounds: {first_line(error)}") from error


def _sum_up(rank: int, size: int, device: torch.device) -> Outcome:
    value = torch.full((_ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(value)
    wrong = int((value != size * (size + 1) / 2).sum())
    if wrong:
        text = f"{wrong} of {_ELEMENTS} sums over {size} nodes are wrong here"
        return failed("wrong_value", "hardware", text)
    return passed("right")


def _partners(group: Group, me: int) -> str:
    others = [rank for rank in group if rank != me]
    return f"node rank {others[0]}" if len(others) == 1 else f"{len(others)} others"
