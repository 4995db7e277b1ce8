"""Correlated failures: what befalls too many nodes at once holds the recovery, and isolates nobody.

It reads the same findings as `step` does, before `step` does, and puts `Hold` in line with the last of them:
so the machine waits instead of blaming nodes. Storage is then probed by this host only; anything else is
checked by all nodes when the hold runs out, which it does after ever longer times. If it has lasted for
`hold_max_s` in all, the job is ended and says so: waiting for ever is no answer, and neither is isolating.
Before training has begun nothing is lost by ending: first checks that condemn too many end the job at once.

It works under every policy mode: `observe` is about what automation would do to nodes, and a brake does
nothing to any. Without it the machine would isolate what it finds broken, one node after the other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from aegis_elastic.checks.contract.request import CheckRequest
from aegis_elastic.control.controllers.contract import Applied
from aegis_elastic.core.events import Event, Hold, Quit, Release
from aegis_elastic.core.model import CheckResult, Phase, Status
from aegis_elastic.core.policy import correlation
from aegis_elastic.core.policy.correlation import STORAGE, CommonFailure, WorkerFindings
from aegis_elastic.core.policy.settings import Policy
from aegis_elastic.core.protocol.messages import Message, MessageType, ReportData

logger = logging.getLogger(__name__)

PROBE_BUDGET_S = 30.0
# The checks' process ends a check at its budget; this much later it is hanging itself.
PROBE_PATIENCE_S = PROBE_BUDGET_S + 15.0

_CHECKING = (Phase.BOOT_CHECKING, Phase.TROUBLESHOOTING)

Page = Callable[[str, str, bool], None]


class CorrelatedFailureController:
    """One job's."""

    def __init__(
        self,
        feed: Callable[[Event], None],
        policy: Policy,
        page: Page,
        check_paths: Mapping[str, str],
        *,
        now: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`page` takes (key, text, urgent); `check_paths`: kind to directory, as the io check has them on
        every node. `now`: wall seconds; `jitter`: a number from 0 to 1, another one for every job.
        """
        self._feed = feed
        self._policy = policy
        self._page = page
        self._paths = dict(check_paths)
        self._now = now
        self._jitter = jitter
        self._status: Status | None = None
        self._seq_num = -1
        self._reported: dict[str, WorkerFindings] = {}
        self._found: CommonFailure | None = None
        # This recovery's holds: how many, and since when.
        self._holds = 0
        self._since = 0.0
        self._prober: asyncio.Task[None] | None = None

    def on_report(self, report: Message, now_s: float) -> None:
        """See `Controller.on_report`: keep what the checks of this round found."""
        status, data = self._status, report.data
        if status is None or status.phase not in _CHECKING or status.held or not isinstance(data, ReportData):
            return
        if report.type is not MessageType.FINISH or report.seq_num != status.seq_num:
            return
        if self._seq_num != status.seq_num:
            self._seq_num, self._reported = status.seq_num, {}
        worker = status.worker(report.worker)
        if worker is None or worker.uid != report.uid:
            return
        self._reported[worker.name] = WorkerFindings(worker.node_name, self._now(), data.findings)
        workers = [worker.name for worker in status.workers]
        first = status.phase is Phase.BOOT_CHECKING
        judge = correlation.too_many_broken if first else correlation.judge
        self._found = judge(self._reported, workers, self._now(), self._policy.guard)

    def on_transitions(self, status: Status, transitions: Sequence[Applied]) -> None:
        """See `Controller.on_transitions`."""
        before, self._status = self._status, status
        if status.phase is Phase.RUN_COMMAND:
            self._holds = 0
        if before is None and status.held and self._prober is None:
            # A master before us held the recovery, and took its prober along.
            self._holds, self._since = 1, self._now()
            self._probe()
        if not status.held:
            self._stop_probing()

    def due_s(self) -> float:
        """See `Controller.due_s`: at once, if there is something to say."""
        return -math.inf if self._found is not None else math.inf

    def events_due(self, now_s: float) -> Sequence[Event]:
        """See `Controller.events_due`: comes before the decision that the findings would lead to."""
        found, self._found = self._found, None
        if found is None:
            return ()
        now, guard = self._now(), self._policy.guard
        if self._status is not None and self._status.phase is Phase.BOOT_CHECKING:
            why = f"the first checks: {found.reason}; nobody is isolated, and training can't start"
            self._page(f"brake.{self._seq_num}", f"BRAKE: {why}", True)
            return (Quit(why),)
        if self._holds == 0:
            self._since = now
        left_s = self._since + guard.hold_max_s - now
        if left_s <= 0:
            return (
                Quit(f"{found.reason}; it has lasted for {now - self._since:.0f} s, and no node is blamed"),
            )
        # Storage without a path that could be probed is checked by all nodes, as anything else.
        probed = found.kind == STORAGE and bool(self._paths)
        wait_s = min(correlation.wait_s(self._holds, guard, probed=probed), left_s)
        if self._holds == 0:
            text = f"BRAKE: {found.reason}. The recovery waits, and nobody is isolated"
            self._page(f"brake.{self._seq_num}", text, True)
        self._holds += 1
        if probed:
            self._probe()
        return (Hold(found.reason, now + wait_s),)

    async def close(self) -> None:
        """See `Controller.close`."""
        prober = self._prober
        self._stop_probing()
        if prober is not None:
            await asyncio.gather(prober, return_exceptions=True)

    # ------------------------------------------------------------ the one prober

    def _probe(self) -> None:
        if self._prober is None and self._paths:
            self._prober = asyncio.get_running_loop().create_task(self._probe_until_well(), name="prober")

    def _stop_probing(self) -> None:
        # While `events_due` has given Hold and it isn't decided yet, the prober is asleep.
        if self._prober is not None and self._status is not None and not self._status.held:
            self._prober.cancel()
            self._prober = None

    async def _probe_until_well(self) -> None:
        guard = self._policy.guard
        while True:
            await asyncio.sleep(guard.probe_s)
            try:
                why = await probe_io(self._paths)
            except (OSError, msgspec.MsgspecError) as error:  # no process, or one that speaks nonsense
                why = f"the probe failed: {error}"
            if not why:
                break
            logger.info("still down: %s", why)
        # Other jobs wait for the same storage: not all at once.
        await asyncio.sleep(self._jitter() * guard.release_jitter_s)
        self._feed(Release("the storage answers again"))


async def probe_io(paths: Mapping[str, str]) -> str:
    """What the io check says is wrong with these paths from here, "" if nothing is."""
    request = CheckRequest(
        checks=("io",), worker="master", paths=dict(paths), budgets_s={"io": PROBE_BUDGET_S}
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aegis_elastic.checks"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await asyncio.wait_for(
            process.communicate(msgspec.json.encode(request)), PROBE_PATIENCE_S
        )
    except asyncio.TimeoutError:
        return f"the probe gave no answer in {PROBE_PATIENCE_S:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    for line in output.splitlines():
        result = msgspec.json.decode(line, type=CheckResult)
        return "" if result.passed else result.result
    return f"the probe ended with exit code {process.returncode} without any output"
