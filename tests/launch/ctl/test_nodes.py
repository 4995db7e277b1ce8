"""`aegisctl taint`, `untaint`, `nodes` and `probation` as people call them, without any job."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aegis_elastic.control.host.cluster import ClusterScope, of_cluster
from aegis_elastic.core.policy import node_records
from aegis_elastic.core.policy.node_records import HARDWARE, Incident, NodeTaint, Standing
from aegis_elastic.launch.ctl import main
from tests.store.backends import missing, running

Run = Callable[..., tuple[int, str, str]]
HERE = socket.gethostname()


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("nodes")`: exit code, stdout and stderr; the records are in `tmp_path / "shared"`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("AEGIS_STATE_DIR", str(tmp_path / "shared"))

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = main.main(argv)
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


def change(
    folder: Path, node: str, edit: Callable[[node_records.NodeRecord], node_records.NodeRecord]
) -> node_records.NodeRecord:
    async def whole() -> node_records.NodeRecord:
        scope = of_cluster(str(folder), "")
        assert isinstance(scope, ClusterScope)
        try:
            return await scope.change(node, edit)
        finally:
            await scope.close()

    return asyncio.run(whole())


def broken(folder: Path, node: str, since_s: float = 10.0, for_s: float = 5.0) -> None:
    """A node that was found broken `since_s` ago, for that long."""
    found = time.time() - since_s
    taint = NodeTaint("gpu.missing", HARDWARE, found, "team/job/1", found + for_s)
    change(folder, node, lambda record: node_records.with_taint(record, taint))


def known(run: Run) -> dict[str, dict[str, Any]]:
    code, out, _ = run("nodes", "--json")
    assert code == 0
    return {row["nodeName"]: row for row in json.loads(out)["nodes"]}


def test_a_batch_goes_out_with_a_reason_and_an_end_and_comes_back(run: Run) -> None:
    code, out, err = run("taint", "n1", "n2", "n1", "--reason", "new\x1b[2J cables", "--expires", "2h")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["node", "n1", "n2"]
    assert "\x1b" not in out and "new [2J cables" in out
    rows = known(run)
    assert rows["n1"]["until"] == pytest.approx(time.time() + 7200, abs=60)
    assert (rows["n2"]["standing"], rows["n2"]["kind"]) == ("tainted", "manual")
    assert rows["n2"]["job"].endswith(f"@{HERE}")
    assert run("nodes", "--exclude")[1] == "n1,n2\n"
    assert run("untaint", "n1", "n2", "never-heard-of")[0] == 0
    assert run("nodes", "--exclude")[1] == "\n"
    code, out, _ = run("nodes")
    assert code == 0 and out.startswith("0 nodes not to be used, 2 nodes known (--all); from ")


def test_repeat_offenders_are_seen(run: Run, tmp_path: Path) -> None:
    for number in range(3):
        lemon = Incident("gpu.missing", HARDWARE, time.time() - number, f"team/job/{number}")
        change(tmp_path / "shared", "lemon", functools.partial(node_records.with_incident, incident=lemon))
    code, out, _ = run("nodes")
    assert code == 0
    assert out.splitlines()[1].split()[:6] == ["lemon", "free", "-", "-", "-", "3.00"]
    assert len(known(run)["lemon"]["incidents"]) == 3


def test_isolation_by_hand_and_back(run: Run, tmp_path: Path) -> None:
    listed = tmp_path / "listed"
    code, out, err = run("taint", "n1", "--reason", "x", "--isolate", "--isolation", f"file:{listed}")
    assert (code, err) == (0, "") and f"n1 is listed in {listed}" in out
    assert known(run)["n1"]["isolatedBy"] == "file"
    code, out, _ = run("untaint", "n1")
    assert code == 0 and "n1 is still isolated by file" in out
    assert listed.read_text().startswith("n1 ")
    code, out, _ = run("untaint", "n1", "--isolation", f"file:{listed}")
    assert code == 0 and "still isolated" not in out
    assert listed.read_text() == ""
    code, _, err = run("taint", "n1", "--reason", "x", "--isolate", "--isolation", "command:false {node}")
    assert code == 1
    assert known(run)["n1"]["standing"] == "tainted", "a scheduler that says no keeps no taint from the store"
    assert known(run)["n1"]["isolatedBy"] == ""


@pytest.mark.full
def test_a_node_comes_back_by_passing_check_and_burn(run: Run, tmp_path: Path) -> None:
    broken(tmp_path / "shared", HERE)
    assert known(run)[HERE]["standing"] == Standing.PROBATION.value
    code, out, _ = run("probation", "--burn-s", "0.2")
    assert (code, out) == (0, f"{HERE} has passed check and burn and may take part again\n")
    assert known(run)[HERE]["standing"] == "free"
    assert known(run)[HERE]["score"] == pytest.approx(1.0, abs=0.01)  # it is not forgotten
    assert run("probation", "--burn-s", "0.2")[1] == f"{HERE} is free\n"


def test_a_node_that_does_not_pass_stays_out(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(tmp_path / "shared", HERE)
    # No shared memory to write to: the cheapest way to have a check find something here.
    monkeypatch.setattr("aegis_elastic.launch.ctl.probation.PATHS", {"shm": str(tmp_path / "not" / "there")})
    code, out, _ = run("probation", "--burn-s", "0.2")
    assert code == 1
    assert out.startswith(f"{HERE} stays out: hardware: probation not passed: ")
    row = known(run)[HERE]
    assert row["standing"] == "tainted" and row["until"] > time.time() + 80_000


def test_an_interrupted_trial_changes_nothing_and_leaves_nothing_running(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    broken(shared, HERE)
    argv = [sys.executable, "-m", "aegis_elastic.launch.ctl.main", "probation", "--burn-s", "600"]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "AEGIS_TRIAL": str(tmp_path)}
    with subprocess.Popen([*argv, "--state-dir", str(shared)], env=env, stdout=subprocess.PIPE) as process:
        while not (burning := _burning(f"AEGIS_TRIAL={tmp_path}".encode())):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    # Killed with it, and gone a moment later.
    gone_s = time.monotonic() + 10
    while left := [pid for pid in burning if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < gone_s, f"still running: {left}"
        time.sleep(0.02)
    row = change(shared, HERE, lambda record: record)
    assert node_records.judge(row, time.time()).standing is Standing.PROBATION


def _burning(mark: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, environ = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue  # ended meanwhile
        if b"aegis_elastic.checks.burn" in command and mark in environ.split(b"\0"):
            found.append(int(entry.name))
    return found


def test_the_records_may_be_in_etcd(run: Run, tmp_path: Path, unmet: Callable[[str], None]) -> None:
    why = missing("etcd")
    if why is not None:
        unmet(why)

    async def whole() -> None:
        async with running("etcd", tmp_path) as server:
            url = f"etcd://127.0.0.1:{server.port}"  # type: ignore[attr-defined]
            call = asyncio.to_thread
            assert (await call(run, "taint", "n1", "--reason", "x", "--store", url))[0] == 0
            code, out, _ = await call(run, "nodes", "--exclude", "--store", url)
            assert (code, out) == (0, "n1\n")

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("argv", "code", "why"),
    [
        (("taint", "n1"), 2, "--reason"),
        (("taint", "n1", "--reason", "x", "--expires", "soon"), 2, "'soon' is not a length of time like"),
        (("taint", "n1", "--reason", "x", "--expires", "0h"), 2, "is not a length of time"),
        (("taint", "", "--reason", "x"), 2, "as a node's name"),
        (("taint", "n" * 300, "--reason", "x"), 2, "as a node's name"),
        (("taint", "n1", "--reason", "x", "--isolate"), 2, "--isolate wants --isolation DRIVER"),
        (("taint", "n1", "--reason", "x", "--isolation", "drain"), 2, "no isolation driver"),
        (("nodes", "--state-dir", "/no/such/place"), 2, "there is no such directory"),
        (("nodes", "--store", "http://x:1"), 2, "is not etcd://HOST:PORT"),
        (("nodes", "--state-dir", "/tmp", "--store", "etcd://x:1"), 2, "the records are in one place"),
        (("nodes", "--job", "no-such-job"), 3, "without a job, give --state-dir or --store"),
    ],
)
def test_wrong_use_has_a_reason(run: Run, argv: tuple[str, ...], code: int, why: str) -> None:
    found, out, err = run(*argv)
    assert (found, out) == (code, ""), err
    assert why in " ".join(err.split())


def test_a_store_that_is_away_is_a_finding(run: Run, tmp_path: Path) -> None:
    (tmp_path / "shared" / "cluster").touch()
    code, out, err = run("nodes")
    assert (code, out) == (1, "")
    assert "cannot use the records of nodes in" in err
