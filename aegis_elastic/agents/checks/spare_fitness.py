"""Whether a spare could take part: its node's own checks, run once while it waits.

A node may be evicted only if another can take its place, so a spare has to be known as sound before. How fast
it is beside the others is measured when it has ranks, by the collective checks of that recovery: a single
node has no peers to be compared with.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from torch.distributed import TCPStore

from aegis_elastic.agents.checks import requests
from aegis_elastic.agents.checks.process import CheckRun, start_checks
from aegis_elastic.agents.checks.requests import CheckSettings
from aegis_elastic.agents.peers.stores import serve
from aegis_elastic.agents.plane.link import Identity
from aegis_elastic.checks.contract.request import CheckRequest, World
from aegis_elastic.worker.environment import without_secrets

# By --aegis-bootcheck: what the nodes that train have passed. `health` forms a group of this node's ranks
# only.
SPARE_CHECKS: dict[str, tuple[str, ...]] = {
    "off": (),
    "env": ("io", "gpu", "runtime", "rdma"),
    "full": ("io", "gpu", "runtime", "rdma", "health"),
}
NAME = "fitness"


class SpareFitness:
    """Part of the agent's loop, which waits on `selector`; it has no thread."""

    def __init__(
        self,
        me: Identity,
        settings: CheckSettings,
        checks: Sequence[str],
        gpus: int,
        selector: selectors.BaseSelector,
        wake: Callable[[], None],
    ) -> None:
        """`gpus`: how many this node has. `wake` is called when the facts have changed."""
        self._me = me
        self._settings = settings
        self._checks = tuple(checks)
        self._gpus = gpus
        self._selector = selector
        self._wake = wake
        self._run: CheckRun | None = None
        self._store: TCPStore | None = None
        self._fitness: dict[str, Any] | None = None

    def start(self) -> None:
        """Run the checks, unless they have run or are running."""
        if self._fitness is not None or self._run is not None:
            return
        if not self._checks:
            self._report(True, "not checked, as the job asks for no checks")
            return
        try:
            self._start()
        except (OSError, RuntimeError) as error:  # no process, no store: no reason for the agent to end
            self.cancel()
            self._report(False, f"cannot run its checks: {error}")

    def _start(self) -> None:
        request = CheckRequest(
            checks=self._checks,
            worker=self._me.worker,
            node=self._me.node_name,
            paths={"shm": "/dev/shm", **self._settings.paths},
            expected_gpus=requests.expected_gpus(self._settings, self._gpus, self._me.nproc),
            world=self._own_world() if "health" in self._checks else None,
            budgets_s=dict(self._settings.budgets_s),
        )
        self._run = CheckRun(request, start_checks(without_secrets(os.environ)))
        self._selector.register(self._run, selectors.EVENT_READ, self._on_result)

    def _own_world(self) -> World:
        """A process group of this node's ranks only, with a store of its own."""
        self._store = serve(self._me.node_ip, 0)
        return World(
            group_rank=0,
            group_world_size=1,
            rank_offset=0,
            world_size=self._me.nproc,
            local_world_size=self._me.nproc,
            master_addr=self._me.node_ip,
            master_port=self._store.port,
            device=requests.device_of(self._gpus, self._me.nproc),
            tag=NAME,
        )

    def _on_result(self) -> None:
        run = self._run
        if run is None:
            return
        descriptor = run.fileno()
        run.read()
        if not run.done:
            return
        self._selector.unregister(descriptor)
        self._run = self._store = None
        failed = [result for result in run.results if not result.passed]
        why = "; ".join(result.result for result in failed) or ", ".join(self._checks)
        # A check of ours that crashed says nothing against the node, and nothing for it.
        self._report(not failed, why)

    def _report(self, fit: bool, reason: str) -> None:
        self._fitness = {"fit": fit, "reason": reason[:1000]}
        self._wake()

    def cancel(self) -> None:
        """The node got ranks, or leaves: end the run and discard the outcome."""
        self._fitness = self._store = None
        if self._run is not None:
            self._selector.unregister(self._run)
            self._run.cancel()
            self._run = None

    def facts(self) -> dict[str, msgspec.Raw]:
        """What goes into `ReportData.watched`; {} while nothing is known."""
        return {NAME: msgspec.Raw(msgspec.json.encode(self._fitness))} if self._fitness is not None else {}
