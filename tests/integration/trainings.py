"""A small training with real process groups that at one step does one unusual thing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# usage: train.py FOLDER WHAT WHO AT SECONDS; WHO is a rank or "all". It trains until FOLDER/end is there.
TRAIN = '''
import ctypes, os, sys, time
import torch
import torch.distributed as dist

folder, what, who, at, seconds = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
width = 256 if what == "wide" else 64
net = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
stages = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])] if what == "slow stage" else None
stage = rank // 3 if stages else 0
peers = stages[stage] if stages else None
model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.02, process_group=peers)
end, step, late = torch.zeros(1), 0, False


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        if late and what == "slow optimizer":
            compute(seconds)
        return super().step(closure)


optimizer = Optimizer(model.parameters(), lr=1e-3)


class SlowDisk:
    """A file on slow storage."""

    def write(self, data):
        time.sleep(0.2)
        return len(data)

    def flush(self):
        pass


def spin():
    while True:
        pass


def evaluate():
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with torch.no_grad():
            net(torch.randn(256, width))


def save():
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.save({"net": net.state_dict()}, SlowDisk(), _use_new_zipfile_serialization=False)


def compile_kernel():
    ctypes.PyDLL(None).sleep(int(seconds))  # which holds the interpreter lock


def score():
    ctypes.CDLL(None).sleep(int(seconds))  # one call without a sign of progress


def compute(cpu_s):
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        torch.randn(50, 50) @ torch.randn(50, 50)


class MoreInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x

    @staticmethod
    def backward(context, gradient):
        compute(seconds)
        return gradient


def once():
    """What is done at one step only."""
    if what == "loop":
        spin()
    elif what == "mismatch":
        dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], torch.zeros(1))
    elif what == "evaluate":
        evaluate()
    elif what == "save":
        save()
    elif what == "compile":
        compile_kernel()
    elif what == "score":
        score()
    elif what == "end":
        sys.exit(0)


while not end.item():
    late = step >= at and life == 0 and who in ("all", str(rank))
    begun = time.monotonic()
    time.sleep(0.1)
    compute(seconds if what == "compute" else 0.01 + 0.03 * stage)
    if late and step == at:
        once()
    if what == "score" and step == at and life == 0:
        dist.barrier()
    if late and what == "slow loader":
        time.sleep(seconds * (time.monotonic() - begun))  # by that factor, on busy cores, too
    if late and what in ("slow compute", "slow stage"):
        compute(seconds)
    optimizer.zero_grad()
    output = model(torch.randn(16, width))
    if late and what == "slow backward":
        output = MoreInBackward.apply(output)
    output.sum().backward()
    dist.all_reduce(end.fill_(os.path.exists(f"{folder}/end")))
    optimizer.step()
    step += 1
    with open(f"{folder}/steps-{rank}", "w") as file:
        file.write(str(step))
'''


def write_training(folder: Path) -> Path:
    """Write the script; returns its file."""
    path = folder / "train.py"
    path.write_text(TRAIN)
    return path


def steps_of(folder: Path, rank: int = 0) -> int:
    """How many steps that rank has made, in this life; 0 if none so far."""
    try:
        return int((folder / f"steps-{rank}").read_text() or 0)
    except FileNotFoundError:
        return 0


@contextmanager
def beside(*programs: tuple[str, ...]) -> Iterator[None]:
    """Run other Python programs meanwhile, each given as its source and arguments."""
    running = [subprocess.Popen([sys.executable, "-c", *program]) for program in programs]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
