"""Steps that are noticed from torch's own hooks, in a real Python that starts as ranks do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

from aegis_elastic.agents.watch.slots import SlotReader
from aegis_elastic.worker.environment import prepare_env
from aegis_elastic.worker.slot import SIZE, VARIABLE
from aegis_elastic.worker.step_hooks import (
    READ_NS,
    READ_SHARE,
    READ_SHARE_SHORT,
    SOON,
    groups_of,
    keys_of,
    own_work,
    read_period,
)

ROOT = Path(__file__).resolve().parent.parent.parent
# One process for all of it, since importing torch takes long: each part prints what its slot has then.
STEPS = """
import json, os, sys
from pathlib import Path
import torch
assert not any(type(finder).__name__ == "_Finder" for finder in sys.meta_path)
assert not any("aegis" in name for name in sys.modules)
from aegis_elastic.agents.watch.slots import SlotReader
slot, counted = SlotReader(Path(os.environ["AEGIS_PROGRESS"]) / "3"), {}
before = [0, 0]
def record(name):
    steps = slot.step()
    counted[name] = [steps.total - before[0], steps.step - before[1]]
    before[:] = steps.total, steps.step
p = torch.nn.Parameter(torch.zeros(3)); p.grad = torch.ones(3)
sgd = torch.optim.SGD([p], lr=0.1)
for _ in range(7): sgd.step()
record("plain")
class Wrapper(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__([p], {}); self.inner = inner
    def step(self, closure=None):
        self.inner.step()
wrapper = Wrapper(sgd)
wrapper.step()
record("a new one")
for _ in range(5): wrapper.step()
record("nested")
try: Wrapper(None).step()
except AttributeError: pass
for _ in range(6): sgd.step()
record("after one that failed")
many = [torch.optim.SGD([p], lr=0.1) for _ in range(20)]
for o in many: o.step()
record("many new ones")
for _ in range(6):
    for o in many: o.step()
record("side by side")
step = torch.compile(sgd.step, backend="eager")
for _ in range(12): step()
record("compiled")
if os.fork() == 0:
    for _ in range(50): sgd.step()
    os._exit(0)
os.wait()
record("in a child")
print(json.dumps(counted))
"""


def run(folder: Path, script: str, **more: str) -> tuple[SlotReader, str]:
    """Run it as rank 3; it must succeed and print nothing of ours."""
    env = prepare_env({**os.environ, VARIABLE: str(folder), "RANK": "3", "PYTHONPATH": str(ROOT), **more})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=env, capture_output=True, text=True, cwd=folder
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return SlotReader(folder / "3"), done.stdout


def test_every_step_counts_once_and_nothing_is_left_to_see(tmp_path: Path) -> None:
    slot, output = run(tmp_path, STEPS, TORCH_LOGS="-all")
    counted = json.loads(output)
    assert counted["plain"] == [7, 7]
    assert counted["nested"] == [5, 5], "an optimizer inside another makes no step of its own"
    assert counted["after one that failed"][0] >= 4, (
        "and one that never came to its end swallows no more than two"
    )
    assert counted["side by side"] == [120, 6], "several make one step when each has made its own"
    assert counted["compiled"][0] == 12
    assert counted["in a child"] == [0, 0], "a forked child is not the rank"
    steps = slot.step()
    assert steps is not None
    assert 0 < steps.first_ns < steps.last_ns
    assert (tmp_path / "3").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "3").stat().st_size == SIZE


def test_without_a_slot_or_a_folder_for_it_training_runs_unwatched(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    env = {**os.environ, "RANK": "3", "PYTHONPATH": str(ROOT)}
    for extra in ({}, {VARIABLE: gone}, {VARIABLE: str(tmp_path), "RANK": "../x"}):
        done = subprocess.run(
            [sys.executable, "-c", "import aegis_elastic\naegis_elastic.progress(3)"],
            env=prepare_env({**env, **extra}), capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr
    assert not list(tmp_path.iterdir())


def test_what_training_code_reports_itself(tmp_path: Path) -> None:
    script = """
        import aegis_elastic
        for step in (10, 20): aegis_elastic.progress(step)
        aegis_elastic.checkpoint_saved(20, "ckpt/20")
        try: aegis_elastic.checkpoint_saved(21, "x" * 3000)
        except ValueError as error: assert "at most 2048" in str(error)
        else: raise AssertionError
    """
    slot, _ = run(tmp_path, script)
    progress, checkpoint = slot.progress(), slot.checkpoint()
    assert progress is not None
    assert (progress.total, progress.step) == (2, 20)
    assert checkpoint is not None
    assert (checkpoint.total, checkpoint.step, checkpoint.path) == (1, 20, str(tmp_path / "ckpt/20"))
    again, _ = run(tmp_path, "import aegis_elastic; aegis_elastic.progress(30)")
    progress = again.progress()
    assert progress is not None
    assert (progress.total, progress.step) == (3, 30), "another process of that rank goes on counting"


def entry(created_ms: float, duration_ms: float | None = None) -> dict[str, float | None]:
    return {"time_created_ns": int(created_ms * 1e6), "duration_ms": duration_ms}


def marks(*at_ms: float) -> list[tuple[int, int]]:
    return [(number, int(ms * 1e6)) for number, ms in enumerate(at_ms, 1)]


def test_own_work_is_what_lies_between_a_step_and_the_collectives_of_the_next() -> None:
    entries = [entry(90), entry(160), entry(180), entry(250), entry(290)]
    assert own_work(entries, marks(100, 200, 300), 0) == [
        (2, 60000, 80000, 100000),
        (3, 50000, 90000, 100000),
    ]
    assert own_work(entries, marks(100, 200, 300), 2) == [(3, 50000, 90000, 100000)], (
        "what is known is not new"
    )


def test_own_work_of_iterations_that_cant_be_known_is_not_made_up() -> None:
    assert own_work([entry(250)], marks(100, 200, 300), 0) == [], "older than the recorder's memory"
    assert own_work([entry(90), entry(250)], marks(100, 200, 300), 0) == [(3, 50000, 50000, 100000)]
    assert own_work([], marks(100, 200), 0) == []


def test_where_the_device_reports_how_long_collectives_took_the_rest_is_own_work() -> None:
    entries = [entry(90, 1.0), entry(110, 40.0), entry(120, 20.0)]
    assert own_work(entries, marks(100, 200), 0) == [(2, 10000, 40000, 100000)]


def test_readings_cost_little_and_all_ranks_read_at_the_same_iterations() -> None:
    """Each reading delays all ranks; if they were at different steps, every step would wait for one."""
    for step_ms, read_ms in ((0.1, 15.0), (10.0, 0.5), (10.0, 15.0), (300.0, 15.0), (20000.0, 15.0)):
        step_ns, read_ns = int(step_ms * 1e6), int(read_ms * 1e6)
        every = read_period(read_ns, step_ns)
        short = read_ns * READ_SHARE >= SOON * step_ns
        wanted_ns = max(READ_NS, read_ns * (READ_SHARE_SHORT if short else READ_SHARE))
        assert every == 1 or wanted_ns / 2 < every * step_ns <= wanted_ns
        slower = read_period(3 * read_ns, step_ns * 9 // 10)
        assert slower % every == 0, "who reads more rarely reads when the others do"


def reduced(name: str, *shape: int, about: str = "undefined", p2p: bool = False) -> dict[str, object]:
    return {"process_group": (name, about), "input_sizes": [list(shape)], "is_p2p": p2p}


def test_equals_are_the_ranks_that_share_its_bytes() -> None:
    """A loss that all reduce, an activation for the next stage, an embedding that two stages share: none."""
    entries = [
        *[reduced("2", 1000, 64)] * 3,
        reduced("0", 1, about="default_pg"),
        reduced("5", 1000, 64, p2p=True),
        reduced("6", 1000, 64, about="EMBEDDING_GROUP"),
        reduced("7", 1000, 64, about="mesh_pp"),
        reduced("8", 4000, 64, about="tensor_model_parallel"),
        reduced("9"),
    ]
    assert groups_of(entries) == ["8", "2"]
    assert groups_of([]) == []


def test_a_group_has_one_number_whatever_it_is_called_and_however_it_is_listed() -> None:
    here = keys_of(["a", "c", "gone", "single"], {"a": [0, 1], "c": [2, 0], "single": [0]})
    assert here == keys_of(["x", "y"], {"x": [1, 0], "y": [0, 2]})
    assert len(set(here)) == 2


GROUPS = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from aegis_elastic.agents.watch.slots import SlotReader
dist.init_process_group("gloo")
rank = dist.get_rank()
stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
p = torch.nn.Parameter(torch.zeros(4096)); p.grad = torch.ones(4096)
sgd = torch.optim.SGD([p], lr=0.1)
slot = SlotReader(Path(os.environ["AEGIS_PROGRESS"]) / str(rank))
end = torch.zeros(1)
while not end.item():
    dist.all_reduce(p.grad, group=stages[rank // 2])
    dist.all_reduce(end.fill_(bool(slot.groups())), op=dist.ReduceOp.MIN)
    sgd.step()
print(rank, *slot.groups())
dist.destroy_process_group()
"""


def test_two_stages_report_two_groups(tmp_path: Path) -> None:
    more = {VARIABLE: str(tmp_path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "4"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        more["MASTER_PORT"] = str(free.getsockname()[1])
    base = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GROUPS],
            env=prepare_env({**base, "RANK": str(rank)}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    outputs = [process.communicate(timeout=60)[0].split() for process in ranks]
    groups = {int(rank): keys for rank, *keys in outputs}
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert all(len(keys) == 1 for keys in groups.values()), "the flag that all reduce links nobody"


def test_the_private_names_of_torch_that_are_needed() -> None:
    import torch
    from torch.optim import optimizer

    assert callable(vars(torch._C._distributed_c10d)["_dump_fr_trace"])  # the stubs don't know it
    assert callable(optimizer.register_optimizer_step_pre_hook)
    assert callable(optimizer.register_optimizer_step_post_hook)
