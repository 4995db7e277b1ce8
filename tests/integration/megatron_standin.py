"""A stand-in for Megatron: its flags, its files in its order, its resume; steps in lockstep, without torch.

    megatron_standin.py --save DIR --load DIR --save-interval 5 [--async-save] [--step-s 0.2]

It ends at the first save after DIR.done has come, and saves nothing while DIR.held is there. As in Megatron,
an empty tracker ends the training with code 0 (when the file "go" has come). Every rank writes a line a step
to DIR.steps.<rank>, by which a test sees from where each start of training went on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import aegis_elastic

TRACKER = "latest_checkpointed_iteration.txt"
POLL_S = 0.005


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--load", type=Path, required=True)
    parser.add_argument("--save-interval", type=int, default=5)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--step-s", type=float, default=0.2)
    Training(parser.parse_args()).run()


class Training:
    """One rank's life."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.life = os.environ["TORCHELASTIC_RESTART_COUNT"] + "." + os.environ["MASTER_PORT"]
        self.meeting = args.save.with_name(f"{args.save.name}.meet.{self.life}")
        self.meeting.mkdir(parents=True, exist_ok=True)
        self.unfinished = 0  # the step whose asynchronous save has not been finalised

    def run(self) -> None:
        """From the tracker's step to the last."""
        step = self.load()
        last = False
        while not (last and step % self.args.save_interval == 0):
            step += 1
            time.sleep(self.args.step_s)
            if self.rank == 0 and self.args.save.with_name(f"{self.args.save.name}.done").exists():
                (self.meeting / f"last.{step}").touch()
            if self.rank == 0 and self.args.save.with_name(f"{self.args.save.name}.held").exists():
                (self.meeting / f"no.{step}").touch()
            self.meet("step", step)
            last = last or (self.meeting / f"last.{step}").exists()
            aegis_elastic.progress(step)
            with open(self.args.save.with_name(f"{self.args.save.name}.steps.{self.rank}"), "a") as log:
                log.write(f"{self.life} {step}\n")
            if self.unfinished and step >= self.unfinished + 2:
                self.finalise()
            if step % self.args.save_interval == 0 and not (self.meeting / f"no.{step}").exists():
                self.save(step)
        if self.unfinished:
            self.finalise()

    def load(self) -> int:
        """The step that the tracker says; 0 without one."""
        tracker = self.args.load / TRACKER
        if not tracker.exists():
            return 0
        text = tracker.read_text().strip()
        if not text.isdigit():
            while not self.args.load.with_name("go").exists():  # Megatron takes its time to come so far
                time.sleep(POLL_S)
            print(f"ERROR: Invalid metadata file {tracker}. Exiting")
            sys.exit()
        for rank in range(self.world):
            assert (self.folder(int(text)) / f"__{rank}_0.distcp").read_text() == f"{text} of {rank}"
        return int(text)

    def folder(self, step: int) -> Path:
        """Where the checkpoint of that step is."""
        return Path(self.args.save) / f"iter_{step:07d}"

    def save(self, step: int) -> None:
        """Shards by all ranks; then all that makes them a checkpoint by rank 0, now or later."""
        self.folder(step).mkdir(parents=True, exist_ok=True)
        (self.folder(step) / f"__{self.rank}_0.distcp").write_text(f"{step} of {self.rank}")
        self.unfinished = step
        if not self.args.async_save:
            self.finalise()

    def finalise(self) -> None:
        """Megatron's order: .metadata, metadata.json, and when all have met, the tracker."""
        step, self.unfinished = self.unfinished, 0
        self.meet("shards", step)
        if self.rank == 0:
            folder = self.folder(step)
            names = b"".join(b"__%d_0.distcp." % rank for rank in range(self.world))
            (folder / ".metadata.tmp").write_bytes(b"\x80\x04" + names)
            (folder / ".metadata.tmp").rename(folder / ".metadata")
            (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        self.meet("metadata", step)
        if self.rank == 0:
            (self.args.save / TRACKER).write_text(str(step))
        self.meet("tracker", step)

    def meet(self, what: str, step: int) -> None:
        """Wait for all ranks, as in a collective."""
        (self.meeting / f"{what}.{step}.{self.rank}").touch()
        for rank in range(self.world):
            while not (self.meeting / f"{what}.{step}.{rank}").exists():
                time.sleep(POLL_S)


if __name__ == "__main__":
    main()
