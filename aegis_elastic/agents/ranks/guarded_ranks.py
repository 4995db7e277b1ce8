"""The ranks in our guard's hands, started as torchelastic would start them: what `aegis-run` uses."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.api import LogsSpecs

from aegis_elastic.agents.guard import orphans
from aegis_elastic.agents.guard.client import GuardClient
from aegis_elastic.agents.ranks.rank_group import RankGroup
from aegis_elastic.agents.ranks.torch_seam import SeamAgent
from aegis_elastic.agents.ranks.warm_spares import Spares
from aegis_elastic.core.protocol.orders import Order
from aegis_elastic.core.rank_assignment import RankAssignment
from aegis_elastic.worker.environment import prepare_env

logger = logging.getLogger(__name__)


class GuardedRanks:
    """A `node_ranks.RankHolder`: the guard process, the warm spares, and torch's way of starting ranks."""

    can_reexec = True

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        log_line_prefix_template: str | None,
        job: str,
        warm_spares: str,
    ) -> None:
        """Starts the guard. `job` is its title; `warm_spares` is `Spares`' mode. GuardError, SeamError."""
        self._seam = SeamAgent(
            spec,
            logs_specs,
            log_line_prefix_template=log_line_prefix_template,
            prepare_env=self._environment_of_rank,
        )
        self._job = job
        self._added: Mapping[str, str] = {}
        self.guard = self._start_guard()
        self.spares = Spares(self.guard, warm_spares)

    def start(
        self, order: Order, assignment: RankAssignment, generation: int, environment: Mapping[str, str]
    ) -> RankGroup:
        """As `RankHolder`."""
        self._added = environment
        return RankGroup.start(self._seam, self.guard, order, assignment, generation, self.spares)

    def expect(self, environment: Mapping[str, str]) -> None:
        """As `RankHolder`: warm spares of the ranks that a start would bring here."""
        if self.spares.expecting:
            return
        self._added = environment
        try:
            self.spares.expect(self._seam.dry_run())
        except Exception as error:  # noqa: BLE001 - whatever torch may raise: a node waits without them, too
            logger.info("no warm spares: %s", error)

    def replace_guard(self) -> None:
        """As `RankHolder`."""
        self.guard.close()
        left = orphans.kill()
        if left:
            logger.error("processes %s survive SIGKILL (in the kernel); going on without them", left)
        self.guard = self._start_guard()
        self.spares.on_new_guard(self.guard)

    def finish_logs(self) -> None:
        """As `RankHolder`."""
        self._seam.finish_ranks()

    def _start_guard(self) -> GuardClient:
        orphans.adopt()
        return GuardClient.start(self._job)

    def _environment_of_rank(self, env: Mapping[str, str]) -> dict[str, str]:
        return prepare_env({**env, **self._added})
