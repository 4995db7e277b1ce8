"""The measured training as a Trainer of transformers: a small model, DDP over gloo.

    python measured_trainer.py FOLDER FAULT

Stamps as `measured.py` does, whose parts it uses; the first step is the first that the Trainer has done.
"""

import signal
import time
from typing import Any

import measured  # type: ignore[import-not-found,unused-ignore]
import torch
from transformers import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

MANY_STEPS = 100_000
BEGAN = time.monotonic()


class Linear(torch.nn.Module):
    """The smallest model for a Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of a batch: x (batch, 8), labels (batch, 1)."""
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}


class Stamps(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Stamps the first step, and injects the fault."""

    stepped = False

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After each step of the optimizer."""
        if not self.stepped:
            self.stepped = True
            measured.stamp("step")
        if measured.RANK == measured.FAULT_RANK and measured.due(BEGAN):
            measured.die()
        time.sleep(measured.STEP_S)


def main() -> None:
    """Stamps every part of a start, then trains."""
    signal.signal(signal.SIGTERM, measured.on_sigterm)
    measured.stamp("start", measured.process_start())
    measured.stamp("main", measured.MAIN)
    measured.stamp("imported")
    arguments = TrainingArguments(
        output_dir=str(measured.FOLDER / "out"),
        per_device_train_batch_size=4,
        max_steps=measured.LAST_LIFE_STEPS if measured.last_life() == measured.LIFE else MANY_STEPS,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"x": torch.randn(8), "labels": torch.zeros(1)} for _ in range(256)]
    trainer = Trainer(model=Linear(), args=arguments, train_dataset=rows, callbacks=[Stamps()])
    measured.stamp("group")
    try:
        trainer.train()
    except RuntimeError:
        measured.hang()


if __name__ == "__main__":
    main()
