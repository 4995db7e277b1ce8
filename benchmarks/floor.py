"""The floor of a recovery on this machine: prepared processes, a fresh store, from "go" to the first step.

    python -m benchmarks.floor --ranks 4 --runs 7

No training with torch in new processes can recover faster: they have imported torch and wait at a pipe; the
parent has made the next TCPStore. Measured are "go", init_process_group and one all_reduce, until the last
rank has finished. No fault is detected, nothing is stopped, checked or counted.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

PREPARED = """
import os, sys, time
import torch, torch.distributed as dist
print("ready", flush=True)
port = sys.stdin.readline().strip()
os.environ.update(MASTER_PORT=port)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1024))
print(time.monotonic(), flush=True)
sys.stdin.readline()
os._exit(0)
"""


def measure(ranks: int) -> float:
    """Seconds from "go" to the last rank's first all_reduce. RuntimeError if a process breaks."""
    from torch.distributed import TCPStore

    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    own |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PREPARED],
            env={**os.environ, **own, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            _answer(process)
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        began = time.monotonic()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{store.port}\n")
            process.stdin.flush()
        return max(float(_answer(process)) for process in processes) - began
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a prepared process ended with code {process.wait()}")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints the median."""
    parser = argparse.ArgumentParser(description="the least time from go to all ranks' first step")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args(argv)
    found = [measure(arguments.ranks) for _ in range(arguments.runs)]
    spread = f"{min(found):.3f} to {max(found):.3f}"
    print(f"floor 1x{arguments.ranks}: {statistics.median(found):.3f} s ({spread})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
