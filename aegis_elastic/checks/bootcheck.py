"""The checks before training: the versions of a worker (env), and a process group of all ranks (health).

`environment` is this worker's record (its `details`); `environments.summarise` compares the records of all
workers. `health` forms a group of all ranks of the training and verifies every value that comes back.
"""

from __future__ import annotations

import importlib.metadata
import platform
from functools import partial

import pynvml
import torch
import torch.distributed as dist

from aegis_elastic.checks.collective.process_group import ProcessGroupError, process_group
from aegis_elastic.checks.contract import child_process
from aegis_elastic.checks.contract.budgets import budget_s
from aegis_elastic.checks.contract.child_process import OnStep, Outcome, Scalar, failed, passed
from aegis_elastic.checks.contract.request import CheckRequest, World
from aegis_elastic.checks.gpu import check
from aegis_elastic.core.model import CheckResult

# Distribution names whose differing versions have broken runs; read from metadata, because importing them
# takes longer than all checks together.
LIBRARIES = (
    "numpy",
    "triton",
    "transformers",
    "accelerate",
    "datasets",
    "safetensors",
    "deepspeed",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "apex",
    "lightning",
    "nemo-toolkit",
)
_ELEMENTS = 1024


def environment(request: CheckRequest, on_step: OnStep) -> Outcome:
    """The record of versions and devices; None for what is not installed or not there."""
    on_step("reading versions")
    record: dict[str, Scalar] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
    }
    record |= {f"lib_{name}": _version(name) for name in LIBRARIES}
    on_step("counting the GPUs")
    count = torch.cuda.device_count()
    record["cuda_devices"] = count
    record["cuda_device_name"] = torch.cuda.get_device_name(0) if count else None
    record["nccl"] = _nccl_version()
    record["cudnn"] = _cudnn_version()
    record["driver"] = _driver_version()
    shown = f"torch {record['torch']}, Python {record['python']}, CUDA {record['cuda'] or 'none'}"
    devices = f"{count} x {record['cuda_device_name']}" if count else "no GPU"
    return passed(f"env: {shown}, {devices}", record)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl_version() -> str | None:
    if not dist.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _cudnn_version() -> str | None:
    number: int | None = torch.backends.cudnn.version() if torch.version.cuda else None
    return None if number is None else str(number)


def _driver_version() -> str | None:
    try:
        pynvml.nvmlInit()
        return check.driver_version()
    except pynvml.NVMLError:
        return None  # no driver; whether there should be one is checked by gpu


def health(request: CheckRequest, on_step: OnStep) -> Outcome:
    """A process group of all ranks, with all_reduce and all_gather. This node forks a child for each of its
    own.
    """
    world = request.world
    if world is None:
        raise ValueError("health needs a world")
    # The children report for themselves, so they end a little before this budget does.
    seconds = budget_s("health", request.budgets_s) * 0.95
    ranks = [world.rank_offset + index for index in range(world.local_world_size)]
    on_step(f"waiting for ranks {ranks[0]} to {ranks[-1]}")
    tasks = [
        child_process.task(f"rank {rank}", partial(_rank, world, rank, seconds), seconds) for rank in ranks
    ]
    return _merge(world, list(child_process.run(tasks)))


def _merge(world: World, results: list[CheckResult]) -> Outcome:
    details: dict[str, Scalar] = {}
    for result in results:
        details[f"{result.check_type.replace(' ', '')}_s"] = result.duration_s
    bad = [result for result in results if not result.passed]
    if not bad:
        return passed(f"health: {world.world_size} ranks form a group, every value in it is right", details)
    # One broken rank makes the others time out, so a crash or a wrong value goes before a missing peer.
    consequences = ("failed", "missing_peer", "timeout")
    codes = {id(result): result.finding.rpartition(".")[2] for result in bad}
    first = min(bad, key=lambda result: codes[id(result)] in consequences)
    text = "; ".join(result.result for result in bad)
    return failed(f"health.{codes[id(first)]}", first.scope, f"health: {text}", details)


def _rank(world: World, rank: int, seconds: float, on_step: OnStep) -> Outcome:
    local = rank - world.rank_offset
    if world.device == "cuda" and local >= torch.cuda.device_count():
        text = f"rank {rank} finds no GPU {local}: {torch.cuda.device_count()} are visible"
        return failed("health.no_gpu", "hardware", text)
    try:
        with process_group(world, "health", rank, world.world_size, local, seconds, on_step) as device:
            return _verify(world.world_size, rank, device, on_step)
    except ProcessGroupError as error:
        prefix = "rank " if error.code == "missing_peer" else ""
        return failed(f"health.{error.code}", "network", f"rank {rank}: {prefix}{error}")


def _verify(size: int, rank: int, device: torch.device, on_step: OnStep) -> Outcome:
    """Every element of every rank has its own value, a whole number, so results can be compared exactly."""
    base = torch.arange(_ELEMENTS, dtype=torch.int64, device=device)
    own = base + rank * _ELEMENTS
    on_step("in all_reduce")
    total = own.clone()
    dist.all_reduce(total)
    wrong_sums = int((total != base * size + _ELEMENTS * (size * (size - 1) // 2)).sum())
    on_step("in all_gather")
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own)
    wrong_from = [
        str(peer) for peer, part in enumerate(parts) if not torch.equal(part, base + peer * _ELEMENTS)
    ]
    if wrong_sums or wrong_from:
        senders = ", ".join(wrong_from) or "none"
        text = f"rank {rank} got {wrong_sums} wrong sums, and wrong values from ranks {senders}"
        return failed("health.wrong_value", "hardware", text)
    return passed(f"rank {rank}: right values from all {size} ranks")
