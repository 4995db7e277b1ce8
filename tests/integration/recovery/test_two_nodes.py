"""Two nodes and more: what one side suffers, all go through together, with the same ranks and one count."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from aegis_elastic.core.protocol.orders import Action
from aegis_elastic.testing.faults import Gates
from aegis_elastic.testing.netns import Host
from tests.integration.harness import Job, Launch, Rank, View, hosts, stays, wait_for
from tests.integration.planes import plane_processes

pytestmark = pytest.mark.timeout(240)
FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")
# A rank that would train for ever, until the test says that it is done: all of them, or this one in this
# life. No torch, so that starts are cheap.
TRAIN = """
import os, sys, time
mine = f"{sys.argv[1]}.{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
while not (os.path.exists(sys.argv[1]) or os.path.exists(mine)):
    time.sleep(0.02)
"""


class Training:
    """A script that runs until `end`, and the job that runs it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.script = job.folder / "train.py"
        self.script.write_text(TRAIN)
        self._done = job.folder / "done"

    def start(
        self, worker: str = "", *flags: str, host: Host | None = None, gates: Gates | None = None
    ) -> Launch:
        done = str(self._done)
        return self.job.start(self.script, done, worker=worker, flags=flags, host=host, gates=gates)

    def finish(self, launch: Launch, restart_count: int) -> None:
        """Let the ranks of that node end well, and wait until the master knows."""
        for rank in self.job.ranks(launch):
            self._done.with_name(f"{self._done.name}.{rank}.{restart_count}").touch()
        self.job.wait(lambda view: launch.worker in finished(view), f"{launch.worker} to finish")

    def end(self, *launches: Launch) -> None:
        """Let every rank finish; all of these launchers succeed."""
        self._done.touch()
        assert [launch.wait() for launch in launches] == [0] * len(launches)


def kill(rank: Rank) -> None:
    os.kill(rank.pid, signal.SIGKILL)


def retries(view: View) -> dict[str, int]:
    return {worker["name"]: worker["retries"] for worker in view["workers"]}


def finished(view: View) -> set[str]:
    return {worker["name"] for worker in view["workers"] if worker["finished"]}


def ranks_of(view: View) -> dict[str, list[int]]:
    return {worker["name"]: worker["ranks"] for worker in view["workers"]}


def test_a_rank_killed_on_one_node_restarts_both_in_the_same_incarnation(tmp_path: Path) -> None:
    with Job(tmp_path, nnodes="2", nproc=2, max_restarts=2, flags=FLAGS) as job:
        training = Training(job)
        launches = [training.start("a"), training.start("b")]
        job.wait_phase("RunCommand", 1)
        before = job.wait_ranks(4, restart_count=0)
        placed = [sorted(job.ranks(launch)) for launch in launches]
        kill(job.ranks(launches[1])[placed[1][0]])

        job.wait_phase("RunCommand", 2)
        after = job.wait_ranks(4, restart_count=1)
        assert [sorted(job.ranks(launch)) for launch in launches] == placed
        assert not {rank.pid for rank in before.values()} & {rank.pid for rank in after.values()}
        for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "WORLD_SIZE"):
            assert len({rank.environ[name] for rank in after.values()}) == 1, name
        assert before[0].environ["MASTER_PORT"] != after[0].environ["MASTER_PORT"]
        shown = job.status()
        assert (shown["incarnation"], shown["recoverCount"]) == (2, 1)
        assert retries(shown) == {"a": 1, "b": 1}
        training.end(*launches)


def test_a_spare_waits_quietly_and_takes_the_ranks_of_a_killed_agent(tmp_path: Path) -> None:
    with Job(tmp_path, nnodes="2", nproc=2, max_restarts=2, flags=FLAGS) as job:
        training = Training(job)
        first, second = training.start("a"), training.start("b")
        job.wait_phase("RunCommand", 1)
        before = job.wait_ranks(4)
        spare = training.start("c")
        spare.wait_output("waiting as a spare")
        lines_before = len(job.journal())
        pids = {rank: process.pid for rank, process in before.items()}
        # Longer than two of its heartbeats.
        stays(lambda: {rank: process.pid for rank, process in job.ranks().items()} == pids, 2.5)
        shown = job.status()
        assert shown["plane"]["spares"] == ["c"]
        assert retries(shown) == {"a": 0, "b": 0}
        assert [line.transition for line in job.journal()[lines_before:]] == []

        lost_ranks = sorted(job.ranks(second))
        second.kill()
        job.wait_phase("RunCommand", 2)
        job.wait_ranks(4, restart_count=1)
        assert sorted(job.ranks(spare)) == lost_ranks
        shown = job.status()
        assert retries(shown) == {"a": 1, "c": 1}
        assert shown["recoverCount"] == 1
        assert shown["plane"]["spares"] == []
        training.end(first, spare)


def test_an_elastic_world_goes_on_smaller_when_an_agent_is_lost(tmp_path: Path) -> None:
    flags = (*FLAGS, "--rdzv-conf", "last_call_timeout=1")
    with Job(tmp_path, nnodes="1:2", nproc=2, max_restarts=2, flags=flags) as job:
        training = Training(job)
        first, second = training.start("a"), training.start("b")
        job.wait(lambda view: view["phase"] == "RunCommand" and len(view["workers"]) == 2)
        job.wait_ranks(4)
        second.kill()
        job.wait_phase("RunCommand", 2)
        after = job.wait_ranks(2, restart_count=1)
        assert sorted(after) == [0, 1]
        assert {rank.environ["WORLD_SIZE"] for rank in after.values()} == {"2"}
        shown = job.status()
        assert ranks_of(shown) == {"a": [0, 1]}
        assert retries(shown) == {"a": 1}, "losing a node does not buy retries"
        training.end(first)
    assert job.report()["outcome"] == "succeeded"


def test_a_smaller_world_takes_a_newcomer_at_the_next_restart_only(tmp_path: Path) -> None:
    flags = (*FLAGS, "--rdzv-conf", "last_call_timeout=0")
    with Job(tmp_path, nnodes="1:2", nproc=1, max_restarts=2, flags=flags) as job:
        training = Training(job)
        first = training.start("a")
        job.wait_phase("RunCommand", 1)
        remaining = job.wait_ranks(1)
        second = training.start("b")
        second.wait_output("waiting as a spare")
        assert job.ranks()[0].pid == remaining[0].pid, "a newcomer does not interrupt a running training"
        kill(remaining[0])
        job.wait(lambda view: view["phase"] == "RunCommand" and view["incarnation"] == 2)
        grown = job.wait_ranks(2, restart_count=1)
        assert {rank.environ["WORLD_SIZE"] for rank in grown.values()} == {"2"}
        assert sorted(job.ranks(first)) == [0], "nobody's rank moves when the world grows"
        training.end(first, second)


def test_node_ranks_given_by_the_user_are_group_ranks(tmp_path: Path) -> None:
    """Whoever comes first: --node-rank 0 has the first ranks (pytorch#182223)."""
    with Job(tmp_path, nnodes="2", nproc=2, flags=FLAGS) as job:
        training = Training(job)
        late = training.start("", "--node-rank", "1")
        wait_for(lambda: bool(job.journal()) and len(job.journal()) > 2, "node 1 to have come")
        early = training.start("", "--node-rank", "0")
        job.wait_phase("RunCommand", 1)
        job.wait_ranks(4)
        assert sorted(job.ranks(early)) == [0, 1]
        assert sorted(job.ranks(late)) == [2, 3]
        assert {rank.environ["GROUP_RANK"] for rank in job.ranks(late).values()} == {"1"}
        host = os.uname().nodename
        assert ranks_of(job.status()) == {f"{host}-0": [0, 1], f"{host}-1": [2, 3]}
        training.end(early, late)


def test_an_agent_that_comes_back_under_its_name_keeps_its_accounts_and_ranks(tmp_path: Path) -> None:
    with Job(tmp_path, nnodes="2", nproc=1, max_restarts=1, flags=FLAGS) as job:
        training = Training(job)
        first, second = training.start("a"), training.start("b")
        job.wait_phase("RunCommand", 1)
        job.wait_ranks(2)
        (its_rank,) = job.ranks(second)
        second.kill()
        assert retries(job.wait_phase("Restarting")) == {"a": 0, "b": 1}
        again = training.start("b")
        job.wait_phase("RunCommand", 2)
        job.wait_ranks(2, restart_count=1)
        assert list(job.ranks(again)) == [its_rank]
        assert retries(job.status()) == {"a": 1, "b": 1}

        # Its second death is one too many, however often it comes back.
        again.kill()
        job.wait_phase("Restarting")
        last = training.start("b")
        assert [first.wait(), last.wait()] == [1, 1]
        assert retries(job.status()) == {"a": 1, "b": 2}
        assert job.status()["phase"] == "Failed"
        assert "retries used up" in last.output


def test_a_node_that_has_finished_trains_again_when_another_fails(tmp_path: Path) -> None:
    gates = Gates(tmp_path / "gates")
    gates.close(Action.TROUBLESHOOT)
    with Job(tmp_path, nnodes="2", nproc=1, max_restarts=1, flags=FLAGS) as job:
        training = Training(job)
        first, second = training.start("a", gates=gates), training.start("b", gates=gates)
        job.wait_phase("RunCommand", 1)
        job.wait_ranks(2)
        training.finish(first, 0)
        kill(next(iter(job.ranks(second).values())))
        job.wait_phase("Troubleshooting")
        # That its training had finished must not be taken for the end of its troubleshooting; not even when
        # it reports again, because the bus had been away.
        os.kill(plane_processes(job)["nats"], signal.SIGKILL)
        first.wait_output("can be reached again")
        stays(lambda: not finished(job.view()), 2.5)
        gates.open(Action.TROUBLESHOOT)
        job.wait_phase("RunCommand", 2)
        job.wait_ranks(2, restart_count=1)
        assert retries(job.status()) == {"a": 1, "b": 1}
        training.end(first, second)


def test_an_agent_that_dies_after_its_ranks_are_done_is_not_missed(tmp_path: Path) -> None:
    with Job(tmp_path, nnodes="2", nproc=1, max_restarts=0, flags=FLAGS) as job:
        training = Training(job)
        first, second = training.start("a"), training.start("b")
        job.wait_phase("RunCommand", 1)
        job.wait_ranks(2)
        (running,) = [rank.pid for rank in job.ranks(second).values()]
        training.finish(first, 0)
        first.kill()
        job.wait(lambda view: any(line.transition == "gone" for line in job.journal()), "the loss")
        assert [rank.pid for rank in job.ranks().values()] == [running]
        assert retries(job.status()) == {"a": 0, "b": 0}
        training.end(second)
    assert job.report()["outcome"] == "succeeded"


@pytest.mark.netns
@pytest.mark.parametrize("cut_off", ["store_host", "other"])
def test_a_node_whose_cable_is_pulled_is_lost_once_and_may_come_back(
    tmp_path: Path, unmet: Callable[[str], None], cut_off: str
) -> None:
    """Silence on every way, without the courtesy of a closed connection. The first node hosts the store."""
    node_ranks = ("1", "0") if cut_off == "store_host" else ("0", "1")
    flags = (*FLAGS, "--aegis-lost-timeout-s", "3")
    with (
        hosts(2, tmp_path, unmet) as net,
        Job(
            tmp_path, nnodes="2", max_restarts=2, endpoint=f"{net.hosts[0].address}:29400", flags=flags
        ) as job,
    ):
        training = Training(job)
        launches = [
            training.start("", "--node-rank", rank, host=host)
            for host, rank in zip(net.hosts, node_ranks, strict=True)
        ]
        stays_on, cut = (f"node{index}-{rank}" for index, rank in enumerate(node_ranks))
        job.wait_phase("RunCommand", 1)
        job.wait_ranks(2)
        net.hosts[1].link_down()
        job.wait_phase("Restarting")
        # The worker that is left doesn't wait for the silent one: it has stopped its ranks and reports that.
        job.wait(lambda view: finished(view) == {stays_on}, f"{stays_on} to be ready")
        assert retries(job.status()) == {stays_on: 0, cut: 1}
        net.hosts[1].link_up()
        job.wait_phase("RunCommand", 2)
        job.wait_ranks(2, restart_count=1)
        assert retries(job.status()) == {stays_on: 1, cut: 1}
        training.end(*launches)
