"""A process group for one check: meet at the given TCPStore, form the group, leave it together.

All peers are awaited before the group is formed, to distinguish "node 2 never came" from "they can't
connect".
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from aegis_elastic.checks.contract.child_process import OnStep
from aegis_elastic.checks.contract.request import World

# Shares of a check's budget: to wait for peers, and for each collective operation. The rest is for reporting
# what went wrong, before `child_process` can only report a timeout.
PEERS_SHARE = 0.5
OPERATION_SHARE = 0.25
# A rank that has finished must not close its connections while its peers still read from them.
LEAVE_SHARE = 0.05
_NAMED_MAX = 16


class ProcessGroupError(Exception):
    """The check's process group broke or didn't form; `code` is "store", "missing_peer" or "failed"."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@contextmanager
def process_group(
    world: World, kind: str, rank: int, size: int, device_index: int, budget_s: float, on_step: OnStep
) -> Iterator[torch.device]:
    """Be `rank` of `size` in a process group; yields the device to use. Raises `ProcessGroupError`.

    `kind` names the check: each has its own keys in the store. Any error of torch inside the body counts as
    the group's.
    """
    store = connect(world, kind, budget_s * PEERS_SHARE, on_step)
    wait_for_peers(store, rank, size, budget_s * PEERS_SHARE, on_step)
    timeout_s, leave_s = budget_s * OPERATION_SHARE, budget_s * LEAVE_SHARE
    with form_group(store, world.device, rank, size, device_index, timeout_s, leave_s, on_step) as device:
        yield device


def connect(world: World, kind: str, timeout_s: float, on_step: OnStep) -> Store:
    """A client of the world's store that sees only the keys of `kind`. Raises `ProcessGroupError` "store"."""
    where = f"{world.master_addr}:{world.master_port}"
    on_step(f"connecting to the store at {where}")
    try:
        # torch's client retries a refused connection for up to twice its timeout, beyond the budget; but the
        # store listens already, so one attempt is enough.
        socket.create_connection((world.master_addr, world.master_port), timeout_s).close()
        base = TCPStore(
            world.master_addr,
            world.master_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (OSError, RuntimeError) as error:
        raise ProcessGroupError("store", f"cannot reach the store at {where}: {first_line(error)}") from error
    return PrefixStore(f"aegis/check/{world.tag}/{kind}", base)


def wait_for_peers(store: Store, rank: int, size: int, timeout_s: float, on_step: OnStep) -> None:
    """Wait until all `size` peers have come. Raises `ProcessGroupError` "missing_peer", naming those that
    haven't.
    """
    on_step(f"waiting for {size} peers")
    try:
        store.set(f"here/{rank}", "1")
        if store.add("here", 1) == size:
            store.set("complete", "1")
    except RuntimeError as error:
        raise ProcessGroupError("store", f"lost the store while meeting: {first_line(error)}") from error
    try:
        store.wait(["complete"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise ProcessGroupError("missing_peer", _missing_peers(store, size, timeout_s, error)) from error


@contextmanager
def form_group(
    store: Store,
    device_type: str,
    rank: int,
    size: int,
    device_index: int,
    timeout_s: float,
    leave_s: float,
    on_step: OnStep,
) -> Iterator[torch.device]:
    """The process group itself, among peers that have come; `timeout_s` for each operation.

    Raises `ProcessGroupError` "failed".
    """
    device = torch.device("cpu")
    on_step("forming the process group")
    try:
        if device_type == "cuda":
            device = torch.device("cuda", device_index)
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend="nccl" if device_type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        on_step("in the process group")
        yield device
        if device_type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:  # torch's DistError family is one, and gloo raises it bare
        raise ProcessGroupError("failed", first_line(error)) from error
    finally:
        _leave(store, size, leave_s)
        if dist.is_initialized():
            dist.destroy_process_group()


def _missing_peers(store: Store, size: int, timeout_s: float, error: RuntimeError) -> str:
    try:
        missing = [str(peer) for peer in range(size) if not store.check([f"here/{peer}"])]
    except RuntimeError:
        return f"lost the store while waiting for peers: {first_line(error)}"
    more = f" and {len(missing) - _NAMED_MAX} more" if len(missing) > _NAMED_MAX else ""
    return f"{', '.join(missing[:_NAMED_MAX])}{more} of {size} did not come within {timeout_s:g} s"


def _leave(store: Store, size: int, timeout_s: float) -> None:
    try:
        if store.add("done", 1) == size:
            store.set("all_done", "1")
        store.wait(["all_done"], timedelta(seconds=timeout_s))
    except RuntimeError:
        # A peer that failed never writes its key. The outcome is known already, so nothing is lost.
        return


def first_line(error: Exception) -> str:
    """The message of an error, without torch's stack trace."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
