"""Operator checks: checks or the stress test that a person asked for, while the job goes on.

A watcher like the others: it has a thread of its own, which ends with the check, and its facts are sent in
the agent's reports. It changes neither the ranks nor the checks after a failure. A newer operator check ends
an older one.
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
from aegis_elastic.agents.watch.contract import WatchedRanks
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
        self._cancelled = False

    def environment(self) -> Mapping[str, str]:
        """None."""
        return {}

    def on_started(self, ranks: WatchedRanks) -> None:
        """The ranks whose stacks can be read from now on."""
        self._pids = ranks.pids

    def on_ended(self) -> None:
        """There are none any more."""
        self._pids = {}

    def facts(self) -> Mapping[str, Any] | None:
        """The newest check's answer so far; without details if it would be too large for a report."""
        with self._lock:
            answer = self._answer
        if answer is None:
            return None
        if len(msgspec.json.encode(answer)) > WATCHED_BYTES_MAX:
            answer = msgspec.structs.replace(answer, results=tuple(map(_short, answer.results)))
        facts: Mapping[str, Any] = msgspec.to_builtins(answer)
        return facts

    def start(self, check: OperatorCheck) -> None:
        """Run this check, unless it is the one that is running, or has run, already."""
        with self._lock:
            if self._answer is not None and self._answer.check_id == check.check_id:
                return
        self._cancel()
        with self._lock:
            self._answer, self._cancelled = Answer(check.check_id), False
        self._thread = threading.Thread(
            target=self._run, args=(check, dict(self._pids)), name="aegis-operator-check", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads to be had here
            self._thread = None
            self._update_answer(done=True, why=f"cannot check this node: {error}")

    def close(self) -> None:
        """End the check that runs."""
        self._cancel()

    def _cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            process = self._process
        if process is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            self._thread = None

    # ------------------------------------------------------------ in the thread

    def _run(self, check: OperatorCheck, pids: dict[int, int]) -> None:
        # Check processes die with the thread that started them, so this thread waits for their end.
        why = ""
        try:
            if check.burn_s:
                self._burn(Request(check.burn_s))
            else:
                self._check(self._request(check, pids))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            why = f"cannot check this node: {error}"
            logger.warning("%s", why)
        self._update_answer(done=True, why=why)

    def _request(self, check: OperatorCheck, pids: dict[int, int]) -> CheckRequest:
        world = None
        if check.world:
            device = device_of(self._gpus, int(check.world.get("localWorldSize", 1)))
            world = msgspec.convert({**check.world, "device": device}, World)
        return CheckRequest(
            checks=check.checks,
            worker=self._me.worker,
            node=self._me.node_name,
            paths={"shm": "/dev/shm", **self._settings.paths},
            expected_gpus=expected_gpus(self._settings, self._gpus, self._me.nproc),
            world=world,
            rank_pids=pids,
            budgets_s={**self._settings.budgets_s, **check.budgets_s},
        )

    def _check(self, request: CheckRequest) -> None:
        run = CheckRun(request, self._set_process(start_checks(without_secrets(os.environ))))
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(run, selectors.EVENT_READ)
                while not run.done:
                    selector.select()
                    run.read()
                    self._update_answer(results=run.results)
        finally:
            self._clear_process()
            if not run.done:
                run.cancel()

    def _burn(self, request: Request) -> None:
        devices: dict[str, Device] = {}

        def on_progress(progress: Progress) -> None:
            figures = burn.describe_progress(progress)
            devices[progress.device] = Device(progress.device, progress.elapsed_s, figures)
            self._update_answer(devices=devices)

        process = self._set_process(burn.start(request, without_secrets(os.environ)))
        try:
            self._update_answer(results=burn.wait_results(process, on_progress))
        finally:
            self._clear_process()

    def _set_process(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Let `_cancel` kill this process; kill it now if that was already called."""
        with self._lock:
            self._process = process
            if self._cancelled:
                process.kill()
        return process

    def _clear_process(self) -> None:
        with self._lock:
            self._process = None

    def _update_answer(
        self,
        results: list[CheckResult] | None = None,
        devices: Mapping[str, Device] | None = None,
        done: bool = False,
        why: str = "",
    ) -> None:
        with self._lock:
            if self._cancelled or self._answer is None:
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
