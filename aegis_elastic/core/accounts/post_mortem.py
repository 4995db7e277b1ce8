"""The post-mortem: evidence of each failure, gathered from events, and the conclusion when its recovery is
over. Pure.

The master's controller follows the events as they happen, the job report follows them in the journal: both
come to the same conclusion, because both use `PostMortem`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from aegis_elastic.core.diagnosis import evidence, peer_figures
from aegis_elastic.core.diagnosis.clocks import Bounds
from aegis_elastic.core.diagnosis.evidence import Conclusion, EarlierFailure, FailureEvidence, WorkerEvidence
from aegis_elastic.core.diagnosis.recovery import POSITION_CLUE
from aegis_elastic.core.events import Act, Error, Finish, Independent, Join, Lost, Renew
from aegis_elastic.core.machine import Transition
from aegis_elastic.core.model import RECOVERING, CheckResult, Phase, Status

_STACK, _KERNEL = "_stack", "_kernel"


@dataclass
class _OpenFailure:
    """A failure whose recovery is not over."""

    incarnation: int
    start_step: int
    root: str = ""
    verdict: str = ""
    step: int = -1
    renewed: bool = False
    unclear: bool = False
    sources: dict[str, WorkerEvidence] = field(default_factory=dict)

    def change(self, name: str, status: Status, **changes: object) -> None:
        worker = status.worker(name)
        known = self.sources.get(name) or WorkerEvidence(name, worker.node_name if worker else "")
        self.sources[name] = msgspec.structs.replace(known, **changes)


class PostMortem:
    """One job's failures, one at a time."""

    def __init__(self) -> None:
        self._open: _OpenFailure | None = None
        self._start_step = -1
        self._earlier: EarlierFailure | None = None

    def follow(self, event: object, before: Status, made: Transition) -> Conclusion | None:
        """Take in an event and its transition; returns the conclusion if a recovery is over with it."""
        after = made.status
        if isinstance(event, Error):
            self._error(event, before, made)
        elif isinstance(event, Act) and made.name == "failed":
            self._opened(before).root, self._opened(before).verdict = event.worker, event.verdict
        elif isinstance(event, Independent) and made.name == "merged":
            return self._merged(event, before)
        elif isinstance(event, (Lost, Join)):
            self._losses(before, after)
        elif isinstance(event, Finish) and after is not before:
            self._finish(event, before)
        if self._open is not None and self._open.root:
            self._open.step = max(self._open.step, after.highest_step)
            self._open.renewed |= any(isinstance(effect, Renew) for effect in made.effects)
        return self._over(before, after)

    def user_error(self) -> str:
        """Why the open failure is the user's own error, as far as is known; "" if not."""
        return evidence.user_error(self._collected(self._open)) if self._open and self._open.root else ""

    # ------------------------------------------------------------ gathering evidence

    def _opened(self, status: Status) -> _OpenFailure:
        if self._open is None or self._open.incarnation != status.incarnation:
            self._open = _OpenFailure(status.incarnation, self._start_step)
        return self._open

    def _error(self, event: Error, before: Status, made: Transition) -> None:
        if event.incarnation != before.incarnation:
            return
        opened = self._opened(before)
        known = opened.sources.get(event.worker)
        if known is None or not (known.failures or known.reason):  # a repeated report says nothing new
            clock = Bounds(*event.clock) if event.clock is not None else None
            opened.change(event.worker, before, failures=event.failures, reason=event.reason, clock=clock)
        if made.name == "failed":
            opened.root, opened.unclear = event.worker, POSITION_CLUE in event.clues

    def _losses(self, before: Status, after: Status) -> None:
        """Losses while training runs are evidence of its failure; those during a recovery are not."""
        if before.phase is not Phase.RUN_COMMAND:
            return
        missed = {worker.name for worker in before.workers if worker.restarted}
        for worker in after.workers:
            if worker.restarted and worker.name not in missed:
                opened = self._opened(before)
                opened.change(worker.name, before, lost=True)
                opened.root = opened.root or worker.name

    def _finish(self, event: Finish, before: Status) -> None:
        if before.phase is not Phase.TROUBLESHOOTING or self._open is None:
            return
        known = self._open.sources.get(event.worker)
        self._open.change(
            event.worker,
            before,
            findings=(*(known.findings if known else ()), *event.findings),
            checked=tuple(check.check_type for check in event.checks),
            **_check_details(event.checks),
        )

    def _merged(self, event: Independent, before: Status) -> Conclusion:
        """The agents restarted standalone: no checks have run."""
        opened = _OpenFailure(event.incarnation, self._start_step, event.worker, step=before.highest_step)
        opened.change(event.worker, before, failures=event.failures, reason=event.reason)
        return self._close(opened)

    # ------------------------------------------------------------ the conclusion

    def _over(self, before: Status, after: Status) -> Conclusion | None:
        started = after.phase is Phase.RUN_COMMAND and after.incarnation > before.incarnation
        conclusion = None
        if self._open is not None and self._open.root:
            failed = after.phase is Phase.FAILED and before.phase in (*RECOVERING, Phase.PENDING)
            if started or failed:
                conclusion = self._close(self._open)
        if started:
            self._open, self._start_step = None, after.highest_step
        return conclusion

    def _close(self, opened: _OpenFailure) -> Conclusion:
        collected = self._collected(opened)
        self._open = None
        root = opened.sources.get(opened.root)
        failure = evidence.root_failure(root.failures) if root is not None else None
        fingerprint = evidence.fingerprint_of(failure) if failure is not None else None
        # Another failure in between makes it no repetition of the one before.
        self._earlier = EarlierFailure(fingerprint, opened.step) if fingerprint is not None else None
        conclusion = evidence.conclude(collected)
        if opened.renewed and conclusion.level < 2:
            # The machine had its own reason: the level before has not helped.
            reason = "; ".join(filter(None, [conclusion.reason, "its agent was executed anew"]))
            return msgspec.structs.replace(conclusion, level=2, reason=reason)
        return conclusion

    def _collected(self, opened: _OpenFailure) -> FailureEvidence:
        return FailureEvidence(
            root=opened.root,
            sources=tuple(opened.sources.values()),
            step=opened.step,
            start_step=opened.start_step,
            earlier=self._earlier,
            verdict=opened.verdict,
            unclear=opened.unclear,
        )


def _check_details(checks: tuple[CheckResult, ...]) -> dict[str, object]:
    """What the checks of one worker returned beside findings, as fields of its `WorkerEvidence`."""
    figures: dict[str, float] = {}
    stacks: dict[int, str] = {}
    kernel: list[str] = []
    for check in checks:
        if check.check_type == "io":
            figures = peer_figures.storage_figures(check.details)
        elif check.check_type == "hang":
            stacks = {rank: text for rank, text in _by_rank(check.details, _STACK).items() if text}
            kernel = [text for text in _by_rank(check.details, _KERNEL).values() if text]
    return {"figures": figures, "stacks": stacks, "kernel": tuple(kernel)}


def _by_rank(details: Mapping[str, object], kind: str) -> dict[int, str]:
    """Rank -> text of details like "rank3_stack"; anything else that a node may have written is ignored."""
    found = {}
    for key, value in details.items():
        rank = key.removeprefix("rank").removesuffix(kind)
        if key.endswith(kind) and rank.isdigit() and isinstance(value, str):
            found[int(rank)] = value
    return found
