"""Post-mortems of failures: what each one was, as a note in the journal, and whether it ends the job.

What is decided stays with `step`; this controller weighs the evidence (`core.accounts.post_mortem`) and notes
the conclusion. Only with `--aegis-fail-fast` it wants something: that a job ends whose failure is the user's
own error.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from aegis_elastic.checks.contract.environments import summarise
from aegis_elastic.checks.contract.request import Scalar
from aegis_elastic.control.controllers.contract import Applied
from aegis_elastic.core.accounts.journal import BadJournal, Line, takes_long, walk
from aegis_elastic.core.accounts.post_mortem import PostMortem
from aegis_elastic.core.diagnosis import evidence
from aegis_elastic.core.diagnosis.evidence import Conclusion
from aegis_elastic.core.events import Event, Finish, Noted, Quit
from aegis_elastic.core.machine import Transition
from aegis_elastic.core.model import TERMINAL, Phase, Status
from aegis_elastic.core.protocol.messages import Message

logger = logging.getLogger(__name__)


class PostMortemController:
    """One job's. `earlier`: the journal of a job that is continued, so that its last failure is known."""

    def __init__(
        self,
        feed: Callable[[Event], None],
        *,
        fail_fast: bool,
        earlier: Callable[[], Iterable[Line]] = tuple,
    ) -> None:
        self._feed = feed
        self._fail_fast = fail_fast
        self._post_mortem = PostMortem()
        self._status: Status | None = None
        self._environments: dict[str, Mapping[str, Scalar]] = {}
        self._follow_earlier(earlier)

    def on_report(self, report: Message, now_s: float) -> None:
        """Nothing: the events of a report say it all."""

    def on_transitions(self, status: Status, transitions: Sequence[Applied]) -> None:
        """Follow these transitions, and note what has become clear."""
        for event, transition in transitions:
            before, self._status = self._status or transition.status, transition.status
            concluded = self._post_mortem.follow(event, before, transition)
            if concluded is not None and transition.status.phase not in TERMINAL:
                self._note_conclusion(concluded, before)
            if isinstance(event, Finish):
                self._note_environment(event)
            if transition.name == "error" and self._fail_fast:
                self._quit_if_users_error()
            self._note_versions(before, transition)
        self._status = status

    def due_s(self) -> float:
        """It waits for no time."""
        return math.inf

    def events_due(self, now_s: float) -> Sequence[Event]:
        """Never due."""
        return ()

    async def close(self) -> None:
        """It holds nothing."""

    # ------------------------------------------------------------ conclusions

    def _note_conclusion(self, concluded: Conclusion, status: Status) -> None:
        worker = status.worker(concluded.worker)
        code = f"verdict.{concluded.fault_class.replace(' ', '_')}"
        why = concluded.reason or concluded.code
        detail = f"class {concluded.fault_class}, level {concluded.level}: {why}"
        if concluded.fault_class == evidence.CHECKPOINT:
            logger.warning("%s: %s", concluded.worker, why)
        self._feed(Noted(concluded.worker, worker.node_name if worker else "", code, detail, time.time()))

    def _quit_if_users_error(self) -> None:
        why = self._post_mortem.user_error()
        if why:
            self._feed(Quit(f"a user's error, and --aegis-fail-fast: {why}"))

    # ------------------------------------------------------------ beside failures

    def _note_environment(self, event: Finish) -> None:
        for check in event.checks:
            if check.check_type == "env":
                self._environments[event.worker] = check.details

    def _note_versions(self, before: Status, transition: Transition) -> None:
        """One line of the journal, if the bootcheck has found that the workers don't run the same."""
        if before.phase is not Phase.BOOT_CHECKING or transition.status.phase is not Phase.RUN_COMMAND:
            return
        line, differing = summarise(self._environments)
        if differing:
            logger.warning("%s", line)
            self._feed(Noted("", "", "bootcheck.versions", line, time.time()))

    def _follow_earlier(self, earlier: Callable[[], Iterable[Line]]) -> None:
        try:
            lines = list(earlier())
            if takes_long(lines):  # to know the last failure is worth no more than that
                logger.warning("what failed before is not read from a journal of %d lines", len(lines))
                return
            for walked in walk(lines):
                if walked.before is not None:
                    self._post_mortem.follow(walked.line.event, walked.before, walked.made)
        except BadJournal as error:
            logger.warning("what failed before is not known: %s", error)
