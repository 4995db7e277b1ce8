"""This node's checks: a process that stands ready for the next failure, and one run of checks at a time."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping

import msgspec

from aegis_elastic.agents.checks import requests
from aegis_elastic.agents.checks.forked_process import ChecksProcess
from aegis_elastic.agents.checks.process import CheckRun, end_checks, findings_of, start_checks
from aegis_elastic.agents.checks.requests import CheckSettings
from aegis_elastic.agents.plane.link import Identity
from aegis_elastic.checks.contract.request import CheckRequest, RankExit, Scalar
from aegis_elastic.core.events import Finding
from aegis_elastic.core.model import CheckResult
from aegis_elastic.core.protocol.orders import Order
from aegis_elastic.core.rank_assignment import RankAssignment
from aegis_elastic.worker.environment import without_secrets

Found = tuple[tuple[Finding, ...], tuple[CheckResult, ...]]


class CheckRunner:
    """Belongs to the agent's loop: it waits on `selector` for its results, and has no thread."""

    def __init__(
        self,
        me: Identity,
        settings: CheckSettings,
        selector: selectors.BaseSelector,
        narrate: Callable[[str], None],
        concluded: Callable[[], None],
        ready: ChecksProcess | None = None,
    ) -> None:
        """`concluded` is called when a run is complete. `ready`: a process for the first run, ours from here
        on.
        """
        self._me = me
        self._settings = settings
        self._selector = selector
        self._narrate = narrate
        self._concluded = concluded
        self._checker: CheckRun | None = None
        self._ready = ready
        self._gpus = requests.count_gpus()
        self._baseline: dict[str, Scalar] = {}
        # How ranks of this node ended by themselves, for the checks that follow.
        self.exits: Mapping[int, RankExit] = {}
        # What is to be done when the ranks have been looked at, and what the look for which order gave.
        self._then: Callable[[], None] | None = None
        self._looked: tuple[int, list[CheckResult]] = (0, [])
        # What the last complete run found, until somebody has taken it.
        self.found: Found | None = None
        self.took_s = 0.0
        # When the process for the next failure is to be made; None: not now.
        self.due_s: float | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits to be taken."""
        return self._checker is None and self.found is None

    def prepare(self) -> None:
        """Have a process ready, if that is due."""
        if self.due_s is not None and time.monotonic() >= self.due_s:
            self.due_s = None
            if self._ready is None:
                self._ready = start_checks(without_secrets(os.environ))

    @property
    def looking(self) -> bool:
        """Whether ranks are being looked at, which are to be stopped afterwards."""
        return self._then is not None

    def look(self, order: Order, pids: Mapping[int, int], then: Callable[[], None]) -> None:
        """See where these live ranks (global rank -> pid) stand, and go on with `then`."""
        self._looked, self._then, self.took_s = (order.seq_num, []), then, 0.0
        self._ask(requests.look_request(self._me, self._settings, pids))

    def begin(self, order: Order, assignment: RankAssignment) -> None:
        """Run what the order asks of this seat, but for what has been seen already."""
        if self._looked[0] != order.seq_num:
            self._looked, self.took_s = (order.seq_num, []), 0.0
        seen = {result.check_type for result in self._looked[1]}
        left = msgspec.structs.replace(order, checks=tuple(c for c in order.checks if c not in seen))
        self._ask(
            requests.check_request(
                left, assignment, self._me, self._settings, self._gpus, self._baseline, self.exits
            )
        )

    def _ask(self, request: CheckRequest) -> None:
        self.due_s = None
        process, self._ready = self._ready, None
        if process is None or process.poll() is not None:
            process = start_checks(without_secrets(os.environ))
        self._checker = CheckRun(request, process)
        self._selector.register(self._checker, selectors.EVENT_READ, self._on_result)

    def _on_result(self) -> None:
        checker = self._checker
        if checker is None:
            return
        checker_fd = checker.fileno()
        checker.read()
        if checker.done:
            self._selector.unregister(checker_fd)
            self._checker = None
            self.took_s += time.monotonic() - checker.started_s
            then, self._then = self._then, None
            if then is not None:
                self._looked[1].extend(checker.results)
                then()
                return
            results = [*self._looked[1], *checker.results]
            self._looked = (0, [])
            for result in results:
                if not result.passed:
                    self._narrate(f"check {result.check_type}: {result.result}")
                elif result.check_type in ("gpu", "rdma"):
                    self._baseline |= result.details
            self.found = findings_of(results), tuple(results)
            self._concluded()

    def forget(self) -> None:
        """End what runs; what was found counts no more."""
        self.found, self._then = None, None
        if self._checker is not None:
            self._selector.unregister(self._checker)
            self._checker.cancel()
            self._checker = None

    def close(self) -> None:
        """Leave no process behind."""
        if self._checker is not None:
            self._checker.cancel()
        if self._ready is not None:
            end_checks(self._ready)
