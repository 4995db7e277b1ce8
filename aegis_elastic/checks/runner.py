"""Runs the checks of a request, each as a task in a child process. torch is imported only where needed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from functools import partial

from aegis_elastic.checks.contract import child_process
from aegis_elastic.checks.contract.budgets import CHEAP, IMPORT_BUDGET_S, TORCH, budget_s
from aegis_elastic.checks.contract.child_process import Channel, OnStep, Outcome, Task
from aegis_elastic.checks.contract.request import CheckRequest
from aegis_elastic.core.model import CheckResult

Check = Callable[[CheckRequest, OnStep], Outcome]

# Where the function `check` of each cheap check is.
CHEAP_MODULES = {
    "io": "aegis_elastic.checks.host.io",
    "gpu": "aegis_elastic.checks.gpu.check",
    "runtime": "aegis_elastic.checks.host.runtime",
    "rdma": "aegis_elastic.checks.host.rdma",
    "hang": "aegis_elastic.checks.host.hang",
}


def run(request: CheckRequest) -> Iterator[CheckResult]:
    """The results of all requested checks, each as it ends."""
    tasks = [_cheap_task(name, request) for name in CHEAP if name in request.checks]
    in_torch = tuple(name for name in TORCH if name in request.checks)
    if in_torch:
        tasks.append(_torch_task(in_torch, request))
    return child_process.run(tasks)


def load() -> None:
    """Import the modules of the cheap checks while waiting for the request. An import that fails is left to
    the check that needs it.
    """
    for module in CHEAP_MODULES.values():
        try:
            importlib.import_module(module)
        except Exception:  # noqa: BLE001 - an import may raise anything; the check's own child reports it as its finding
            continue


def _cheap_task(name: str, request: CheckRequest) -> Task:
    # The module is imported in the child: a broken library then fails one check only, and imports overlap.
    return child_process.task(
        name, lambda on_step: _cheap_check(name)(request, on_step), budget_s(name, request.budgets_s)
    )


def _cheap_check(name: str) -> Check:
    check: Check = importlib.import_module(CHEAP_MODULES[name]).check
    return check


def _torch_task(names: tuple[str, ...], request: CheckRequest) -> Task:
    """One child that imports torch once and forks a grandchild for every check that needs it, in turn.

    It never touches CUDA, threads or a process group itself, so forking from it is safe.
    """

    def run_in_turn(channel: Channel) -> None:
        channel.step("importing torch")
        # Math libraries start threads at import, and a fork keeps only the calling one. Name look-ups
        # of a TCPStore client stall for five seconds where reverse DNS is broken.
        os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        # A refused connection is our finding; torch's C++ stack trace of it would only litter the job's
        # terminal.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        from aegis_elastic.checks import bootcheck
        from aegis_elastic.checks.collective import allreduce

        checks: dict[str, Check] = {
            "env": bootcheck.environment,
            "health": bootcheck.health,
            "allreduce_connection": allreduce.connection,
            "allreduce_performance": allreduce.performance,
        }
        for name in names:
            check, seconds = checks[name], budget_s(name, request.budgets_s)
            channel.extend(seconds + 2 * child_process.KILL_WAIT_S)
            channel.step(f"running {name}")
            for result in child_process.run([child_process.task(name, partial(check, request), seconds)]):
                channel.result(result)

    return Task(run_in_turn, IMPORT_BUDGET_S, names)
