"""The seam to torch: the only module that touches torchelastic's private names.

What a rank gets (environment, log files, line prefixes, NUMA binding) is computed by torch's own
``LocalElasticAgent._start_workers``, so that it stays torch's whatever version is installed. Only the last
step is ours: ``start_processes``, a name in that module, is swapped for the length of the call by one that
hands the commands to the guard. There is no torch rendezvous and no store round trip: ranks and addresses are
arguments.

The private names are pinned by ``tests/agents/ranks/test_torch_seam.py`` for every supported version (2.6
up).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsSpecs, SubprocessContext

from aegis_elastic.agents.guard.client import GuardClient, RankSpec
from aegis_elastic.agents.ranks.error_file import RankFailure as RankFailure
from aegis_elastic.agents.ranks.error_file import failure_of as failure_of
from aegis_elastic.agents.ranks.warm_spares import Spares
from aegis_elastic.worker.environment import prepare_env

try:
    from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding as _bind_to_numa
except ImportError:  # torch before 2.9 knows no NUMA binding, and no numa_options either
    _bind_to_numa = None  # type: ignore[assignment]

_NO_STORE = object()  # torch asserts that the group has a store and then doesn't use it


class SeamError(RuntimeError):
    """Something of torchelastic that is not possible with the guard."""


@dataclass(frozen=True)
class JobIdentity:
    """The part of a rendezvous handler that torchelastic needs for the ranks' environment: used as
    ``WorkerSpec.rdzv_handler`` of a ``SeamAgent``. ``use_agent_store``: ranks connect to our TCPStore."""

    run_id: str
    backend: str = "aegis"
    use_agent_store: bool = True

    def get_run_id(self) -> str:
        """The job's id."""
        return self.run_id

    def get_backend(self) -> str:
        """Name of the rendezvous backend."""
        return self.backend


def run_log_dir(logs_specs: LogsSpecs, run_id: str) -> Path | None:
    """The directory for this run's logs, made now instead of at the first start of ranks. None if there are
    no logs, or for a user's class of LogsSpecs, which has its own.
    """
    if not isinstance(logs_specs, DefaultLogsSpecs) or logs_specs.root_log_dir == os.devnull:
        return None
    theirs: Any = logs_specs  # torch declares the field below as None until its first start
    if not theirs._run_log_dir:
        theirs._run_log_dir = theirs._make_log_dir(theirs.root_log_dir, run_id)
    return Path(theirs._run_log_dir)


PrepareEnv = Callable[[Mapping[str, str]], dict[str, str]]


class GuardedContext(SubprocessContext):
    """torchelastic's process context with the processes started by a guard.

    Logs, tee, filters and error files are torch's. Exits are the guard's events and stops go to the guard, so
    the base class's polling is not available. Signal handlers are not installed: they are the launcher's.
    """

    def __init__(
        self,
        *,
        guard: GuardClient,
        generation: int,
        prepare_env: PrepareEnv,
        spares: Spares | None = None,
        **arguments: Any,
    ) -> None:
        # start_method is for functions; a version's other arguments are passed on as they are
        arguments.pop("start_method", None)
        super().__init__(**arguments)
        self.generation = generation
        self._guard = guard
        self._prepare_env = prepare_env
        self._spares = spares
        self._numa = arguments.get("numa_options")
        self._pids: dict[int, int] = {}
        self._tails_running = False

    def start(self) -> None:
        """Start the ranks, then the tailers of their logs. Raises SpawnError, GuardError."""
        self._start()
        self._tails_running = True
        for tail in self._tail_logs:
            tail.start()

    def stop_tails(self) -> None:
        """Print what is left in the logs and end the tailers' threads (about 0.1 s, torch's poll). Call it
        when the ranks have ended, else the threads hold up the interpreter's exit. Safe to call twice."""
        if self._tails_running:
            self._tails_running = False
            for tail in self._tail_logs:
                tail.stop()
        for filtered in (self.filtered_stdout, self.filtered_stderr):
            if filtered is not None:
                filtered.close()

    def pids(self) -> dict[int, int]:
        """Local rank -> pid, as started."""
        return dict(self._pids)

    def _start(self) -> None:
        specs = []
        for local_rank in range(self.nprocs):
            argv = (str(self.entrypoint), *(str(argument) for argument in self.args[local_rank]))
            if _bind_to_numa is not None:
                argv = _bind_to_numa(argv, gpu_index=local_rank, numa_options=self._numa)
            env = self._prepare_env({**os.environ, **self.envs[local_rank]})
            specs.append(RankSpec(local_rank, argv, env, self.stdouts[local_rank], self.stderrs[local_rank]))
        if self._spares is None:
            self._pids = self._guard.spawn(self.generation, specs)
            return
        specs = self._spares.claim(specs)
        self._pids = self._guard.spawn(self.generation, specs)
        self._spares.on_ranks_started(self.generation, specs, self._pids)

    def _poll(self) -> Any:
        raise SeamError("cannot poll ranks under the guard: their exits are its events")

    def _close(self, death_sig: Any, timeout: int = 30) -> None:
        # torch's close() stops the tails after this; its caller has stopped the ranks through the guard
        self._tails_running = False


class _DryRunDone(Exception):
    def __init__(self, specs: list[RankSpec]) -> None:
        super().__init__()
        self.specs = specs


class _DryRunGuard:
    """Used in place of a guard: starts nothing."""

    def spawn(self, _generation: int, specs: list[RankSpec]) -> dict[int, int]:
        raise _DryRunDone(specs)


class SeamAgent(LocalElasticAgent):
    """Starts ranks as torchelastic's agent would, through a guard. Its run loop is not used.

    ``spec.rdzv_handler`` may be a ``JobIdentity``; ``spec.entrypoint`` a command (see ``command_of``).
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        log_line_prefix_template: str | None = None,
        prepare_env: PrepareEnv = prepare_env,
    ) -> None:
        if not isinstance(spec.entrypoint, str):
            raise SeamError(f"cannot start {spec.entrypoint!r}: not a command (see command_of)")
        super().__init__(spec, logs_specs=logs_specs, log_line_prefix_template=log_line_prefix_template)
        self._prepare_env = prepare_env

    def start_ranks(
        self,
        *,
        group_rank: int,
        group_world_size: int,
        rank_offset: int,
        world_size: int,
        role_rank_offset: int,
        role_world_size: int,
        master_addr: str,
        master_port: int,
        restart_count: int,
        guard: GuardClient,
        generation: int,
        spares: Spares | None = None,
    ) -> GuardedContext:
        """Start this node's ranks of one incarnation.

        Args:
            rank_offset: global rank of local rank 0; ``role_rank_offset`` counts only nodes of the same role.
            master_addr: with ``master_port``, the incarnation's TCPStore, hosted by the agent of the first
            node. restart_count: TORCHELASTIC_RESTART_COUNT, the same on every node. generation: the
            generation in the guard's events. spares: the warm spares that may become these ranks.

        Raises:
            SpawnError: a command can't be executed or a log can't be opened; nothing runs then.
            GuardError: the guard has ended.
        """
        group: Any = self.get_worker_group()  # torch declares the fields below as None until its rendezvous
        group.store = _NO_STORE
        group.group_rank, group.group_world_size = group_rank, group_world_size
        group.master_addr, group.master_port = master_addr, master_port
        for worker in group.workers:
            worker.global_rank, worker.world_size = rank_offset + worker.local_rank, world_size
            worker.role_rank, worker.role_world_size = role_rank_offset + worker.local_rank, role_world_size
        # torch derives the restart count from the restarts that an agent of its own would have left
        self._remaining_restarts = group.spec.max_restarts - restart_count
        created: list[GuardedContext] = []

        def start_guarded(**arguments: Any) -> GuardedContext:
            context = GuardedContext(
                guard=guard, generation=generation, prepare_env=self._prepare_env, spares=spares, **arguments
            )
            created.append(context)
            context.start()
            return context

        try:
            with _start_processes_replaced(start_guarded):
                pids = self._start_workers(group)
        except BaseException:
            self.finish_ranks()
            for context in created:
                context.stop_tails()
            raise
        for worker in group.workers:
            worker.id = pids[worker.local_rank]
        return created[0]

    def dry_run(self) -> list[RankSpec]:
        """The ranks that this node would start if it had a rank assignment. What is only known at a start
        (rank, world size, store) has placeholders. Nothing is started. SeamError, OSError.
        """
        stand_in: Any = _DryRunGuard()
        size = self.get_worker_group().spec.local_world_size
        try:
            self.start_ranks(
                group_rank=0,
                group_world_size=1,
                rank_offset=0,
                world_size=size,
                role_rank_offset=0,
                role_world_size=size,
                master_addr="127.0.0.1",
                master_port=0,
                restart_count=0,
                guard=stand_in,
                generation=0,
            )
        except _DryRunDone as done:
            return done.specs
        raise SeamError("cannot make a dry run of a start: torch started no processes")

    def finish_ranks(self) -> None:
        """Call when the ranks have ended: flushes their logs; ends torch's watchdog and health server of this
        incarnation, which the next start makes anew."""
        context, self._pcontext = self._pcontext, None
        self._shutdown()
        if isinstance(context, GuardedContext):
            context.stop_tails()


@contextmanager
def _start_processes_replaced(replacement: Callable[..., GuardedContext]) -> Iterator[None]:
    module: Any = local_elastic_agent
    original = module.start_processes
    module.start_processes = replacement
    try:
        yield
    finally:
        module.start_processes = original


# what run_script_path does, in an interpreter of its own: "-c" leaves its own name in sys.argv[0]
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def command_of(entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> tuple[str, tuple[str, ...]]:
    """The command for what torch's ``config_from_args`` returned; only ``--run-path`` gives a function there.

    Raises:
        SeamError: another function; a training is a command here.
    """
    arguments = tuple(str(argument) for argument in args)
    if isinstance(entrypoint, str):
        return entrypoint, arguments
    if entrypoint is torchrun.run_script_path:
        return os.environ.get("PYTHON_EXEC", sys.executable), ("-u", "-c", _RUN_PATH, *arguments)
    raise SeamError(f"cannot run the function {entrypoint!r}: give a script, a module or a program")
