"""The measured training: all-reduce steps of 50 ms; one rank dies at step 20 of its first life.

Each rank appends what happened when to `<argv[1]>/<rank>.jsonl`: {"life", "what", "at"}, times of the
monotonic clock, which all processes of a machine share. Survivors of a failed collective wait to be told to
stop, as they do with NCCL.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

FAULT_STEP = 20
FAULT_RANK = 1
FAULT_EXIT_CODE = 17
STEPS = 30
STEP_S = 0.05

MAIN = time.monotonic()
RANK = int(os.environ["RANK"])
LIFE = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
_FILE = os.open(Path(sys.argv[1]) / f"{RANK}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def stamp(what: str, at: float | None = None) -> None:
    """Notes `what` (at monotonic second `at`, default now) in one write: a kill can't halve a line."""
    line = {"life": LIFE, "what": what, "at": time.monotonic() if at is None else at}
    os.write(_FILE, json.dumps(line).encode() + b"\n")


def process_start() -> float:
    """When this process was forked, on the monotonic clock; the kernel counts it in ticks of 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return since_boot - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()


def told_to_stop(_signum: int, _frame: object) -> None:
    """Leaves at once, as a well-behaved training does."""
    stamp("stopped")
    os._exit(1)


def main() -> None:
    """Stamps every part of a start, then trains."""
    signal.signal(signal.SIGTERM, told_to_stop)
    stamp("start", process_start())
    stamp("main", MAIN)
    import torch
    import torch.distributed as dist

    stamp("imported")
    dist.init_process_group("gloo")
    stamp("group")
    gradient = torch.ones(1024)
    for step in range(STEPS):
        if LIFE == 0 and step == FAULT_STEP and RANK == FAULT_RANK:
            stamp("fault")
            os._exit(FAULT_EXIT_CODE)
        try:
            dist.all_reduce(gradient)
        except RuntimeError:
            while True:
                signal.pause()
        if step == 0:
            stamp("step")
        time.sleep(STEP_S)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
