"""What a held process imports ahead, what makes it unfit, and that it runs the script only after "go"."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from aegis_elastic.agents.guard.client import GuardClient, SpareGone, SpareReady
from aegis_elastic.worker import preload
from tests.agents.processes import ended, wait_files
from tests.worker.gated import Stage

SHOW = (
    "import sys; print('heavy' in sys.modules, 'beside' in sys.modules, end=' ')\nimport heavy\nprint('ran')"
)


@pytest.fixture
def guard() -> Iterator[GuardClient]:
    client = GuardClient.start("gate")
    yield client
    client.close()


@pytest.fixture
def stage(tmp_path: Path, guard: GuardClient) -> Stage:
    return Stage(tmp_path, guard)


def package(stage: Stage, text: str, name: str = "heavy") -> dict[str, str]:
    """An installed package; returns the environment that finds it."""
    stage.write(f"site-packages/{name}/__init__.py", text)
    return {"PYTHONPATH": str(stage.folder / "site-packages")}


def test_installed_packages_are_imported_ahead_and_the_users_own_files_are_not(stage: Stage) -> None:
    env = package(stage, "print('imported once')")
    stage.write("beside.py", f"import heavy\nopen({str(stage.folder / 'touched')!r}, 'w')")
    spec = stage.spec([stage.write("train.py", SHOW + "\nimport beside")], env)
    assert isinstance(stage.hold(spec), SpareReady)
    assert not (stage.folder / "touched").exists()
    assert not Path(spec.stdout).exists(), "the rank's log is opened at go"
    stage.go(spec)
    assert stage.end(spec).stdout == "imported once\nTrue False ran\n"
    assert (stage.folder / "touched").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os\nos.environ.get('RANK', -1)", "heavy reads RANK while it is imported"),
        ("import os\n'MASTER_ADDR' in os.environ", "heavy reads MASTER_ADDR while it is imported"),
        ("import os\nCOPY = dict(os.environ)", "heavy reads the whole environment while it is imported"),
        ("raise RuntimeError('no device')", "importing heavy failed: RuntimeError: no device"),
        ("import sys\nsys.exit(0)", "importing heavy failed: SystemExit: 0"),
        ("open('/dev/null')", ""),
    ],
)
def test_a_package_that_would_behave_otherwise_is_left_to_the_script(
    stage: Stage, text: str, why: str
) -> None:
    env = package(stage, text)
    script = stage.write("train.py", SHOW)
    spec = stage.spec([script], env)
    event = stage.hold(spec)
    if not why:
        assert isinstance(event, SpareReady)
        return
    assert event == SpareGone("s", why, "heavy")
    assert isinstance(stage.hold(spec, without="heavy"), SpareReady), "without it, it can be held"
    stage.go(spec)
    assert stage.end(spec).stdout.startswith("False False")


def test_a_package_that_reads_variables_of_its_own_prefix_only_is_imported_ahead(
    stage: Stage,
) -> None:
    """tqdm does, and torch itself imports it where it is installed."""
    theirs = "import os\nOWN = {key: value for key, value in os.environ.items() if key.startswith('TQDM_')}"
    env = package(stage, theirs, "tqdm") | package(stage, "import tqdm")
    spec = stage.spec([stage.write("train.py", SHOW)], env)
    assert isinstance(stage.hold(spec), SpareReady)
    stage.go(spec)
    assert stage.end(spec).stdout == "True False ran\n"


def test_what_torch_cannot_import_ahead_of_its_own_does_not_cost_the_rest_of_it(stage: Stage) -> None:
    stage.write("site-packages/torch/__init__.py", "")
    env = package(stage, "import os\nCOPY = dict(os.environ)", "torch/_dynamo")
    spec = stage.spec([stage.write("train.py", "import sys, torch\nprint(torch.optim)")], env)
    gone = stage.hold(spec)
    assert isinstance(gone, SpareGone)
    assert gone.without == "torch._dynamo"
    held = stage.hold(spec, without=gone.without)
    assert isinstance(held, SpareReady), held


def test_a_file_beside_the_script_hides_what_was_imported_ahead(stage: Stage) -> None:
    env = package(stage, "import shared")
    stage.write("site-packages/shared.py", "")
    stage.write("shared.py", "")
    event = stage.hold(stage.spec([stage.write("train.py", SHOW)], env))
    assert event == SpareGone("s", "shared lies beside the script and hides the module that was imported", "")


def test_a_held_process_ends_without_running_the_script_when_it_is_not_needed(stage: Stage) -> None:
    script = stage.write("train.py", f"open({str(stage.folder / 'ran')!r}, 'w')")
    stage.hold(stage.spec([script]))
    (pid,) = _children(stage.guard.pid)
    stage.guard.drop("s")
    assert ended(pid)
    stage.hold(stage.spec([script]))
    (pid,) = _children(stage.guard.pid)
    stage.guard.close()
    assert ended(pid)
    assert not (stage.folder / "ran").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_ends_a_held_process_before_the_script(stage: Stage, signum: int) -> None:
    script = stage.write("train.py", f"open({str(stage.folder / 'ran')!r}, 'w')")
    stage.hold(stage.spec([script]))
    (pid,) = _children(stage.guard.pid)
    os.kill(pid, signum)
    assert stage.guard.wait_event(30) == SpareGone("s", "it did not stop at the gate", "")
    assert ended(pid)
    assert not (stage.folder / "ran").exists()


def test_it_has_a_low_priority_while_it_waits(stage: Stage) -> None:
    stage.hold(stage.spec([stage.write("train.py", "pass")]))
    (pid,) = _children(stage.guard.pid)
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    assert b"RANK=" not in Path(f"/proc/{pid}/environ").read_bytes().split(b"LOCAL_RANK=")[0]
    if os.geteuid() == 0:
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 10


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_with_data_loader_workers_is_the_same_cold_and_warm(stage: Stage, method: str) -> None:
    script = stage.write(
        "train.py",
        "import os, threading, torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "if __name__ == '__main__':\n"
        "    print(threading.active_count(), sorted(os.listdir('/proc/self/fd'))[:4])\n"
        "    torch.manual_seed(3)\n"
        "    data = TensorDataset(torch.arange(6))\n"
        f"    loader = DataLoader(data, 2, num_workers=1, multiprocessing_context={method!r})\n"
        "    print([batch[0].tolist() for batch in loader], torch.initial_seed(), torch.rand(2).tolist())\n"
        "    print(torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())\n",
    )
    env = {"OMP_NUM_THREADS": "1"}
    assert stage.warm([script], env, "torch") == stage.cold([script], env)


def test_torch_is_there_when_the_script_begins(stage: Stage) -> None:
    script = stage.write(
        "train.py", "import sys; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    assert stage.warm([script], {}, "torch").stdout == "True False\n"


# -- reading a script ----------------------------------------------------------------------------------------


def names(tmp_path: Path, source: str, uses_torch: bool = False, **files: str) -> list[str]:
    site = tmp_path / "lib" / "site-packages"
    for name in ("torch", "numpy", "pandas", "transformers", "mpi4py"):
        (site / name).mkdir(parents=True, exist_ok=True)
        (site / name / "__init__.py").write_text("raise AssertionError('reading must not import')")
    (tmp_path / "job").mkdir(exist_ok=True)
    for name, text in files.items():
        (tmp_path / "job" / f"{name}.py").write_text(text)
    (tmp_path / "job" / "train.py").write_text(source)
    argv = ["python", "-u", str(tmp_path / "job" / "train.py"), "x"]
    found = preload.wanted(argv, [str(site)], str(tmp_path), uses_torch)
    return [name for name, _ in found.modules]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch, numpy as np", ["torch", "numpy"]),
        ("from transformers import Trainer", ["transformers"]),
        ("import torch.distributed as dist", ["torch", "torch.distributed"]),
        ("try:\n  import pandas\nexcept ImportError:\n  import numpy", ["pandas"]),
        ("if __name__ == '__main__':\n  import pandas", ["pandas"]),
        # only certain imports: not in a branch, not in a function
        ("import sys\nif len(sys.argv) > 1:\n  import pandas", []),
        ("def f():\n  import pandas", []),
        ("if TYPE_CHECKING:\n  import pandas", []),
        ("import os, sys, json, no_such_thing", []),
        ("from mpi4py import MPI", []),
        # the environment is read at import: after a write to it nothing is certain, torch only by its own
        ("import os\nos.environ['A'] = '1'\nimport torch, numpy", ["torch"]),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch", []),
        ("import torch, os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport numpy", ["torch"]),
        ("import os\nos.environ.setdefault(f'{1}', '1')\nimport torch", []),
        ("import os\nos.environ.update(x)\nimport torch", []),
        ("import os\nos.putenv('CUDA_VISIBLE_DEVICES', '1')\nimport torch", []),
        (
            "import os\nprint(os.environ['RANK'], os.environ.get('X'))\nimport torch, numpy",
            ["torch", "numpy"],
        ),
        ("import sys\nsys.path.insert(0, 'vendor')\nimport torch, numpy", ["torch"]),
        ("def f(:", []),
        ("model = DistributedDataParallel(torch)\nimport torch", ["torch", "torch._dynamo"]),
        ("import torch, transformers", ["torch", "transformers", "torch._dynamo"]),
    ],
)
def test_what_a_script_will_certainly_import(tmp_path: Path, source: str, expected: list[str]) -> None:
    assert names(tmp_path, source) == expected


def test_the_users_modules_are_read_for_what_they_import(tmp_path: Path) -> None:
    source = "import data\nimport pandas"
    assert names(
        tmp_path, source, data="from model import Net\nimport numpy", model="import torch\nimport data"
    ) == [*("torch", "numpy", "pandas")]
    tainting = "import os\nos.environ['MKL_NUM_THREADS'] = '2'"
    assert names(tmp_path, "import data, torch", data=tainting) == []


def test_torch_that_was_used_without_being_named_is_wanted(tmp_path: Path) -> None:
    assert names(tmp_path, "import megatron_of_ours", uses_torch=True) == ["torch"]
    late = "def main():\n  import torch\nmain()"
    assert names(tmp_path, late, uses_torch=True) == ["torch"]
    assert names(tmp_path, "import os\nos.environ['OMP_NUM_THREADS'] = '2'\n" + late, uses_torch=True) == []


def test_a_module_of_the_users_own_named_torch_is_theirs(tmp_path: Path) -> None:
    assert names(tmp_path, "import torch", torch="import numpy") == ["numpy"]
    assert preload.own_names(str(tmp_path / "job")) == {"torch", "train"}


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()]


def test_a_pid_is_kept_from_spare_to_rank(stage: Stage) -> None:
    spec = stage.spec([stage.write("train.py", "import os; print(os.getpid())")])
    stage.hold(spec)
    (pid,) = _children(stage.guard.pid)
    assert stage.go(spec) == pid
    assert stage.end(spec).stdout == f"{pid}\n"
    wait_files(Path(spec.stdout))
