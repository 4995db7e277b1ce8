"""What users of torchrun and of its other successors have reported, as scenarios with the right behaviour.

Each test names its reports. One run of two nodes serves most of them: rank 1 crashes; then the whole first
node is killed, the one that hosts the store and has rank 0, and its launcher is started again; in the third
life rank 0 ends at once while rank 1 trains on. `test_orphans.py` has the reports on signals and orphans,
`test_bad_input.py` those on failures to start.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration.harness import Job, free_port, wait_for

QUICK = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")
COMMON = r"""
import json, os, signal, socket, sys, time
folder = sys.argv[1]
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def write_file(what, text=""):
    with open(f"{folder}/{what}.tmp", "w") as file:
        file.write(text)
    os.rename(f"{folder}/{what}.tmp", f"{folder}/{what}")
def wait(what):
    while not os.path.exists(f"{folder}/{what}"):
        time.sleep(0.02)
"""
TWO_NODES = (
    COMMON
    + r"""
print(f"rank {rank} life {life}", flush=True)
write_file(f"env-{rank}-{life}", json.dumps(dict(os.environ)))
wait(f"env-{1 - rank}-{life}")
if life == 0 and rank == 1:
    sys.exit(17)
if life < 2:
    wait("never")
if rank == 0:
    sys.exit(0)
wait("saved")
with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 5):
    write_file("store-answers")
"""
)


class _SharedRun(NamedTuple):
    folder: Path
    endpoint: str
    exit_codes: dict[str, int]
    report: dict[str, Any]
    output: str
    incarnation_while_alone: int

    def env(self, rank: int, life: int) -> dict[str, str]:
        """What a rank was started with, in that life of the training."""
        found: dict[str, str] = json.loads((self.folder / f"env-{rank}-{life}").read_text())
        return found


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_SharedRun]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text(TWO_NODES)
    # A name for this host that isn't what it calls itself.
    endpoint = f"localhost:{free_port()}"
    flags = (*QUICK, "--tee", "3", "--log-dir", str(folder / "logs"))
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name} ${rank}]:"}
    with Job(folder, nnodes="2", endpoint=endpoint, flags=flags, env=template) as job:
        second = job.start("train.py", str(folder), worker="b", flags=("--node-rank", "1"))
        first = job.start("train.py", str(folder), worker="a", flags=("--node-rank", "0"))
        wait_for(lambda: all((folder / f"env-{rank}-1").exists() for rank in (0, 1)), "the second life")
        first.wait_output("rank 0 life 1")  # else it dies with the line in its hands
        first.kill(signal.SIGKILL)
        again = job.start("train.py", str(folder), worker="a", flags=("--node-rank", "0"))
        wait_for(lambda: all((folder / f"env-{rank}-2").exists() for rank in (0, 1)), "the third life")
        rank_0_ended = job.wait(lambda view: view["workers"][0]["finished"], "rank 0's end")
        assert list(job.ranks()) == [1]
        (folder / "saved").touch()
        codes = {"b": second.wait(), "a": first.wait(), "a again": again.wait()}
        output = second.output + first.output + again.output
        yield _SharedRun(folder, endpoint, codes, job.report(), output, rank_0_ended["incarnation"])


def test_a_restart_meets_in_a_store_of_its_own(shared_run: _SharedRun) -> None:
    """pytorch#135712, #91940, #126510: no key and no port of the last life is used again."""
    ports = [{shared_run.env(rank, life)["MASTER_PORT"] for rank in (0, 1)} for life in (0, 1, 2)]
    assert [len(ports_of_life) for ports_of_life in ports] == [1, 1, 1]
    assert len(set.union(*ports)) == 3


def test_the_restart_count_is_the_jobs(shared_run: _SharedRun) -> None:
    """pytorch#108158: a node that is restarted, and one that is new, know how often training was started."""
    for life in (0, 1, 2):
        for rank in (0, 1):
            assert shared_run.env(rank, life)["TORCHELASTIC_RESTART_COUNT"] == str(life)
            assert shared_run.env(rank, life)["TORCHELASTIC_MAX_RESTARTS"] == "3"
    assert shared_run.report["recoverCount"] == 2


def test_a_killed_agent_does_not_end_the_job(shared_run: _SharedRun) -> None:
    """pytorch#150916, #67616, #123678, NVRx#421: the other agent lives, the meeting stays open."""
    assert shared_run.exit_codes == {"b": 0, "a": -signal.SIGKILL, "a again": 0}
    assert shared_run.report["outcome"] == "succeeded"


def test_the_store_hosts_death_does_not_end_the_job(shared_run: _SharedRun) -> None:
    """pytorch#67742: the killed agent hosted the store of its incarnation; the next one had another."""
    assert shared_run.env(0, 1)["GROUP_RANK"] == "0"
    assert shared_run.report["incarnations"][2]["n"] == 3


def test_node_rank_0_has_rank_0_in_every_life(shared_run: _SharedRun) -> None:
    """pytorch#182223, #99684: though the other node came first each time."""
    for life in (0, 1, 2):
        assert [shared_run.env(rank, life)["GROUP_RANK"] for rank in (0, 1)] == ["0", "1"]
    assert [worker["name"] for worker in shared_run.report["workers"]] == ["a", "b"]


def test_a_clean_end_of_one_rank_lets_the_others_train_on(shared_run: _SharedRun) -> None:
    """Rank 0's exit code 0 starts nothing and stops nothing."""
    assert shared_run.incarnation_while_alone == 3
    assert len(shared_run.report["incarnations"]) == 3


def test_the_store_stays_until_the_last_rank_is_done(shared_run: _SharedRun) -> None:
    """pytorch#118891, #69520: its host waits for whoever still saves, and nobody loses a race at the end."""
    assert (shared_run.folder / "store-answers").exists()


def test_an_endpoint_by_a_name_that_is_not_the_hosts_own(shared_run: _SharedRun) -> None:
    """pytorch#73380: the nodes met, and ranks are given an address, not a name to look up."""
    assert shared_run.endpoint.startswith("localhost:")
    assert shared_run.env(1, 0)["MASTER_ADDR"] == "127.0.0.1"


def test_logs_and_prefixes_tell_ranks_and_lives_apart(shared_run: _SharedRun) -> None:
    """pytorch#60911, #75087: every line says its global rank, every life has files of its own."""
    for rank in (0, 1):
        for life in (0, 1, 2):
            assert f"[default {rank}]:rank {rank} life {life}\n" in shared_run.output
    files = sorted(
        path.relative_to(shared_run.folder / "logs") for path in shared_run.folder.rglob("stdout.log")
    )
    texts = {(file.parts[-3], (shared_run.folder / "logs" / file).read_text().strip()) for file in files}
    assert {(f"attempt_{life}", f"rank {rank} life {life}") for rank in (0, 1) for life in (0, 1, 2)} <= texts


def test_a_quick_death_and_return_is_counted_even_at_no_restarts(tmp_path: Path) -> None:
    """pytorch#147064: a launcher that dies and is there again at once has not bypassed --max-restarts 0."""
    (tmp_path / "train.py").write_text(COMMON + "write_file(f'life-{life}-{rank}'); wait('never')\n")
    with Job(tmp_path, nnodes="2", max_restarts=0, flags=QUICK) as job:
        steady = job.start("train.py", str(tmp_path), worker="steady")
        hasty = job.start("train.py", str(tmp_path), worker="hasty")
        job.wait_ranks(2)
        hasty.kill(signal.SIGKILL)
        again = job.start("train.py", str(tmp_path), worker="hasty")
        assert (steady.wait(), again.wait()) == (1, 1)
        assert not list(tmp_path.glob("life-1-*")), "training was started again"
        assert job.report()["failReason"].startswith("retries used up")


def test_the_grace_after_a_fault_is_ours(tmp_path: Path) -> None:
    """pytorch#119856: a rank that makes nothing of SIGTERM doesn't get 30 s; who failed first is kept."""
    deaf = (
        "signal.signal(signal.SIGTERM, lambda number, frame: None)\n"
        "write_file(f'up-{rank}-{life}'); wait(f'up-{1 - rank}-{life}')\n"
        "if life == 0:\n    sys.exit(19) if rank == 0 else wait('never')\n"
    )
    (tmp_path / "train.py").write_text(COMMON + deaf)
    with Job(tmp_path, nproc=2, flags=(*QUICK, "--aegis-fault-grace-s", "0.3")) as job:
        launch = job.start("train.py", str(tmp_path))
        assert launch.wait() == 0, launch.output
        report = job.report()
        (failure,) = report["failures"]
        assert (failure["rank"], failure["exitCode"], failure["role"]) == (0, 19, "root")
        (recovery,) = report["recoveries"]
        assert 0.3 <= recovery["stop_s"] < 30


def test_user_signals_reach_the_ranks_and_the_launcher_lives(tmp_path: Path) -> None:
    """pytorch#154849: SIGUSR1 and SIGUSR2 are for the training, whatever it makes of them."""
    saver = (
        "for signum in (signal.SIGUSR1, signal.SIGUSR2):\n"
        "    signal.signal(signum, lambda number, frame: write_file(f'got-{number}'))\n"
        "write_file('up'); wait('end')\n"
    )
    (tmp_path / "train.py").write_text(COMMON + saver)
    with Job(tmp_path, flags=QUICK) as job:
        launch = job.start("train.py", str(tmp_path))
        wait_for((tmp_path / "up").exists, "the rank")
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(launch.pid, signum)
            wait_for((tmp_path / f"got-{int(signum)}").exists, signum.name)
        (tmp_path / "end").touch()
        assert launch.wait() == 0, launch.output
        assert len(job.report()["incarnations"]) == 1


def test_launchers_that_nobody_named_share_a_host(tmp_path: Path) -> None:
    """The same launch line twice on a host: two workers, not one that has come back."""
    (tmp_path / "train.py").write_text(COMMON + "write_file(f'up-{rank}'); wait(f'up-{1 - rank}')\n")
    with Job(tmp_path, nnodes="2", flags=QUICK) as job:
        launches = [job.start("train.py", str(tmp_path)) for _ in range(2)]
        assert [launch.wait() for launch in launches] == [0, 0], launches[0].output
        names = {worker["name"] for worker in job.report()["workers"]}
        host = os.uname().nodename
        assert names == {host, f"{host}.2"}
        assert len(job.report()["incarnations"]) == 1
