"""The real frameworks from PyPI, in their own environment below build/, and ordinary scripts for them.

torch comes from the environment that the tests run in; only what that lacks is installed.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "frameworks"
# What the scripts below were written against.
PACKAGES = ("transformers==5.24.0", "accelerate==1.15.0", "lightning==2.6.6")
INSTALL_S = 600.0


def python_with_frameworks(unmet: Callable[[str], None]) -> str:
    """An interpreter that has them; the test is skipped (failed in CI) if they can't be installed."""
    python = HOME / "bin" / "python"
    done = HOME / "installed"
    HOME.parent.mkdir(exist_ok=True)
    with open(HOME.parent / "frameworks.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() or done.read_text() != _stamp():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(HOME)], check=True)
            site = HOME / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
            (site / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
            argv = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *PACKAGES]
            installed = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S)
            if installed.returncode:
                unmet(f"the frameworks can't be installed: {installed.stderr[-500:]}")
            done.write_text(_stamp())
    return str(python)


def _stamp() -> str:
    return " ".join((sys.executable, *PACKAGES))


# Both write "<life> <step>" to <output>.steps.<rank> for every step that a rank has run; a life is one start
# of training. The sleep makes a step long enough to be distinguished from the next.
HF_TRAINER = """
import argparse, os, time, torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

class Config(PretrainedConfig):
    model_type = "line"

class Line(PreTrainedModel):
    config_class = Config
    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(4, 1)
        self.post_init()
    def _init_weights(self, module):
        pass
    def forward(self, x, labels):
        out = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, at):
        time.sleep(args.step_s / 4)
        x = torch.full((4,), at / 4096)
        return {"x": x, "labels": x[:1]}

class Steps(TrainerCallback):
    def on_step_end(self, training, state, control, **_):
        with open(f"{args.output_dir}.steps.{os.environ['RANK']}", "a") as log:
            life = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['MASTER_PORT']}"
            log.write(f"{life} {state.global_step}\\n")

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--max_steps", type=int, default=12)
parser.add_argument("--step-s", type=float, default=0.3)
args = parser.parse_args()
training = TrainingArguments(
    output_dir=args.output_dir, max_steps=args.max_steps, save_steps=4,
    per_device_train_batch_size=4, use_cpu=True, ddp_backend="gloo",
    report_to=[], disable_tqdm=True, logging_steps=1000,
)
last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
trainer = Trainer(model=Line(Config()), args=training, train_dataset=Points(), callbacks=[Steps()])
trainer.train(resume_from_checkpoint=last)
"""

LIGHTNING = """
import argparse, os, pathlib, re, time, torch
import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, at):
        time.sleep(args.step_s)
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

class Steps(Callback):
    def on_train_batch_end(self, trainer, *_):
        with open(f"{args.default_root_dir}.steps.{os.environ['RANK']}", "a") as log:
            life = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['MASTER_PORT']}"
            log.write(f"{life} {trainer.global_step}\\n")

parser = argparse.ArgumentParser()
parser.add_argument("--default_root_dir", required=True)
parser.add_argument("--max_steps", type=int, default=12)
parser.add_argument("--step-s", type=float, default=0.3)
args = parser.parse_args()
x = torch.rand(4096, 4)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), batch_size=4)
def step_of(path):
    return int(re.findall(r"step=(\\d+)", path.name)[0])
saved = sorted(pathlib.Path(args.default_root_dir).rglob("*.ckpt"), key=step_of)
trainer = L.Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), strategy="ddp",
    max_steps=args.max_steps, default_root_dir=args.default_root_dir, logger=False,
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[Steps(), ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)],
)
trainer.fit(Line(), data, ckpt_path=str(saved[-1]) if saved else None)
"""
