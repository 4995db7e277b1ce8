"""Drivers that take a node from its scheduler: a list in a file, and a program of the user's own."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aegis_elastic.control.isolation import drivers
from aegis_elastic.control.isolation.contract import Driver, Outcome, call_driver
from tests.control.planes import ended, wait_for


def isolate(driver: Driver | None, node: str, reason: str = "gpu.missing") -> Outcome:
    assert driver is not None
    return asyncio.run(call_driver(driver, "isolate", node, reason))


def release(driver: Driver | None, node: str) -> Outcome:
    assert driver is not None
    return asyncio.run(call_driver(driver, "release", node, ""))


def program(folder: Path, script: str) -> str:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_list_has_one_line_a_node_and_keeps_what_others_wrote(tmp_path: Path) -> None:
    listed = tmp_path / "nodes"
    listed.write_text("# of the operators\nn9\n")
    listed.chmod(0o664)
    driver = drivers.make(f"file:{listed}")
    assert isolate(driver, "n1", "gpu.missing\nn2").ok
    assert isolate(driver, "n1").ok
    assert isolate(driver, "n9").ok
    lines = listed.read_text().splitlines()
    assert lines[:2] == ["# of the operators", "n9"]
    assert len(lines) == 3 and lines[2].startswith("n1 # aegis: 20")
    assert lines[2].endswith("gpu.missing n2")
    assert stat.S_IMODE(listed.stat().st_mode) == 0o664
    assert release(driver, "n1").ok
    assert listed.read_text() == "# of the operators\nn9\n"
    theirs = release(driver, "n9")
    assert not theirs.ok and "somebody else has listed it" in theirs.message


def test_a_list_that_is_a_link_stays_one_and_many_writers_lose_nothing(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    many = [drivers.make(f"file:{tmp_path / 'link'}") for _ in range(8)]

    async def all_at_once() -> list[Outcome]:
        return await asyncio.gather(
            *(call_driver(one, "isolate", f"n{n}", "x") for n, one in enumerate(many) if one is not None)
        )

    assert all(outcome.ok for outcome in asyncio.run(all_at_once()))
    assert (tmp_path / "link").is_symlink()
    assert {line.split()[0] for line in (tmp_path / "real").read_text().splitlines()} == {
        f"n{n}" for n in range(8)
    }


def test_a_lock_that_somebody_sits_on_costs_the_timeout_and_is_said(tmp_path: Path) -> None:
    driver = drivers.make(f"file:{tmp_path / 'nodes'}", timeout_s=0.3)
    with open(tmp_path / "nodes.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcome = isolate(driver, "n1")
    assert not outcome.ok and "somebody holds its lock" in outcome.message


def test_a_program_gets_its_words_one_by_one_and_no_shell_reads_them(tmp_path: Path) -> None:
    said = tmp_path / "said"
    argv = program(tmp_path, f'printf "%s|" "$#" "$@" >> {said}')
    driver = drivers.make(f"command:{argv} --do {{action}} 'to {{node}}' {{reason}}")
    assert isolate(driver, "n1", '$(touch pwned); {node} `id` "x"').ok
    assert said.read_text() == "4|--do|isolate|to n1|aegis: (touch pwned); node id x|"
    assert not (tmp_path / "pwned").exists()
    assert release(driver, "n1").ok
    assert "release|to n1|" in said.read_text()


def test_a_name_that_no_host_has_reaches_no_program(tmp_path: Path) -> None:
    said = tmp_path / "said"
    driver = drivers.make(f"command:{program(tmp_path, f'touch {said}')} {{node}}")
    for name in ("--help", "", "a b", "n1;reboot", "../n1", "n" * 300, "n1\n"):
        outcome = isolate(driver, name)
        assert not outcome.ok and "cannot name" in outcome.message
    assert not said.exists()


def test_a_program_sees_no_secret_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_JOIN_SECRET", "geheim")
    monkeypatch.setenv("SLURM_JWT", "geheim")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    driver = drivers.make(f"command:{program(tmp_path, f'env > {tmp_path}/env')} {{node}}")
    assert isolate(driver, "n1").ok
    env = (tmp_path / "env").read_text()
    assert "geheim" not in env and "AEGIS" not in env
    assert "SLURM_JOB_ID=7" in env and "PATH=" in env


def test_a_program_that_fails_is_an_outcome_with_its_last_words(tmp_path: Path) -> None:
    driver = drivers.make(f"command:{program(tmp_path, 'echo no such node >&2; exit 3')} {{node}}")
    outcome = isolate(driver, "n1")
    assert not outcome.ok
    assert outcome.message.endswith("did not isolate n1: exit code 3: no such node")


def test_a_program_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"echo $$ > {pids}; sleep 300 & echo $! >> {pids}; echo thinking; wait"
    driver = drivers.make(f"command:{program(tmp_path, script)} {{node}}", timeout_s=1.0)
    began_s = time.monotonic()
    outcome = isolate(driver, "n1")
    assert time.monotonic() - began_s < 10
    assert not outcome.ok and "no answer in time, it had said: thinking" in outcome.message
    for pid in map(int, pids.read_text().split()):
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_program_ends_with_whoever_started_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    argv = program(tmp_path, f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 300")
    code = (
        "import asyncio; from aegis_elastic.control.isolation.command import run; "
        f"asyncio.run(run([{argv!r}], 300.0))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_for(pid_file.exists, "the program")
        process.kill()
    wait_for(lambda: ended(int(pid_file.read_text())), "the program's end")


def test_a_program_that_talks_without_end_is_not_kept(tmp_path: Path) -> None:
    driver = drivers.make(f"command:{program(tmp_path, 'yes | head -c 3000000; exit 1')} {{node}}")
    outcome = isolate(driver, "n1")
    assert not outcome.ok and len(outcome.message) < 500


def test_a_program_that_can_only_isolate_says_so_when_asked_to_release(tmp_path: Path) -> None:
    outcome = release(drivers.make(f"command:{program(tmp_path, 'true')} {{node}}"), "n1")
    assert not outcome.ok and "release n1 yourself" in outcome.message


def test_a_dry_run_asks_nobody(tmp_path: Path) -> None:
    driver = drivers.make(f"file:{tmp_path / 'nodes'}", dry_run=True)
    outcome = isolate(driver, "n1")
    assert outcome.ok and outcome.message == "dry run: file would isolate n1 (aegis: gpu.missing)"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("drain", "no isolation driver: want one of slurm"),
        ("slurm:now", "no isolation driver"),
        ("file:", "no isolation driver"),
        ("command:true", "want {node} among its arguments"),
        ("command:true 'x", "cannot read the command"),
        ("command:no-such-program {node}", "there is no such program here"),
        ("file:/no/such/folder/nodes", "want a file in a folder that is there"),
        ("kubernetes", "this is no pod with a service account"),
        ("kubernetes:deployments/x", "as a workload: want apis/apps/v1"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_starts(
    named: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match=why):
        drivers.make(named)
    assert drivers.make("none") is None
