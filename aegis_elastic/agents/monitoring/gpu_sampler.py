"""Samples the GPUs in a process of its own: `python -m aegis_elastic.agents.monitoring.gpu_sampler S`.

A call of NVML can hang for ever on a dead GPU, and a process that hangs in a driver can't even be killed, so
the agent makes no such call itself. Prints one JSON line every S seconds: a list with [utilisation (0 to 1),
used bytes, total bytes, [pids]] of each GPU. Ends at the end of its standard input.
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

import pynvml

from aegis_elastic.agents.guard.processes import PR_SET_PDEATHSIG, prctl

_SIGKILL = 9


def _query(function: Any, handle: object, default: Any) -> Any:
    try:
        return function(handle)
    except pynvml.NVMLError:
        return default  # not supported by this GPU or driver; if a GPU is broken, the checks find it


def _read_gpu(handle: object) -> list[Any]:
    rates = _query(pynvml.nvmlDeviceGetUtilizationRates, handle, None)
    memory = _query(pynvml.nvmlDeviceGetMemoryInfo, handle, None)
    processes = _query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle, ())
    return [
        rates.gpu / 100 if rates is not None else None,
        int(memory.used) if memory is not None else None,
        int(memory.total) if memory is not None else None,
        [int(process.pid) for process in processes],
    ]


def main() -> int:
    """Sample until the end of standard input. Exit code 1: there is no NVML, or no driver."""
    prctl(PR_SET_PDEATHSIG, _SIGKILL)
    interval_s = float(sys.argv[1])
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        sys.stderr.write(f"GPUs are not watched: {error}\n")
        return 1
    while True:
        sys.stdout.write(json.dumps([_read_gpu(handle) for handle in handles]) + "\n")
        sys.stdout.flush()
        if select.select([sys.stdin], [], [], interval_s)[0]:
            return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        sys.exit(0)
