"""A node that was broken comes back: its taint has run out, and now it has to pass check and burn.

`prove` does that for the node that it runs on and writes down how it went. A launcher has it done before its
agent joins, in a process of its own, so that a signal ends it and a broken card takes no launcher along.
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


# A launcher asks before it does anything else: a store that is away must not hold it up.
LOOK_PATIENCE_S = 2.0
END_S = 10.0
# What a failed trial costs before the next one; cards that recover by themselves have done so by then.
AGAIN_S = 86400.0
# What the io check writes to: shared memory is what ranks need in any case.
PATHS = {"shm": "/dev/shm"}
_PR_SET_PDEATHSIG = 1


def prove(
    look: Callable[[], NodeRecord], change: Callable[[Edit], NodeRecord], node: str, burn_s: float
) -> tuple[bool, str]:
    """Check and burn this node if it is on probation, and record the outcome; whether it may take part now,
    and why, in words. `look` and `change` are for its record.
    """
    verdict = node_records.judge(look(), time.time())
    if verdict.standing is not Standing.PROBATION:
        return verdict.free, f"{node} is {'free' if verdict.free else f'not to be used: {verdict.why}'}"
    failure = _trial(burn_s)
    now = time.time()

    def judged(record: NodeRecord) -> NodeRecord:
        return node_records.on_trial(record, now, failure, f"probation on {node}", now + AGAIN_S)

    after = node_records.judge(change(judged), time.time())
    if after.free:
        return True, f"{node} has passed check and burn and may take part again"
    return False, f"{node} stays out: {after.why}"


def _trial(burn_s: float) -> str:
    """What check or burn find on this node; "" for nothing."""
    args = argparse.Namespace(json=True, gpus=None, nproc=None, exclusive=False)
    for result in node_checks.look(CHEAP, args, paths=PATHS):
        if not result.passed:
            return result.result
    process = burn.start(Request(burn_s, 0, 0), os.environ)
    try:
        burned = burn.attend(process, lambda progress: None)
    finally:
        process.kill()
        process.wait()
    return next((result.result for result in burned if not result.passed), "")


def stand(
    state_dir: Path | None,
    store: str | None,
    burn_s: float,
    interrupted: Readable,
    narrate: Callable[[str], None],
) -> None:
    """Have this node stand its trial, if it is on probation, before its agent joins.

    Whatever comes of it, the rendezvous decides. Readable `interrupted` ends the trial.
    """
    node = addresses.node_name()
    scope = of_cluster(str(state_dir or ""), store or "")
    if scope is None or not asyncio.run(_is_due(scope, node, narrate)):
        return
    narrate(f"{node} is on probation: check and {burn_s:g} s of burn before it takes part")
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
        process.send_signal(signal.SIGINT)  # on which it ends what it has started
    said = _last_words(process).strip()
    narrate(said.splitlines()[-1] if said else f"{node} was not judged")


def tie(parent: int) -> None:
    """End, as by an interrupt, when the process `parent` that has started us does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != parent:
        raise KeyboardInterrupt


def _last_words(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=END_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


async def _is_due(scope: ClusterScope, node: str, narrate: Callable[[str], None]) -> bool:
    try:
        record = await asyncio.wait_for(scope.record(node), LOOK_PATIENCE_S)
        return node_records.judge(record, time.time()).standing is Standing.PROBATION
    except (StoreError, asyncio.TimeoutError) as error:
        narrate(f"cannot tell whether {node} is on probation: {error or 'no answer'}")
        return False
    finally:
        await scope.close()
