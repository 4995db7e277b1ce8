"""`aegisctl check`, `bootcheck` and `burn` as people call them: real checks in real processes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aegis_elastic.launch.ctl import main

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "aegis_elastic.launch.ctl.main"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("check", "io")`: exit code, stdout and stderr; with a state directory of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = main.main(argv)
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


def results(out: str) -> dict[str, Any]:
    document = json.loads(out)
    assert document["node"]
    assert document["pass"] == all(each["pass"] for each in document["results"])
    return {each["checkType"]: each for each in document["results"]}


def test_a_healthy_node_is_a_table_and_zero(run: Run) -> None:
    code, out, err = run("check")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["io", "gpu", "runtime", "rdma", "hang"]
    assert "FOUND" not in out


def test_a_finding_is_one_with_its_code_and_the_others_answer(run: Run, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code, out, _ = run("check", "io", "rdma", "--path", f"data={fifo}", "--budget", "io=0.7")
    assert code == 1
    assert "FOUND" in out
    assert "io.timeout  no answer in 0.7 s (it was waiting for data " in out
    assert "no RDMA adapter" in out


def test_json_is_for_programs(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("check", "io", "gpu", "--json", "--gpus", "8", "--path", f"checkpoint={tmp_path}")
    found = results(out)
    assert code == 1
    assert list(found) == ["io", "gpu"]
    assert found["io"]["details"]["checkpoint_path"] == str(tmp_path)
    assert found["gpu"]["finding"] == "gpu.missing"


def test_hang_shows_where_a_process_is(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            code, out, _ = run("check", "hang", "--pid", f"4={process.pid}", "--json")
        finally:
            process.kill()
    assert code == 0
    assert results(out)["hang"]["details"]["rank4"].endswith("train.py:3 (<module>)")


def test_bootcheck_forms_a_group_of_this_node_alone(run: Run) -> None:
    code, out, _ = run("bootcheck", "--json", "--nproc", "2")
    found = results(out)
    assert code == 0, out
    assert list(found) == ["env", "gpu", "rdma", "health"]
    assert found["env"]["details"]["torch"]
    assert found["health"]["result"] == "health: 2 ranks form a group, every value in it is right"


def test_burn_proves_its_results(run: Run) -> None:
    code, out, _ = run("burn", "--minutes", "0.005", "--size", "64", "--threads", "1", "--json")
    (result,) = results(out).values()
    assert code == 0
    assert result["details"]["wrong"] == 0
    assert result["details"]["passes"] > 0


def test_wrong_use_is_two_with_a_reason(run: Run) -> None:
    for argv, why in [
        (("check", "warp"), "cannot check warp: there are io, gpu"),
        (("check", "--path", "data"), "cannot use --path 'data': want two parts joined by ="),
        (("check", "--pid", "0=me"), "cannot use --pid with 'me': want a number"),
        (("check", "--budget", "io=soon"), "cannot use --budget with 'soon': want seconds"),
        (("check", "--budget", "io=0"), "budgets must be above 0 s"),
        (("check", "--budget", "warp=1"), "no check is called warp"),
        (("check", "--gpus", "-1"), "cannot expect -1 GPUs"),
        (("bootcheck", "--nproc", "0"), "cannot run 0 ranks"),
        (("burn", "--minutes", "0"), "cannot burn: duration must be above 0 s"),
        (("burn", "--minutes", "soon"), "invalid float value"),
    ]:
        code, out, err = run(*argv)
        assert (code, out) == (2, ""), argv
        assert why in err


def adapter(root: Path, symbol_errors: int) -> None:
    folder = root / "mlx5_0" / "ports" / "1"
    (folder / "counters").mkdir(parents=True, exist_ok=True)
    (folder / "state").write_text("4: ACTIVE\n")
    (folder / "phys_state").write_text("5: LinkUp\n")
    (folder / "counters" / "symbol_error").write_text(f"{symbol_errors}\n")


def test_counters_are_compared_with_the_last_check_that_passed(
    run: Run, tmp_path: Path, unmet: Callable[[str], None]
) -> None:
    root = tmp_path / "infiniband"
    target = Path("/sys/class/infiniband")
    if target.exists():
        unmet("this machine has real RDMA adapters")
    # The tree is looked for where the kernel has it; what stands in for it is put there in a mount namespace
    # of the command's own.
    script = f'mount -t tmpfs none /sys/class && ln -s {root} {target} && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", script, "sh", *COMMAND]

    def check() -> tuple[int, dict[str, Any]]:
        done = subprocess.run([*inside, "check", "rdma", "--json"], cwd=ROOT, capture_output=True, text=True)
        if not done.stdout:
            unmet(f"no mount namespace to be had here: {done.stderr}")
        return done.returncode, results(done.stdout)["rdma"]

    adapter(root, symbol_errors=5000)
    assert check()[0] == 0  # high counters at first sight say nothing
    adapter(root, symbol_errors=5500)
    for _ in range(2):  # what was found is found again, until it is repaired
        code, found = check()
        assert (code, found["finding"]) == (1, "rdma.symbol_error")
        assert found["result"] == "rdma: mlx5_0/1 symbol_error grew by 500 since the start"


def wait_gone(pid: int) -> bool:
    """Whether the process ends within five seconds."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], 5)[0])
    finally:
        os.close(pidfd)


def test_on_a_terminal_bars_move_and_an_interrupt_leaves_nothing_running(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    master, slave = pty.openpty()
    argv = [*COMMAND, "check", "io", "--path", f"data={fifo}"]
    with subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=slave, text=True, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(slave)
        shown = b""
        while b"of 30 s" not in shown:
            shown += os.read(master, 4096)
        children = [
            int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ]
        assert children
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stdout is not None and process.stdout.read() == ""
    os.close(master)
    assert all(wait_gone(pid) for pid in children)
