"""A slow node leaves at a checkpoint boundary; a spare takes its place, training goes on from that step."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from aegis_elastic.control.controllers.guarded_actions import GuardedActions
from aegis_elastic.control.host.cluster import of_cluster
from aegis_elastic.core.events import Noted, Page, Saved
from aegis_elastic.core.policy.settings import Policy
from aegis_elastic.core.policy.storm_guard import Action
from aegis_elastic.testing.netns import Net
from tests.integration.frameworks import HF_TRAINER, LIGHTNING, python_with_frameworks
from tests.integration.harness import Job, Launch, hosts
from tests.integration.nodes.test_storm_guard import SCRIPT
from tests.observe.receiver import receiver

pytestmark = [pytest.mark.timeout(240), pytest.mark.netns]
STANDIN = Path(__file__).parents[1] / "megatron_standin.py"
FLAGS = ("--aegis-bootcheck", "off", "--aegis-troubleshoot", "off")


class Eviction:
    """Two nodes that train and one that waits, each on a host of its own."""

    def __init__(
        self, job: Job, net: Net, script: Path, *args: str, flags: Sequence[Sequence[str]] = ((), (), ())
    ) -> None:
        self.job = job
        self.launches: list[Launch] = []
        for host, own in zip(net.hosts, flags, strict=False):
            env = {"PYTHONPATH": str(STANDIN.parents[2])}
            self.launches.append(job.start(script, *args, host=host, flags=own, env=env))
            if len(self.launches) == 2:
                job.wait_phase("RunCommand", 1)

    def evict_second(self) -> None:
        """Ask for it, when the spare is known to be fit."""
        self.job.wait(lambda view: "fit" in self.names(), "a fit spare")
        done = self.job.ctl("evict", self.launches[1].worker, "--reason", "1.4 times its peers")
        assert done.returncode == 0, done.stderr

    def names(self) -> list[str]:
        return [line.transition for line in self.job.journal()]

    def detail(self, code: str) -> str:
        """The details of what was noted under that code."""
        events = [line.event for line in self.job.journal()]
        return "\n".join(e.detail for e in events if isinstance(e, Noted) and e.code == code)

    def reason(self, name: str) -> str:
        """Why the first decision of that name was made."""
        return next(line.reason for line in self.job.journal() if line.transition == name)

    def evicted_at(self) -> Saved:
        """The boundary; the journal has mark, boundary and eviction in that order."""
        names = self.names()
        evicted = names.index("evict")
        boundary = max(at for at, name in enumerate(names[:evicted]) if name == "saved")
        assert names.index("marked") < boundary < evicted
        assert names.index("may_evict") < evicted, "whether the guard allows it before the boundary, or at it"
        saved = self.job.journal()[boundary].event
        assert isinstance(saved, Saved)
        return saved


def steps_of(folder: Path, rank: int) -> dict[str, list[int]]:
    """Life of training -> the steps that this rank ran in it."""
    lives: dict[str, list[int]] = {}
    for line in (folder / f"ckpt.steps.{rank}").read_text().splitlines():
        life, step = line.split()
        lives.setdefault(life, []).append(int(step))
    return lives


@pytest.mark.parametrize("how", ["sync", pytest.param("async", marks=pytest.mark.full)])
def test_a_slow_node_leaves_at_megatrons_next_checkpoint(
    tmp_path: Path, unmet: Callable[[str], None], how: str
) -> None:
    args = ["--save", "ckpt", "--load", "ckpt", "--save-interval", "5"]
    args += ["--async-save"] if how == "async" else []
    with (
        hosts(3, tmp_path, unmet) as net,
        Job(
            tmp_path, nnodes="2", max_restarts=1, endpoint=f"{net.hosts[0].address}:29400", flags=FLAGS
        ) as job,
    ):
        eviction = Eviction(job, net, STANDIN, *args)
        first, slow, spare = eviction.launches
        eviction.evict_second()
        job.wait_phase("RunCommand", 2)
        assert slow.wait() == 1
        resumed = len(eviction.names())
        job.wait(lambda view: "saved" in eviction.names()[resumed:], "a checkpoint after the eviction")
        (tmp_path / "ckpt.done").touch()
        assert [first.wait(), spare.wait()] == [0, 0]

        saved = eviction.evicted_at()
        assert saved.kind == "megatron"
        status = job.status()
        assert {worker["retries"] for worker in status["workers"]} == {0}, "not counted"
        assert slow.worker not in {worker["name"] for worker in status["workers"]}
        assert "evicted" in slow.output
        for rank in (0, 1):
            before, after = steps_of(tmp_path, rank).values()
            assert after == list(range(saved.step + 1, after[-1] + 1)), "on from that very checkpoint"
            beyond = before[-1] - saved.step
            assert 0 <= beyond <= (1 if how == "sync" else 3)
            assert f"{beyond} steps after the checkpoint of step {saved.step}" in eviction.detail(
                "evict.steps"
            )
        assert [node["kind"] for node in job.report()["errorNodes"]] == ["slow"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "text", "option"),
    [("hf", HF_TRAINER, "--output_dir"), ("lightning", LIGHTNING, "--default_root_dir")],
)
def test_a_slow_node_leaves_at_the_next_checkpoint_of_a_real_framework(
    tmp_path: Path, unmet: Callable[[str], None], kind: str, text: str, option: str
) -> None:
    """Hugging Face's Trainer and Lightning as they come from PyPI; the scripts know nothing of us."""
    python = python_with_frameworks(unmet)
    script = tmp_path / "train.py"
    script.write_text(text)
    env = {"PYTHON_EXEC": python}
    with (
        hosts(3, tmp_path, unmet) as net,
        Job(tmp_path, nnodes="2", endpoint=f"{net.hosts[0].address}:29400", flags=FLAGS, env=env) as job,
    ):
        eviction = Eviction(job, net, script, option, "ckpt")
        first, slow, spare = eviction.launches
        eviction.evict_second()
        job.wait_phase("RunCommand", 2)
        assert [launch.wait() for launch in (slow, first, spare)] == [1, 0, 0]
        saved = eviction.evicted_at()
        assert saved.kind == kind
        for rank in (0, 1):
            before, after = steps_of(tmp_path, rank).values()
            assert after == list(range(saved.step + 1, 13)), "on from that very checkpoint"
            beyond = before[-1] - saved.step
            assert 0 <= beyond <= 1
            # Counted by torch's hooks, which may have seen one more than the script's own callback.
            detail = eviction.detail("evict.steps")
            assert detail.startswith((f"{beyond} steps after", f"{beyond + 1} steps after")), detail
        print(f"{kind}: {eviction.reason('evict')}; {detail}")


@pytest.mark.full
@pytest.mark.parametrize("spare", ["none", "unfit"])
def test_a_slow_node_that_nobody_can_replace_stays(
    tmp_path: Path, unmet: Callable[[str], None], spare: str
) -> None:
    """No suicide: without a spare that passed its checks the mark stays, training goes on; one alert."""
    (tmp_path / "file").touch()
    with (
        hosts(3 if spare == "unfit" else 2, tmp_path, unmet) as net,
        Job(tmp_path, nnodes="2", endpoint=f"{net.hosts[0].address}:29400", flags=FLAGS) as job,
    ):
        flags = ((), (), ("--aegis-bootcheck", "env", "--aegis-check-path", f"log={tmp_path}/file/x"))
        eviction = Eviction(job, net, STANDIN, "--save", "ckpt", "--load", "ckpt", flags=flags)
        if spare == "unfit":
            job.wait(lambda view: "file/x" in eviction.detail("spare.unfit"), "the spare's checks")
        pids = {rank: process.pid for rank, process in job.wait_ranks(2).items()}
        assert job.ctl("evict", eviction.launches[1].worker).returncode == 0
        job.wait(lambda view: "evict" in eviction.names(), "the decision")
        at = eviction.names().index("evict")
        job.wait(lambda view: eviction.names()[at:].count("saved") >= 2, "two more checkpoints")
        assert {rank: process.pid for rank, process in job.ranks().items()} == pids
        assert eviction.names().count("evict") == 1
        decided = job.journal()[at]
        assert [effect.key for effect in decided.effects if isinstance(effect, Page)] == ["evict.node1"]
        assert "no checked spare waits" in decided.reason
        (tmp_path / "ckpt.done").touch()
        assert [launch.wait() for launch in eviction.launches[:2]] == [0, 0]


@pytest.mark.full
def test_a_boundary_that_does_not_come_calls_a_human(tmp_path: Path) -> None:
    """Three usual intervals without a checkpoint, and a slow node waits for one: nothing else is done."""
    env = {"PYTHONPATH": str(STANDIN.parents[2])}
    with receiver() as received, Job(tmp_path, nproc=2, flags=FLAGS, env=env) as job:
        flags = ["--aegis-notify", received.url]
        launch = job.start(STANDIN, "--save", "ckpt", "--load", "ckpt", worker="w", flags=flags)
        job.wait(lambda view: [line.transition for line in job.journal()].count("saved") >= 3, "checkpoints")
        (tmp_path / "ckpt.held").touch()
        assert job.ctl("hang", "w", "--verdict", "slow", "--reason", "1.4 times its peers").returncode == 0
        [page] = received.wait(1)
        assert "waits to be evicted at a checkpoint" in page["message"]
        assert "3 times the usual" in page["message"]
        assert job.view()["incarnation"] == 1
        (tmp_path / "ckpt.done").touch()
        assert launch.wait() == 0


# What knows nothing of us: gloo DDP with torch's own checkpoints. On the host "node1" one loader is slow.
DDP = """
import argparse, os, socket, time, torch
import torch.distributed as dist
from pathlib import Path
from torch.distributed import checkpoint as dcp

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-dir", type=Path)
folder = parser.parse_args().checkpoint_dir
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
life = os.environ["TORCHELASTIC_RESTART_COUNT"] + "." + os.environ["MASTER_PORT"]
net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
saved = sorted(int(path.parent.name[5:]) for path in folder.glob("step-*/.metadata"))
step = saved[-1] if saved else 0
if step:
    dcp.load(net.state_dict(), checkpoint_id=folder / f"step-{step}")
end = torch.zeros(1)
while not end.item():
    begun = time.monotonic()
    time.sleep(0.1)
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
        torch.randn(50, 50) @ torch.randn(50, 50)
    if socket.gethostname() == "node1" and os.environ["LOCAL_RANK"] == "1" and step >= 40:
        time.sleep(0.4 * (time.monotonic() - begun))
    optimizer.zero_grad()
    model(torch.randn(16, 64)).sum().backward()
    dist.all_reduce(end.fill_(Path(f"{folder}.done").exists()))
    optimizer.step()
    step += 1
    with open(f"{folder}.steps.{rank}", "a") as log:
        log.write(f"{life} {step}\\n")
    if step % 25 == 0:
        dcp.save(net.state_dict(), checkpoint_id=folder / f"step-{step}")
"""


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_slow_node_is_found_guarded_and_evicted_without_anybody_asking(
    tmp_path: Path, unmet: Callable[[str], None]
) -> None:
    """Detector, guard (with a short persistence), boundary, spare: the whole chain, two ranks a host."""
    script = tmp_path / "train.py"
    script.write_text(DDP)
    flags = (*FLAGS, "--aegis-guard-persistence-s", "3", "--aegis-guard-look-s", "0.5")
    with (
        hosts(3, tmp_path, unmet) as net,
        Job(tmp_path, nnodes="2", nproc=2, endpoint=f"{net.hosts[0].address}:29400", flags=flags) as job,
    ):
        eviction = Eviction(job, net, script, "--checkpoint-dir", "ckpt")
        first, slow, spare = eviction.launches
        job.wait(
            lambda view: view["phase"] == "RunCommand" and view["incarnation"] == 2, "an eviction", 240.0
        )
        saved = eviction.evicted_at()
        resumed = len(eviction.names())
        job.wait(lambda view: "saved" in eviction.names()[resumed:], "a checkpoint after the eviction")
        (tmp_path / "ckpt.done").touch()
        assert [launch.wait() for launch in (first, slow, spare)] == [0, 1, 0]
        assert [node["nodeName"] for node in job.report()["errorNodes"]] == ["node1"]
        assert {worker["retries"] for worker in job.status()["workers"]} == {0}
        for rank in range(4):
            before, after = steps_of(tmp_path, rank).values()
            assert after[0] == saved.step + 1, "on from that very checkpoint"
            assert 0 <= before[-1] - saved.step <= 1
        print(f"marked: {eviction.reason('marked')}")
        print(f"evicted: {eviction.reason('evict')}; {eviction.detail('evict.steps')}")


@pytest.mark.full
def test_a_node_that_used_up_its_day_makes_way_for_the_spare_when_it_crashes_again(
    tmp_path: Path, unmet: Callable[[str], None]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shared = tmp_path / "shared"
    shared.mkdir()
    with (
        hosts(3, tmp_path, unmet) as net,
        Job(
            tmp_path,
            nnodes="2",
            max_restarts=3,
            endpoint=f"{net.hosts[0].address}:29400",
            flags=(*FLAGS, "--aegis-state-dir", str(shared)),
        ) as job,
    ):
        asyncio.run(use_up(shared, net.hosts[1].name))
        eviction = Eviction(job, net, tmp_path / "train.py", str(tmp_path / "end"))
        first, worn, spare = eviction.launches
        job.wait(lambda view: "fit" in eviction.names(), "a fit spare")
        job.wait_ranks(2)
        [rank] = job.ranks(worn).values()
        os.kill(rank.pid, signal.SIGKILL)
        job.wait_phase("RunCommand", 2)
        assert worn.wait() == 1
        assert "a spare takes this node's place: the breaker is open: 3 actions in 24 h" in worn.output
        status = job.status()
        assert [worker["name"] for worker in status["workers"]] == [first.worker, spare.worker]
        assert (status["recoverCount"], status["errorNodes"]) == (1, [])
        assert "is relieved: not counted" in eviction.reason("relieve")
        (tmp_path / "end").touch()
        assert [first.wait(), spare.wait()] == [0, 0]


async def use_up(shared: Path, node_name: str) -> None:
    """Other jobs have restarted this node three times today."""
    scope = of_cluster(str(shared), "")
    assert scope is not None

    class Clock:
        now = staticmethod(time.time)

    guard = GuardedActions(await scope.store(), "other", "test", Policy(), Clock())  # type: ignore[arg-type]
    for number in range(3):
        await guard.count(node_name, Action.RESTART_HUNG, f"action {number}")
    await scope.close()
