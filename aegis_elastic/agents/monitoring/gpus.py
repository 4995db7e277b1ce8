"""The newest output of `gpu_sampler`, and which rank uses which GPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from aegis_elastic.agents.checks import requests
from aegis_elastic.worker.environment import without_secrets

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_SAMPLES_MISSED_MAX = 10


class Gpu(NamedTuple):
    """One GPU; None for what it doesn't report. `utilisation`: 0 to 1."""

    utilisation: float | None
    used_bytes: int | None
    total_bytes: int | None
    pids: tuple[int, ...]


_decoder = msgspec.json.Decoder(list[Gpu])


class GpuReader:
    """The sampler's process, if this node has GPUs. To be made and used by one thread; `close` it."""

    def __init__(self, interval_s: float) -> None:
        self._newest: list[Gpu] = []
        self._buffer = b""
        self._missed = 0
        self._process: subprocess.Popen[bytes] | None = None
        if not requests.count_gpus():
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aegis_elastic.agents.monitoring.gpu_sampler", str(interval_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=without_secrets(os.environ),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def read(self) -> list[Gpu]:
        """The last sample of each GPU; none if it is too old, or if there are no GPUs."""
        process = self._process
        if process is None:
            return []
        assert process.stdout is not None
        try:
            data = os.read(process.stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            self._missed += 1  # if a call hangs, the last sample is soon too old
            return self._newest if self._missed < _SAMPLES_MISSED_MAX else []
        if not data:
            logger.info("GPUs are no longer watched: their sampler ended with exit code %s", process.wait())
            self.close()
            return []
        self._missed = 0
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if lines:
            self._newest = _decoder.decode(lines[-1])
        return self._newest

    def close(self) -> None:
        """End the sampler."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            logger.warning(
                "process %d survives SIGKILL (it hangs in the kernel): going on without it", process.pid
            )


def owned(
    gpus: list[Gpu], members: Mapping[int, Iterable[int]], local_ranks: Mapping[int, int]
) -> dict[int, list[Gpu]]:
    """Rank -> its GPUs: those on which a process of its tree computes. In a container, where the driver
    reports pids of another namespace, the GPU with the number of its local rank.
    """
    found: dict[int, list[Gpu]] = {}
    known = {pid: rank for rank, pids in members.items() for pid in pids}
    for gpu in gpus:
        for rank in {known[pid] for pid in gpu.pids if pid in known}:
            found.setdefault(rank, []).append(gpu)
    if not found and len(gpus) >= len(local_ranks):
        found = {rank: [gpus[local]] for rank, local in local_ranks.items() if local < len(gpus)}
    return found
