"""The request to the checks' process: one JSON object on its standard input."""

from __future__ import annotations

import msgspec

from aegis_elastic.checks.contract.budgets import ALL

Scalar = float | int | str | bool | None


class World(msgspec.Struct, frozen=True, rename="camel"):
    """The nodes and ranks of the collective checks, and where they meet.

    One node is `group_rank` of `group_world_size` and has ranks `rank_offset` to `rank_offset +
    local_world_size` of `world_size`. The TCPStore at `master_addr`:`master_port` is hosted by an agent and
    listens already; checks are only clients. `tag` separates rounds in the same store: keys of an earlier
    round must not be read as answers. `device` is "cpu" (gloo) or "cuda" (nccl).
    """

    group_rank: int
    group_world_size: int
    rank_offset: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    device: str = "cpu"
    tag: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.group_rank < self.group_world_size:
            raise ValueError(f"groupRank must be in 0..{self.group_world_size - 1} (got {self.group_rank})")
        if self.local_world_size < 1 or not 0 <= self.rank_offset <= self.world_size - self.local_world_size:
            last = self.rank_offset + self.local_world_size - 1
            raise ValueError(f"ranks {self.rank_offset}..{last} are not in a world of {self.world_size}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f'device must be "cpu" or "cuda" (got {self.device!r})')


class RankExit(msgspec.Struct, frozen=True, rename="camel"):
    """How a training process ended, as far as the agent knows. `pid` was its process id (0: unknown)."""

    exit_code: int | None = None
    signal: str | None = None
    exception: str | None = None
    pid: int = 0

    def describe(self) -> str:
        """ "exit code 1 (ValueError: ...)" or "SIGKILL", for a person."""
        how = self.signal or (f"exit code {self.exit_code}" if self.exit_code is not None else "unknown exit")
        return f"{how} ({self.exception})" if self.exception else how


class CheckRequest(msgspec.Struct, frozen=True, rename="camel"):
    """The checks to run on this node, and their parameters.

    `paths`: kind ("checkpoint", "log", "data", "shm") to directory. Everything but "data" must be writable.
    `rank_pids` and `exits`: the training's processes by global rank, live and ended. `budgets_s` overrides
    the table by name. `baseline`: the `details` of earlier results of the rdma and gpu checks, merged (empty:
    none); counters and links are judged by their change since. `slow_factor`: how many times slower than the
    median of its peers a node must be to be called slow. `peer_medians`: the peers' medians of figures of the
    io check ("checkpoint_write_s"); without them no storage is called slow. `exclusive_gpus`: no other
    process may hold memory on this node's GPUs. `rdma_root` and `kernel_log` are the running kernel's paths;
    copies of another machine's can be judged as well. `samples`: how often the hang check samples ranks that
    don't wait for others, to see which of them move.
    """

    checks: tuple[str, ...]
    worker: str = ""
    node: str = ""
    paths: dict[str, str] = {}
    expected_gpus: int | None = None
    world: World | None = None
    rank_pids: dict[int, int] = {}
    exits: dict[int, RankExit] = {}
    budgets_s: dict[str, float] = {}
    baseline: dict[str, Scalar] = {}
    rdma_root: str = "/sys/class/infiniband"
    kernel_log: str = "/dev/kmsg"
    peer_medians: dict[str, float] = {}
    exclusive_gpus: bool = False
    slow_factor: float = 1.1
    samples: int = 1

    def __post_init__(self) -> None:
        unknown = sorted(set(self.checks).union(self.budgets_s).difference(ALL))
        if unknown:
            raise ValueError(f"no check is called {', '.join(unknown)}; there are {', '.join(ALL)}")
        if any(seconds <= 0 for seconds in self.budgets_s.values()):
            raise ValueError(f"budgets must be above 0 s (got {self.budgets_s})")
        needs_world = sorted(set(self.checks) & {"health", "allreduce_connection", "allreduce_performance"})
        if needs_world and self.world is None:
            raise ValueError(f"{', '.join(needs_world)} need a world")
