"""The checks that orders ask of this node: one run at a time, in a process that is prepared beforehand."""

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

Outcome = tuple[tuple[Finding, ...], tuple[CheckResult, ...]]


class CheckRunner:
    """Part of the agent's loop, which waits on `selector` for the results; it has no thread."""

    def __init__(
        self,
        me: Identity,
        settings: CheckSettings,
        selector: selectors.BaseSelector,
        log: Callable[[str], None],
        on_complete: Callable[[], None],
        prepared: ChecksProcess | None = None,
    ) -> None:
        """`concluded` is called when a run is complete. `ready`: a process for the first run, ours from here
        on.
        """
        self._me = me
        self._settings = settings
        self._selector = selector
        self._log = log
        self._on_complete = on_complete
        self._run: CheckRun | None = None
        self._prepared = prepared
        self._gpus = requests.count_gpus()
        self._baseline: dict[str, Scalar] = {}
        # The ranks of this node that ended by themselves, for the checks that follow.
        self.exits: Mapping[int, RankExit] = {}
        # What to call after the hang check, and its results with the order that it was for.
        self._after_hang_check: Callable[[], None] | None = None
        self._hang_results: tuple[int, list[CheckResult]] = (0, [])
        # What the last complete run found, until the agent has taken it.
        self.outcome: Outcome | None = None
        self.duration_s = 0.0
        # When (monotonic) to start the process for the next run; None: not now.
        self.prepare_due_s: float | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing runs and no outcome waits to be taken."""
        return self._run is None and self.outcome is None

    def prepare(self) -> None:
        """Start the process for the next run, if that is due."""
        if self.prepare_due_s is not None and time.monotonic() >= self.prepare_due_s:
            self.prepare_due_s = None
            if self._prepared is None:
                self._prepared = start_checks(without_secrets(os.environ))

    @property
    def checking_hang(self) -> bool:
        """Whether the hang check of live ranks runs, which are to be stopped afterwards."""
        return self._after_hang_check is not None

    def check_hang(self, order: Order, pids: Mapping[int, int], on_done: Callable[[], None]) -> None:
        """Read the stacks of these live ranks (global rank -> pid), then call `on_done`."""
        self._hang_results, self._after_hang_check, self.duration_s = (order.seq_num, []), on_done, 0.0
        self._start_run(requests.hang_check_request(self._me, self._settings, pids))

    def start(self, order: Order, assignment: RankAssignment) -> None:
        """Run the checks of the order, but for the hang check if it has run for this order."""
        if self._hang_results[0] != order.seq_num:
            self._hang_results, self.duration_s = (order.seq_num, []), 0.0
        done = {result.check_type for result in self._hang_results[1]}
        remaining = msgspec.structs.replace(order, checks=tuple(c for c in order.checks if c not in done))
        self._start_run(
            requests.check_request(
                remaining, assignment, self._me, self._settings, self._gpus, self._baseline, self.exits
            )
        )

    def _start_run(self, request: CheckRequest) -> None:
        self.prepare_due_s = None
        process, self._prepared = self._prepared, None
        if process is None or process.poll() is not None:
            process = start_checks(without_secrets(os.environ))
        self._run = CheckRun(request, process)
        self._selector.register(self._run, selectors.EVENT_READ, self._on_result)

    def _on_result(self) -> None:
        run = self._run
        if run is None:
            return
        run_fd = run.fileno()
        run.read()
        if run.done:
            self._selector.unregister(run_fd)
            self._run = None
            self.duration_s += time.monotonic() - run.started_s
            on_done, self._after_hang_check = self._after_hang_check, None
            if on_done is not None:
                self._hang_results[1].extend(run.results)
                on_done()
                return
            results = [*self._hang_results[1], *run.results]
            self._hang_results = (0, [])
            for result in results:
                if not result.passed:
                    self._log(f"check {result.check_type}: {result.result}")
                elif result.check_type in ("gpu", "rdma"):
                    self._baseline |= result.details
            self.outcome = findings_of(results), tuple(results)
            self._on_complete()

    def cancel(self) -> None:
        """End the run, and discard its outcome."""
        self.outcome, self._after_hang_check = None, None
        if self._run is not None:
            self._selector.unregister(self._run)
            self._run.cancel()
            self._run = None

    def close(self) -> None:
        """End all processes."""
        if self._run is not None:
            self._run.cancel()
        if self._prepared is not None:
            end_checks(self._prepared)
