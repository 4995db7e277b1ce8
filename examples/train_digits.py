"""An ordinary DDP training: scikit-learn's handwritten digits, saved and resumed by torch's own checkpoints.

    torchrun --standalone --nproc-per-node 4 examples/train_digits.py --checkpoint-dir /tmp/digits

Started again with the same folder it resumes from the last completed checkpoint, and ends with the same
parameters, bit for bit, as a run that was never interrupted. Needs torch and scikit-learn.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

TEST_EVERY = 5  # each fifth image is for the test, never for training
KEEP = 2  # completed checkpoints on disk


def parse_arguments() -> argparse.Namespace:
    """What the user may choose; the defaults train to more than 90 % in a few seconds."""
    parser = argparse.ArgumentParser(description="trains on scikit-learn's digits, saves and resumes")
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="resumes from here if it can")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--batch-size", type=int, default=128, help="images in a step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-time-s", type=float, default=0.0, help="least time for a step, to watch it")
    return parser.parse_args()


def start(seed: int) -> torch.device:
    """Joins the other ranks and makes everything that follows repeatable, to the last bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is only deterministic with it
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # more threads would split sums at other places
    torch.manual_seed(seed)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def load_data(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images [N, 1, 8, 8] in 0..1 and labels [N], then the same for the test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64, device=device)
    test = torch.arange(len(labels), device=device) % TEST_EVERY == 0
    return images[~test], labels[~test], images[test], labels[test]


def make_model() -> nn.Module:
    """A small convolutional net: 8x8 grey image to 10 logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batch_of(step: int, count: int, batch_size: int, seed: int) -> torch.Tensor:
    """Indices of this rank's part of a step's batch: decided by (seed, step) alone, so a resume is exact."""
    rank, world = dist.get_rank(), dist.get_world_size()
    steps_in_epoch = count // batch_size
    epoch, at = divmod(step, steps_in_epoch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return order[at * batch_size : (at + 1) * batch_size][rank::world]


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Saves after `step` steps. `latest` names a checkpoint only once all ranks have completed it."""
    parameters, moments = get_state_dict(model, optimizer)
    name = f"step_{step:06d}"
    state = {"model": parameters, "optimizer": moments, "step": torch.tensor(step)}
    dcp.save(state, checkpoint_id=folder / name)
    if dist.get_rank() == 0:
        pointer = folder / "latest.new"
        pointer.write_text(name)
        pointer.replace(folder / "latest")  # in one piece: a reader sees the old name or the new one
        for old in sorted(path for path in folder.glob("step_*") if path.name <= name)[:-KEEP]:
            shutil.rmtree(old)


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest completed checkpoint; returns how many steps it has behind it, 0 without one."""
    latest = folder / "latest"
    found = [latest.read_text() if dist.get_rank() == 0 and latest.exists() else None]
    dist.broadcast_object_list(found)  # rank 0 decides for all: a slow file system must not divide them
    if found[0] is None:
        return 0
    parameters, moments = get_state_dict(model, optimizer)
    step = torch.zeros((), dtype=torch.int64)
    dcp.load({"model": parameters, "optimizer": moments, "step": step}, checkpoint_id=folder / found[0])
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    return int(step.item())


def digest_of(model: nn.Module) -> str:
    """sha256 over all parameters, in order of their names."""
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Trains, saves, resumes; rank 0 prints."""
    arguments = parse_arguments()
    device = start(arguments.seed)
    images, labels, test_images, test_labels = load_data(device)
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    log = print if dist.get_rank() == 0 else lambda *_, **__: None

    # DDP lays its gradients out anew after the first backward pass, and the order of summation depends on it.
    # An idle pass ahead of everything gives a resumed run the same order as one that went through.
    model(images[:1]).sum().backward()
    optimizer.zero_grad()
    first = resume(arguments.checkpoint_dir, model, optimizer)
    log(f"{dist.get_world_size()} ranks on {device.type}, from step {first}", flush=True)
    for step in range(first, arguments.steps):
        began = time.monotonic()
        batch = batch_of(step, len(labels), arguments.batch_size, arguments.seed).to(device)
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(max(0.0, began + arguments.step_time_s - time.monotonic()))
        done = step + 1
        if done % arguments.save_every == 0 or done == arguments.steps:
            save(arguments.checkpoint_dir, done, model, optimizer)
            log(f"step {done}: loss {loss.item():.4f}, saved", flush=True)

    with torch.no_grad():
        right = model.module(test_images).argmax(1) == test_labels
    accuracy = right.float().mean().item()
    log(f"accuracy {accuracy:.4f} on {len(test_labels)} test images after {arguments.steps} steps")
    log(f"digest {digest_of(model.module)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
