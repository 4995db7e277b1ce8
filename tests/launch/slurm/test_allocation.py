from __future__ import annotations

from pathlib import Path

import pytest

from aegis_elastic.launch.ctl import main
from aegis_elastic.launch.slurm import allocation

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-3]",
}


def hosts(compressed: str) -> tuple[str, ...]:
    assert compressed == "n[1-3]"
    return ("n1", "n2", "n3")


def test_a_step_with_one_task_a_node_says_where_nodes_meet_and_in_which_order() -> None:
    step = allocation.allocation(STEP, hosts)
    assert step is not None
    assert (step.hosts[0], allocation.node_rank(STEP)) == ("n1", 2)
    other = allocation.allocation({**STEP, "SLURM_NODEID": "0"}, hosts)
    assert other is not None
    assert other.port == step.port, "all nodes derive the same"
    assert 20000 <= step.port < 30000


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"SLURM_STEP_NUM_TASKS": "24"}, id="a task for each GPU"),
        pytest.param({"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, id="one node"),
        pytest.param({"SLURM_NODEID": "x"}, id="no number"),
        pytest.param({"SLURM_JOB_ID": ""}, id="no job"),
    ],
)
def test_nothing_is_guessed_elsewhere(change: dict[str, str]) -> None:
    assert allocation.allocation({**STEP, **change}, hosts) is None


def test_a_batch_script_itself_is_no_step() -> None:
    batch = {"SLURM_JOB_ID": "4711", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
    assert allocation.allocation(batch, hosts) is None
    assert not allocation.in_step(batch)
    assert allocation.in_step(STEP)


def test_how_often_slurm_has_requeued() -> None:
    assert allocation.restarts({}) == 0
    assert allocation.restarts({"SLURM_RESTART_COUNT": "2"}) == 2
    assert allocation.restarts({"SLURM_RESTART_COUNT": "?"}) == 0


def test_the_shipped_script_is_what_slurm_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["slurm-script"]) == 0
    shipped = Path(__file__).parents[3] / "deploy" / "slurm" / "aegis.sbatch"
    assert capsys.readouterr().out == shipped.read_text()


def test_the_script_has_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--nodes 16 --min-nodes 15 --spares 2 --gpus 4 --time 2-00:00:00 --partition long --no-drain"
    assert main.main(["slurm-script", *flags.split(), "--", "train.py", "--data", "a b"]) == 0
    script = capsys.readouterr().out
    for line in (
        "#SBATCH --nodes=18    # 16 train, 2 wait as spares",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --partition=long",
        "#SBATCH --time=2-00:00:00",
        "  aegis-run --nnodes 15:16 --nproc-per-node 4 --max-restarts 10 \\",
        "  train.py --data 'a b'",
    ):
        assert line in script.splitlines()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--nodes 0", "cannot use --nodes 0: want 1 or more"),
        ("--nodes 2 --min-nodes 3", "want at most --nodes, 2"),
        ("--name a\nb", "cannot use --name"),
    ],
)
def test_bad_values_are_named(flags: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["slurm-script", *flags.split(" ")]) == 2
    assert why in capsys.readouterr().err
