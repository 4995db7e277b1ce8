"""An operator's look at this node while the job goes on: checks or the stress test, beside everything else.

A watcher like the others: it has a thread of its own, which ends with the look, and its facts go with the
agent's reports. It touches neither the ranks nor the checks of a troubleshooting. A newer look ends an older
one.
"""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from aegis_elastic.agents.checks import burn
from aegis_elastic.agents.checks.process import CheckRun, start_checks
from aegis_elastic.agents.checks.requests import CheckSettings, count_gpus, device_of, expected_gpus
from aegis_elastic.agents.plane.link import Identity
from aegis_elastic.agents.watch.contract import Watched
from aegis_elastic.checks.contract.burn_protocol import Progress, Request
from aegis_elastic.checks.contract.request import CheckRequest, World
from aegis_elastic.core.model import CheckResult
from aegis_elastic.core.protocol import operator_checks
from aegis_elastic.core.protocol.directives import OperatorCheck
from aegis_elastic.core.protocol.messages import WATCHED_BYTES_MAX
from aegis_elastic.core.protocol.operator_checks import Answer, Device
from aegis_elastic.worker.environment import without_secrets

logger = logging.getLogger(__name__)

JOIN_S = 5.0


class OperatorCheckWatcher:
    """All methods but the thread's are called from the agent's loop."""

    name = operator_checks.NAME

    def __init__(self, me: Identity, settings: CheckSettings, wake: Callable[[], None]) -> None:
        self._me = me
        self._settings = settings
        self._wake = wake
        self._gpus = count_gpus()
        self._pids: Mapping[int, int] = {}
        self._lock = threading.Lock()
        self._answer: Answer | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._ended = False

    def environment(self) -> Mapping[str, str]:
        """It adds nothing to the ranks."""
        return {}

    def started(self, ranks: Watched) -> None:
        """Ranks whose stacks can be read from now on."""
        self._pids = ranks.pids

    def ended(self) -> None:
        """They are no more."""
        self._pids = {}

    def news(self) -> Mapping[str, Any] | None:
        """The newest look's answer so far. Too large for a report, it goes without details."""
        with self._lock:
            answer = self._answer
        if answer is None:
            return None
        if len(msgspec.json.encode(answer)) > WATCHED_BYTES_MAX:
            answer = msgspec.structs.replace(answer, results=tuple(map(_short, answer.results)))
        told: Mapping[str, Any] = msgspec.to_builtins(answer)
        return told

    def begin(self, look: OperatorCheck) -> None:
        """Do what this look asks, unless it is the one that is being done, or done, already."""
        with self._lock:
            if self._answer is not None and self._answer.look == look.look:
                return
        self._end()
        with self._lock:
            self._answer, self._ended = Answer(look.look), False
        self._thread = threading.Thread(
            target=self._run, args=(look, dict(self._pids)), name="aegis-look", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads to be had here
            self._thread = None
            self._tell(done=True, why=f"cannot look at this node: {error}")

    def close(self) -> None:
        """End the look that runs."""
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            process = self._process
        if process is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            self._thread = None

    # ------------------------------------------------------------ in the thread

    def _run(self, look: OperatorCheck, pids: dict[int, int]) -> None:
        # The checks die with the thread that started them: this one sees them to their end.
        why = ""
        try:
            if look.burn_s:
                self._burn(Request(look.burn_s))
            else:
                self._check(self._request(look, pids))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            why = f"cannot look at this node: {error}"
            logger.warning("%s", why)
        self._tell(done=True, why=why)

    def _request(self, look: OperatorCheck, pids: dict[int, int]) -> CheckRequest:
        world = None
        if look.world:
            device = device_of(self._gpus, int(look.world.get("localWorldSize", 1)))
            world = msgspec.convert({**look.world, "device": device}, World)
        return CheckRequest(
            checks=look.checks,
            worker=self._me.worker,
            node=self._me.node_name,
            paths={"shm": "/dev/shm", **self._settings.paths},
            expected_gpus=expected_gpus(self._settings, self._gpus, self._me.nproc),
            world=world,
            rank_pids=pids,
            budgets_s={**self._settings.budgets_s, **look.budgets_s},
        )

    def _check(self, request: CheckRequest) -> None:
        checker = CheckRun(request, self._own(start_checks(without_secrets(os.environ))))
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(checker, selectors.EVENT_READ)
                while not checker.done:
                    selector.select()
                    checker.read()
                    self._tell(results=checker.results)
        finally:
            self._disown()
            if not checker.done:
                checker.cancel()

    def _burn(self, request: Request) -> None:
        devices: dict[str, Device] = {}

        def told(progress: Progress) -> None:
            says = burn.figures(progress)
            devices[progress.device] = Device(progress.device, progress.elapsed_s, says)
            self._tell(devices=devices)

        process = self._own(burn.start(request, without_secrets(os.environ)))
        try:
            self._tell(results=burn.attend(process, told))
        finally:
            self._disown()

    def _own(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Whoever ends the look from now on ends this process."""
        with self._lock:
            self._process = process
            if self._ended:
                process.kill()
        return process

    def _disown(self) -> None:
        with self._lock:
            self._process = None

    def _tell(
        self,
        results: list[CheckResult] | None = None,
        devices: Mapping[str, Device] | None = None,
        done: bool = False,
        why: str = "",
    ) -> None:
        with self._lock:
            if self._ended or self._answer is None:
                return
            changes: dict[str, Any] = {"done": done, "why": why}
            if results is not None:
                changes["results"] = tuple(results)
            if devices is not None:
                changes["devices"] = tuple(devices.values())
            self._answer = msgspec.structs.replace(self._answer, **changes)
        self._wake()


def _short(result: CheckResult) -> CheckResult:
    return msgspec.structs.replace(result, details={}, result=result.result[: operator_checks.TEXT_CHARS_MAX])
