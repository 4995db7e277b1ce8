"""The measured training: all-reduce steps of 50 ms; rank 1 dies when the benchmark wants it.

    python measured.py FOLDER FAULT [WORKLOAD]

Each rank appends what happened when to `FOLDER/<rank>.jsonl`: {"life", "what", "at", "pid"}, times of the
monotonic clock, which all processes of a machine share. The fault comes when a file `FOLDER/fault` appears,
so that every launcher is hit in the same state: long after its start. Survivors of a failed collective wait
for SIGTERM, as they do with NCCL.

FAULT: `none` trains a few steps and ends; `exit` ends the rank with a code, `exception` by an uncaught
exception, `kill` by SIGKILL; `deaf` is `exit` with survivors that ignore SIGTERM, `stuck` with survivors
whose handler of SIGTERM can't run, since they hang in a call that no signal ends; `again` is `exit`, and once
more two seconds after the first step of the second life. With `outside` the fault comes from elsewhere (a
process stopped, a node lost).

WORKLOAD: `plain`; `loader` takes each step's data from two DataLoader workers; `busy` computes without a
pause, and rank 0 notes when each step ended and how long it took in `FOLDER/steps`. Heavy imports are in
`measured_heavy.py`, a Trainer of transformers in `measured_trainer.py`."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER, FAULT = Path(sys.argv[1]), sys.argv[2]
WORKLOAD = sys.argv[3] if len(sys.argv) > 3 else "plain"
FAULT_RANK = 1
FAULT_EXIT_CODE = 17
AGAIN_S = 2.0
FIRST_LIFE_S_MAX = 150.0
LAST_LIFE_STEPS = 10
STEP_S = 0.05

MAIN = time.monotonic()
RANK = int(os.environ["RANK"])
_PATH = FOLDER / f"{RANK}.jsonl"
# not TORCHELASTIC_RESTART_COUNT: torchrun counts on each node for itself
LIFE = _PATH.read_text().count('"start"') if _PATH.exists() else 0
_FILE = os.open(_PATH, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def stamp(what: str, at: float | None = None) -> None:
    """Notes `what` (at monotonic second `at`, default now) in one write: a kill can't halve a line."""
    line = {"life": LIFE, "what": what, "at": time.monotonic() if at is None else at, "pid": os.getpid()}
    os.write(_FILE, json.dumps(line).encode() + b"\n")


def process_start() -> float:
    """When this process was forked, on the monotonic clock; the kernel counts it in ticks of 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return since_boot - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()


def on_sigterm(_signum: int, _frame: object) -> None:
    """Exits at once, as a well-behaved training does."""
    stamp("stopped")
    os._exit(1)


def due(began: float) -> bool:
    """Whether this rank is to die now, in this life."""
    if LIFE == 0:
        return FAULT != "outside" and (FOLDER / "fault").exists()
    return LIFE == 1 and FAULT == "again" and time.monotonic() > began + AGAIN_S


def last_life() -> int:
    """The life in which the training may finish."""
    return {"none": 0, "again": 2}.get(FAULT, 1)


def die() -> None:
    """The fault."""
    stamp("fault")
    if FAULT == "exception":
        raise ValueError("the fault of this benchmark")
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(FAULT_EXIT_CODE)


def hang() -> None:
    """What a survivor does whose collective has failed."""
    if FAULT == "stuck":
        import ctypes

        # A lock that is taken twice: the kernel resumes the wait after every signal, and so Python's handler,
        # which only records the signal, never runs. The wait for NCCL's kernels is like this.
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    while True:
        signal.pause()


def batches() -> Iterator[object]:
    """Endless data, one batch for each step."""
    if WORKLOAD != "loader":
        while True:
            yield None
    from torch.utils.data import DataLoader

    numbers = list(range(4096))
    while True:
        yield from DataLoader(numbers, batch_size=4, num_workers=2)  # type: ignore[arg-type]


def compute(matrix: Any) -> None:
    """A step's worth of arithmetic, and a note of how long it took since the last."""
    for _ in range(20):
        matrix = matrix @ matrix / 256
    now = time.monotonic()
    if RANK == 0:
        with open(FOLDER / "steps", "a") as file:
            file.write(f"{now} {now - _last[0]}\n")
    _last[0] = now


_last = [MAIN]


def main() -> None:
    """Stamps every part of a start, then trains."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN if FAULT == "deaf" else on_sigterm)
    stamp("start", process_start())
    stamp("main", MAIN)
    import torch
    import torch.distributed as dist

    stamp("imported")
    dist.init_process_group("gloo")
    stamp("group")
    gradient = torch.ones(1024)
    last = last_life() == LIFE
    data = batches()
    began, step = time.monotonic(), 0
    while step < LAST_LIFE_STEPS if last else time.monotonic() < began + FIRST_LIFE_S_MAX:
        if RANK == FAULT_RANK and due(began):
            die()
        next(data)
        try:
            dist.all_reduce(gradient)
        except RuntimeError:
            hang()
        if step == 0:
            stamp("step")
        step += 1
        if WORKLOAD == "busy":
            compute(torch.ones(256, 256))
        else:
            time.sleep(STEP_S)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
