"""What real masters do about nodes: refuse the tainted, record the broken, share both with other jobs."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aegis_elastic.agents.mailbox.events import Joined, Refused
from aegis_elastic.control.controllers import nodes
from aegis_elastic.control.controllers.contract import Applied
from aegis_elastic.control.host import cluster
from aegis_elastic.control.host.cluster import ClusterScope, Edit, VersionedRecord, of_cluster
from aegis_elastic.control.host.config import NodesConfig
from aegis_elastic.control.host.errors import AdminRefused
from aegis_elastic.core.accounts import journal
from aegis_elastic.core.events import Event, Finding, Join, Noted, Reconcile, RecordErrorNode, Taint
from aegis_elastic.core.machine import Transition, create
from aegis_elastic.core.model import ErrorNode, JobSpec
from aegis_elastic.core.policy import node_records
from aegis_elastic.core.policy.node_records import (
    ANOMALY,
    HARDWARE,
    MANUAL,
    Incident,
    NodeRecord,
    NodeTaint,
    Standing,
)
from aegis_elastic.core.protocol.messages import MessageType
from aegis_elastic.core.protocol.orders import Action
from aegis_elastic.store.contract import Store, StoreUnavailable, Watch
from aegis_elastic.store.memory import MemoryBackend, MemoryStore
from tests.control.conftest import Hold, MakeAgent
from tests.control.planes import Agent, Held, children, wait_for
from tests.store.backends import missing, running

BROKEN = (Finding("gpu", "gpu.missing", "hardware"),)


def in_scope(folder: Path, work: Callable[[ClusterScope], Awaitable[Any]]) -> Any:
    """Do something with the records in that state directory, as any other process may."""

    async def whole() -> Any:
        scope = of_cluster(str(folder), "")
        assert scope is not None
        try:
            return await work(scope)
        finally:
            await scope.close()

    return asyncio.run(whole())


def taint(folder: Path, node: str, kind: str = MANUAL, for_s: float = 0.0) -> None:
    made = NodeTaint("new cables", kind, time.time(), "ops", time.time() + for_s if for_s else 0.0)
    in_scope(folder, lambda scope: scope.change(node, lambda record: node_records.with_taint(record, made)))


def untaint(folder: Path, node: str) -> None:
    in_scope(folder, lambda scope: scope.change(node, node_records.without_taints))


def record(folder: Path, node: str) -> NodeRecord:
    found: NodeRecord = in_scope(folder, lambda scope: scope.record(node))
    return found


def kept(folder: Path, **how: Any) -> NodesConfig:
    return NodesConfig(state_dir=str(folder), **how)


def answer(joining: Agent) -> Joined | Refused:
    return joining.wait(object, lambda item: isinstance(item, (Joined, Refused)))  # type: ignore[return-value]


def refusal(joining: Agent) -> str:
    answered = answer(joining)
    assert isinstance(answered, Refused), "it was let in"
    return answered.reason


def find_broken(worker: Agent, *well: Agent) -> None:
    """Have this worker's bootcheck find a missing GPU, and the others' nothing."""
    for each in (worker, *well):
        each.join()
    for each in (worker, *well):
        each.obey(Action.READY)
    for each in well:
        each.obey(Action.BOOTCHECK)
    worker.wait(object, lambda item: getattr(item, "action", None) is Action.BOOTCHECK)
    worker.say(MessageType.FINISH, findings=BROKEN)
    worker.wait(Refused)


def test_a_tainted_node_is_refused_and_an_untaint_lets_it_in(
    hold: Hold, agent: MakeAgent, tmp_path: Path
) -> None:
    taint(tmp_path, "n1")
    plane = hold(nodes=kept(tmp_path))
    assert "node n1 is not to be used: new cables (says ops)" in refusal(agent(plane, "n1"))
    untaint(tmp_path, "n1")
    running = agent(plane, "n1")
    running.run()
    # Who runs goes on; it is the next start that is refused.
    taint(tmp_path, "n1")
    wait_for(lambda: plane.ask()["errorNodes"], "taint")
    assert plane.ask()["phase"] == "RunCommand"
    running.close()
    assert "n1 is not to be used" in refusal(agent(plane, "n1"))
    assert journal.replay(plane.journal()).ok


def test_a_taint_runs_out(hold: Hold, agent: MakeAgent, tmp_path: Path) -> None:
    plane = hold(nodes=kept(tmp_path))
    agent(plane, "other").join()
    for length_s in (2.0, 10.0):  # on a slow machine the first may be over before anybody has asked
        until_s = time.time() + length_s
        taint(tmp_path, "n1", for_s=length_s)
        early = answer(agent(plane, "n1"))
        if time.time() < until_s:
            break
    assert isinstance(early, Refused) and "n1 is not to be used" in early.reason
    wait_for(lambda: not plane.ask()["errorNodes"], "end of the taint")
    assert time.time() >= until_s
    assert isinstance(answer(agent(plane, "n1")), Joined)
    assert journal.replay(plane.journal()).ok


def test_what_one_job_finds_out_keeps_the_node_from_others_and_from_its_scheduler(
    hold: Hold, agent: MakeAgent, tmp_path: Path
) -> None:
    listed = tmp_path / "isolated"
    plane = hold(nodes=kept(tmp_path, taint_s=1000.0, isolation=f"file:{listed}"))
    find_broken(agent(plane, "n1"))
    wait_for(lambda: record(tmp_path, "n1").isolated, "isolation")
    found = record(tmp_path, "n1")
    (stands,) = found.taints
    assert (stands.reason, stands.kind, stands.job) == ("gpu.missing", HARDWARE, "team/job/1")
    assert stands.until == pytest.approx(stands.time + 1000.0)
    assert listed.read_text().startswith("n1 # aegis: ")
    (node,) = plane.ask()["errorNodes"]
    assert (node["nodeName"], node["kind"], node["job"]) == ("n1", HARDWARE, "job")
    other = hold("other", nodes=kept(tmp_path))
    assert "node n1 is not to be used: gpu.missing (says team/job/1)" in refusal(agent(other, "n1"))
    # Once an operator says so it is everybody's again.
    untaint(tmp_path, "n1")
    wait_for(lambda: listed.read_text() == "", "end of the isolation")
    agent(other, "n1").run()
    notes = [line.event.code for line in plane.journal() if isinstance(line.event, Noted)]
    assert notes == ["isolation.done", "isolation.released"]
    assert journal.replay(plane.journal()).ok


@pytest.mark.full
def test_a_scheduler_that_says_no_is_not_asked_again_by_every_knock(
    hold: Hold, agent: MakeAgent, tmp_path: Path
) -> None:
    plane = hold(nodes=kept(tmp_path, isolation="command:false {node}"))
    find_broken(agent(plane, "n1"))

    def notes() -> list[tuple[str, str]]:
        return [(e.event.code, e.event.detail) for e in plane.journal() if isinstance(e.event, Noted)]

    wait_for(notes, "a failed call")
    for _ in range(3):
        assert "n1 is not to be used" in refusal(agent(plane, "n1"))
    failed = [detail for code, detail in notes() if code == "isolation.failed"]
    assert failed == ["false did not isolate n1: exit code 1"]
    assert record(tmp_path, "n1").isolated is None


def test_a_broken_node_whose_time_is_over_is_on_probation(
    hold: Hold, agent: MakeAgent, tmp_path: Path
) -> None:
    taint(tmp_path, "n1", HARDWARE, for_s=0.001)
    plane = hold(nodes=kept(tmp_path))
    assert "on probation after new cables" in refusal(agent(plane, "n1"))
    now = time.time()
    in_scope(
        tmp_path,
        lambda scope: scope.change("n1", lambda r: node_records.after_probation(r, now, "", "trial", 0.0)),
    )
    agent(plane, "n1").run()


@pytest.mark.full
def test_a_store_that_is_away_stops_no_training_and_is_caught_up_with(
    hold: Hold, agent: MakeAgent, tmp_path: Path
) -> None:
    state = tmp_path / "shared"
    state.mkdir()
    (state / "cluster").touch()  # where a folder should be
    plane = hold(nodes=kept(state), spec={"worker_num": 2, "min_worker_num": 1, "last_call_s": 0.5})
    well = agent(plane, "well")
    find_broken(agent(plane, "n1"), well)
    log = Path(plane.config.directory) / "plane.log"
    assert "THE RECORDS OF NODES" in log.read_text()
    assert "n1 is not to be used: gpu.missing" in refusal(agent(plane, "n1"))
    # What it has found is not forgotten by a successor, either.
    os.kill(children(plane.pid)["master"], signal.SIGKILL)
    (state / "cluster").unlink()
    wait_for(lambda: (state / "cluster").is_dir() and record(state, "n1").taints, "record")
    found = record(state, "n1")
    assert [each.code for each in found.incidents] == ["gpu.missing"]
    assert node_records.judge(found, time.time()).standing is Standing.TAINTED
    well.obey(Action.BOOTCHECK)
    well.obey(Action.RUN)


def test_a_file_server_that_is_away_holds_one_thread_however_often_it_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "FILES_TIMEOUT_S", 0.1)
    folder = tmp_path / cluster.FOLDER
    folder.mkdir(0o700)

    async def try_it() -> None:
        scope = of_cluster(str(tmp_path), "")
        assert scope is not None
        before = threading.active_count()
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await scope.record("n1")
        assert threading.active_count() == before + 1
        await scope.close()

    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        asyncio.run(try_it())


def test_without_a_place_for_them_taints_end_with_the_job(hold: Hold, agent: MakeAgent) -> None:
    plane = hold()
    args = {"nodes": ["n1", "n2"], "reason": "new cables", "by": "me@here"}
    rows = plane.ask("taint", **args)
    assert [(row["nodeName"], row["standing"], row["job"]) for row in rows] == [
        ("n1", "tainted", "me@here"),
        ("n2", "tainted", "me@here"),
    ]
    assert "new cables (says me@here)" in refusal(agent(plane, "n1"))
    plane.ask("untaint", nodes=["n1"])
    worker = agent(plane, "n1")
    worker.run()
    worker.say(MessageType.FINISH)
    wait_for(lambda: plane.ask()["phase"] == "Succeed", "end")
    assert {row["nodeName"]: row["standing"] for row in plane.ask("nodes")["nodes"]} == {
        "n1": "free",
        "n2": "tainted",
    }
    worker.close()
    plane.close()
    again = hold()
    assert again.host.generation == 2
    wait_for(lambda: again.ask("nodes")["nodes"] == [], "a clean slate")
    agent(again, "n2").run()


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("taint", {"nodes": "n1", "reason": "x", "by": "me"}),
        ("taint", {"nodes": ["n1"]}),
        ("untaint", {"nodes": [1]}),
        ("taint", {"nodes": ["n1"], "reason": "x", "by": "me", "isolate": True}),
    ],
)
def test_what_a_master_cannot_understand_it_refuses(
    shared_plane: Held, op: str, args: dict[str, Any]
) -> None:
    with pytest.raises(
        AdminRefused, match=f"cannot {op}: (cannot understand|this job has no isolation driver)"
    ):
        shared_plane.ask(op, **args)
    assert shared_plane.ask("nodes")["nodes"] == []


@pytest.mark.full
def test_the_records_may_be_in_etcd(
    hold: Hold, agent: MakeAgent, tmp_path: Path, unmet: Callable[[str], None]
) -> None:
    why = missing("etcd")
    if why is not None:
        unmet(why)

    def jobs(url: str) -> None:
        plane = hold(nodes=NodesConfig(store=url))
        find_broken(agent(plane, "n1"))
        other = hold("other", nodes=NodesConfig(store=url))
        wait_for(lambda: other.ask("nodes")["nodes"], "record")
        assert "gpu.missing (says team/job/1)" in refusal(agent(other, "n1"))
        other.ask("untaint", nodes=["n1"])
        agent(other, "n1").run()

    async def whole() -> None:
        async with running("etcd", tmp_path) as server:
            await asyncio.to_thread(jobs, f"etcd://127.0.0.1:{server.port}")  # type: ignore[attr-defined]

    asyncio.run(whole())


def test_waiting_spares_stand_in_line_by_what_their_nodes_have_done(
    hold: Hold, agent: MakeAgent, tmp_path: Path
) -> None:
    lemon = Incident("gpu.missing", HARDWARE, time.time(), "team/old/1")
    noisy = Incident("memory.leak", ANOMALY, time.time(), "team/old/1")
    for node, incident in {"lemon": lemon, "noisy": noisy}.items():
        noted = functools.partial(node_records.with_incident, incident=incident)
        in_scope(tmp_path, lambda scope, n=node, edit=noted: scope.change(n, edit))  # type: ignore[misc]
    plane = hold(nodes=kept(tmp_path))
    first = agent(plane, "first")
    first.run()
    for name in ("lemon", "noisy", "clean"):
        agent(plane, name).join()
    wait_for(lambda: len(plane.ask()["plane"]["spares"]) == 3, "three spares")
    assert plane.ask()["plane"]["spares"] == ["clean", "noisy", "lemon"]
    risks = {each.event.worker: each.event.risk for each in plane.journal() if isinstance(each.event, Join)}
    assert risks["clean"] == 0 < risks["noisy"] < 0.1 < risks["lemon"]
    first.close()
    wait_for(lambda: plane.ask()["workers"][0]["name"] == "clean", "the clean one to step in")


class Shaky(ClusterScope):
    """A scope that has faults nobody thought of: the watch breaks twice, and one record can't be written."""

    def __init__(self, store: Store) -> None:
        async def have() -> Store:
            return store

        super().__init__(have, "here", shared=True)
        self.tries = 0

    async def watch(self) -> Watch:
        self.tries += 1
        if self.tries < 3:
            raise ZeroDivisionError("nobody thought of this")
        return await super().watch()

    async def changed(self, node_name: str, edit: Edit) -> VersionedRecord:
        if node_name == "cursed":
            raise RecursionError("nor of this")
        return await super().changed(node_name, edit)


def test_a_fault_that_nobody_thought_of_ends_neither_the_following_nor_the_writing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "RETRY_S", 0.01)

    async def story() -> None:
        store = MemoryStore(MemoryBackend())
        scope, on_report = Shaky(store), asyncio.Event()

        def feed(event: Event) -> None:
            if isinstance(event, Taint) and event.node_name == "n2":
                on_report.set()

        controller = nodes.NodeController(scope, JobSpec("job", "team", 2, 2, 0), feed)
        status = create(JobSpec("job", "team", 2, 2, 0), time.time())
        controller.on_transitions(status, ())
        names = ("cursed", "n1")
        found = tuple(ErrorNode(name, "gpu.missing", "hardware", time.time(), "job") for name in names)
        condemned = tuple(RecordErrorNode(1, each.node_name, each.reason, each.kind) for each in found)
        status = msgspec.structs.replace(status, error_nodes=found)
        controller.on_transitions(
            status, [Applied(Reconcile(), Transition(status, condemned, "must leave", "leave"))]
        )
        await asyncio.wait_for(controller._writes.join(), 10)
        assert set(await scope.records()) == {"n1"}, "one that can't be written is in nobody's way"
        taint = NodeTaint("new cables", MANUAL, time.time(), "ops", 0.0)
        await scope.changed("n2", lambda record: node_records.with_taint(record, taint))
        await asyncio.wait_for(on_report.wait(), 10)
        assert controller._effective_record("cursed").taints, "this job goes by what it found, written or not"
        await controller.close()

    asyncio.run(story())
    said = [record.getMessage() for record in caplog.records]
    assert sum("THE RECORDS OF NODES are not followed" in each for each in said) == 2
    assert any("THE RECORD OF NODE cursed is not written" in each for each in said)
