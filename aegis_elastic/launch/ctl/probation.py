"""The trial of a node on probation: its taint has expired, and it must pass check and burn before it joins
again.

`run_trial` does that for the node that it runs on and records the outcome. A launcher has it run before its
agent joins, in a process of its own, so that a signal ends it and a broken GPU can't crash the launcher.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from aegis_elastic.agents.checks import burn
from aegis_elastic.checks.contract.budgets import CHEAP
from aegis_elastic.checks.contract.burn_protocol import Request
from aegis_elastic.control.host import addresses
from aegis_elastic.control.host.cluster import ClusterScope, Edit, of_cluster
from aegis_elastic.core.policy import node_records
from aegis_elastic.core.policy.node_records import NodeRecord, Standing
from aegis_elastic.launch.ctl import node_checks
from aegis_elastic.store.contract import StoreError


class Readable(Protocol):
    """What can be waited for."""

    def fileno(self) -> int: ...


# A launcher reads the record before anything else: an unreachable store must not delay it.
READ_TIMEOUT_S = 2.0
END_TIMEOUT_S = 10.0
# From a failed trial to the next one; GPUs that recover by themselves have done so by then.
RETRIAL_AFTER_S = 86400.0
# Where the io check writes: ranks need shared memory in any case.
PATHS = {"shm": "/dev/shm"}
_PR_SET_PDEATHSIG = 1


def run_trial(
    read_record: Callable[[], NodeRecord],
    change_record: Callable[[Edit], NodeRecord],
    node: str,
    burn_s: float,
) -> tuple[bool, str]:
    """Check and burn this node if it is on probation, and record the outcome. Returns whether it may join
    now, and why. `read_record` and `change_record` access its record.
    """
    verdict = node_records.judge(read_record(), time.time())
    if verdict.standing is not Standing.PROBATION:
        return verdict.free, f"{node} is {'free' if verdict.free else f'not to be used: {verdict.why}'}"
    failure = _find_fault(burn_s)
    now = time.time()

    def judged(record: NodeRecord) -> NodeRecord:
        return node_records.after_probation(
            record, now, failure, f"probation on {node}", now + RETRIAL_AFTER_S
        )

    after = node_records.judge(change_record(judged), time.time())
    if after.free:
        return True, f"{node} has passed check and burn and may take part again"
    return False, f"{node} stays out: {after.why}"


def _find_fault(burn_s: float) -> str:
    """What check or burn find on this node; "" for nothing."""
    args = argparse.Namespace(json=True, gpus=None, nproc=None, exclusive=False)
    for result in node_checks.run_checks(CHEAP, args, paths=PATHS):
        if not result.passed:
            return result.result
    process = burn.start(Request(burn_s, 0, 0), os.environ)
    try:
        burned = burn.wait_results(process, lambda progress: None)
    finally:
        process.kill()
        process.wait()
    return next((result.result for result in burned if not result.passed), "")


def run_before_joining(
    state_dir: Path | None,
    store: str | None,
    burn_s: float,
    interrupted: Readable,
    announce: Callable[[str], None],
) -> None:
    """Run this node's trial, if it is on probation, before its agent joins.

    The outcome is recorded; the master decides who joins. The trial ends when `interrupted` is readable.
    """
    node = addresses.node_name()
    scope = of_cluster(str(state_dir or ""), store or "")
    if scope is None or not asyncio.run(_is_due(scope, node, announce)):
        return
    announce(f"{node} is on probation: check and {burn_s:g} s of burn before it joins")
    argv = [sys.executable, "-m", "aegis_elastic.launch.ctl.main", "probation", "--burn-s", f"{burn_s:g}"]
    argv += ["--store", store] if store else ["--state-dir", str(state_dir)]
    argv += ["--tied-to", str(os.getpid())]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    ended = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ)
            selector.register(interrupted, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select()}
    finally:
        os.close(ended)
    if ended not in ready:
        process.send_signal(signal.SIGINT)  # on which it ends its child processes
    output = _rest_of_output(process).strip()
    announce(output.splitlines()[-1] if output else f"{node} was not judged")


def end_with_parent(parent: int) -> None:
    """End, as by an interrupt, when the process `parent` that has started us ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != parent:
        raise KeyboardInterrupt


def _rest_of_output(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=END_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


async def _is_due(scope: ClusterScope, node: str, announce: Callable[[str], None]) -> bool:
    try:
        record = await asyncio.wait_for(scope.record(node), READ_TIMEOUT_S)
        return node_records.judge(record, time.time()).standing is Standing.PROBATION
    except (StoreError, asyncio.TimeoutError) as error:
        announce(f"cannot tell whether {node} is on probation: {error or 'no answer'}")
        return False
    finally:
        await scope.close()
