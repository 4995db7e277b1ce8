"""What the GPUs do, told line by line by a process of its own: `python -m
aegis_elastic.agents.monitoring.gpu_sampler S`.

A call of NVML can hang for ever on a dead card, and whoever hangs in a driver can't even be killed. So the
agent doesn't ask itself. One JSON line every S seconds: a list with [utilisation (0 to 1), used bytes, total
bytes, [pids]] of each card. It ends when its standard input does.
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

import pynvml

from aegis_elastic.agents.guard.processes import PR_SET_PDEATHSIG, prctl

_SIGKILL = 9


def _ask(question: Any, handle: object, otherwise: Any) -> Any:
    try:
        return question(handle)
    except pynvml.NVMLError:
        return otherwise  # this card or driver doesn't know; the checks say it if a card is broken


def _card(handle: object) -> list[Any]:
    rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle, None)
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, None)
    processes = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle, ())
    return [
        rates.gpu / 100 if rates is not None else None,
        int(memory.used) if memory is not None else None,
        int(memory.total) if memory is not None else None,
        [int(process.pid) for process in processes],
    ]


def main() -> int:
    """Tell until nobody listens. Exit code 1: there is no NVML, or no card."""
    prctl(PR_SET_PDEATHSIG, _SIGKILL)
    interval_s = float(sys.argv[1])
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        sys.stderr.write(f"no GPU is watched: {error}\n")
        return 1
    while True:
        sys.stdout.write(json.dumps([_card(handle) for handle in handles]) + "\n")
        sys.stdout.flush()
        if select.select([sys.stdin], [], [], interval_s)[0]:
            return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        sys.exit(0)
