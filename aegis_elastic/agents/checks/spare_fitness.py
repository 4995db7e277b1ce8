"""Whether a waiting spare could take part: its node's own checks, run once while it waits.

A node may be sent away only if somebody can take its place, so who waits has to be known as sound before. How
fast it is beside the others is measured when it has a seat, by the collective checks of that recovery: alone
it has nobody to be compared with.
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

# By --aegis-bootcheck: what the nodes that train have passed. `health` forms a group of this node's ranks.
SPARE_CHECKS: dict[str, tuple[str, ...]] = {
    "off": (),
    "env": ("io", "gpu", "runtime", "rdma"),
    "full": ("io", "gpu", "runtime", "rdma", "health"),
}
NAME = "fitness"


class SpareFitness:
    """Belongs to the agent's loop, which waits on `selector`; it has no thread."""

    def __init__(
        self,
        me: Identity,
        settings: CheckSettings,
        checks: Sequence[str],
        gpus: int,
        selector: selectors.BaseSelector,
        wake: Callable[[], None],
    ) -> None:
        """`gpus`: how many this node shows. `wake` is called when there are news."""
        self._me = me
        self._settings = settings
        self._checks = tuple(checks)
        self._gpus = gpus
        self._selector = selector
        self._wake = wake
        self._checker: CheckRun | None = None
        self._store: TCPStore | None = None
        self._news: dict[str, Any] | None = None

    def begin(self) -> None:
        """This agent waits as a spare from now on. A spare that has been checked isn't checked again."""
        if self._news is not None or self._checker is not None:
            return
        if not self._checks:
            self._tell(True, "not checked, as the job asks for no checks")
            return
        try:
            self._begin()
        except (OSError, RuntimeError) as error:  # no process, no store: nothing that the agent should die of
            self.forget()
            self._tell(False, f"cannot run its checks: {error}")

    def _begin(self) -> None:
        request = CheckRequest(
            checks=self._checks,
            worker=self._me.worker,
            node=self._me.node_name,
            paths={"shm": "/dev/shm", **self._settings.paths},
            expected_gpus=requests.expected_gpus(self._settings, self._gpus, self._me.nproc),
            world=self._own_world() if "health" in self._checks else None,
            budgets_s=dict(self._settings.budgets_s),
        )
        self._checker = CheckRun(request, start_checks(without_secrets(os.environ)))
        self._selector.register(self._checker, selectors.EVENT_READ, self._on_result)

    def _own_world(self) -> World:
        """A world of this node's ranks alone, at a store of its own."""
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
        checker = self._checker
        if checker is None:
            return
        descriptor = checker.fileno()
        checker.read()
        if not checker.done:
            return
        self._selector.unregister(descriptor)
        self._checker = self._store = None
        bad = [result for result in checker.results if not result.passed]
        why = "; ".join(result.result for result in bad) or ", ".join(self._checks)
        # That our own check broke says nothing against the node, and nothing for it.
        self._tell(not bad, why)

    def _tell(self, fit: bool, reason: str) -> None:
        self._news = {"fit": fit, "reason": reason[:1000]}
        self._wake()

    def forget(self) -> None:
        """It has a seat, or leaves: whatever runs here ends, and what was found counts no more."""
        self._news = self._store = None
        if self._checker is not None:
            self._selector.unregister(self._checker)
            self._checker.cancel()
            self._checker = None

    def news(self) -> dict[str, msgspec.Raw]:
        """What goes with the reports, under the names of watchers; {} while nothing is known."""
        return {NAME: msgspec.Raw(msgspec.json.encode(self._news))} if self._news is not None else {}
