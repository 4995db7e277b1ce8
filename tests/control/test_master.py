"""One job led by a real master over a real bus: agents here are links that say what an agent would say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import nats.errors
import pytest

from aegis_elastic.agents.mailbox.events import BusChanged, FinalReportArrived, Refused
from aegis_elastic.bus import credentials, subjects
from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.bus.contact.first_contact import Place
from aegis_elastic.bus.credentials import NKey
from aegis_elastic.bus.errors import BusRefused, BusUnavailable
from aegis_elastic.core.accounts import journal
from aegis_elastic.core.model import Failure
from aegis_elastic.core.protocol import messages
from aegis_elastic.core.protocol.messages import IndependentEnd, MessageType
from aegis_elastic.core.protocol.orders import Action, Order
from tests.control.conftest import Hold, MakeAgent
from tests.control.planes import Agent, Held, children, ended, meet, on_the_bus, violated, wait_for

KILLED = Failure(rank=0, local_rank=0, time=1.0, signal="SIGKILL")


def both_run(agents: tuple[Agent, Agent]) -> None:
    for one in agents:
        one.join()
    for action in (Action.READY, Action.BOOTCHECK, Action.RUN):
        for one in agents:
            one.obey(action)


def fail(one: Agent) -> None:
    one.say(MessageType.ERROR, failures=(KILLED,), reason="rank 0 ended with signal SIGKILL")


def test_a_job_from_its_first_worker_to_its_report(hold: Hold, agent: MakeAgent) -> None:
    plane = hold(spec={"worker_num": 2, "min_worker_num": 2})
    one, two = agents = (agent(plane, "one"), agent(plane, "two"))
    both_run(agents)
    fail(two)
    for worker in agents:
        worker.obey(Action.TROUBLESHOOT)
    orders = [worker.obey(Action.RUN) for worker in agents]
    assert [(order.incarnation, order.restart_count) for order in orders] == [(2, 1), (2, 1)]
    assert plane.ask()["recoverCount"] == 1
    for worker in agents:
        worker.say(MessageType.FINISH)
    report = one.wait(FinalReportArrived).report
    assert (report.phase, report.recover_count) == ("Succeed", 1)
    assert two.wait(Order, lambda order: order.action is Action.CLOSE).outcome == "Succeed"
    assert journal.replay(plane.journal()).ok


def test_a_master_that_is_killed_leaves_nothing_uncounted_and_counts_nothing_twice(
    hold: Hold, agent: MakeAgent
) -> None:
    plane = hold()
    worker = agent(plane, "a")
    worker.run()
    old = children(plane.pid)["master"]
    os.kill(old, signal.SIGKILL)
    fail(worker)  # nobody hears it now; it is said again with every heartbeat
    worker.obey(Action.TROUBLESHOOT)
    assert worker.obey(Action.RUN).incarnation == 2
    again = children(plane.pid)["master"]
    assert again != old
    os.kill(again, signal.SIGKILL)
    wait_for(lambda: children(plane.pid).get("master", again) != again, "a new master")
    view = wait_for(lambda: answer(plane), "an answer")
    assert (view["recoverCount"], view["incarnation"], view["phase"]) == (1, 2, "RunCommand")
    assert journal.replay(plane.journal()).ok


def answer(plane: Held) -> dict[str, object]:
    try:
        view: dict[str, object] = plane.ask()
    except Exception:  # noqa: BLE001 - whatever it is, there is no answer yet
        return {}
    return view


def test_a_failure_while_it_was_away_is_merged_once_whoever_tells_it_how_often(
    hold: Hold, agent: MakeAgent
) -> None:
    plane = hold(spec={"worker_num": 2, "min_worker_num": 2})
    agents = (agent(plane, "one"), agent(plane, "two"))
    both_run(agents)
    end = IndependentEnd("two", 1, "rank 1 ended with signal SIGKILL", (KILLED,))
    for _ in range(2):
        for worker in agents:
            worker.say(MessageType.ACK, state="running", started=True, independent=(end,))
    orders = [worker.wait(Order, lambda order: order.incarnation == 2) for worker in agents]
    assert {order.action for order in orders} == {Action.RUN}
    for worker in agents:
        worker.say(MessageType.ACK, state="running", independent=(end,))
    assert plane.ask()["recoverCount"] == 1
    assert [line.transition for line in plane.journal()].count("merged") == 1


def test_a_jwt_is_renewed_before_it_runs_out_and_nobody_notices(hold: Hold, agent: MakeAgent) -> None:
    plane = hold(jwt_life_s=3.0)
    worker = agent(plane, "a")
    worker.run()
    first = expiry(worker)
    wait_for(lambda: time.time() > first + 2.0, "the end of the first JWT's life")
    assert expiry(worker) > first
    assert worker.link.connected
    assert undisturbed(worker)
    assert plane.ask()["phase"] == "RunCommand"
    assert not any(line.transition == "gone" for line in plane.journal())


def test_a_restarted_master_knows_no_jwt_and_the_worker_asks_for_its_own_renewal(
    hold: Hold, agent: MakeAgent
) -> None:
    plane = hold(jwt_life_s=5.0)
    worker = agent(plane, "a")
    worker.run()
    first = expiry(worker)
    os.kill(children(plane.pid)["master"], signal.SIGKILL)
    wait_for(lambda: expiry(worker) > first and time.time() > first + 0.5, "a renewal")
    assert undisturbed(worker)
    assert plane.ask()["phase"] == "RunCommand"


def expiry(worker: Agent) -> float:
    bus = worker.link._bus
    assert bus is not None
    return credentials.expires_at_s(bus._credentials.jwt) or 0.0


def undisturbed(worker: Agent) -> bool:
    """Whether its connection was never lost, nor it refused."""
    items = [*worker.seen, *worker.mailbox.drain()]
    return not any(isinstance(item, (BusChanged, Refused)) for item in items)


def test_a_worker_s_credentials_reach_its_own_job_s_orders_and_its_own_report_and_nothing_else(
    hold: Hold, agent: MakeAgent
) -> None:
    """Credentials as first contact gives them, used by somebody with bad intentions."""
    plane, other = hold("a"), hold("b")
    honest = agent(plane, "honest")
    honest.run()
    victim = agent(other, "victim")
    victim.run()
    key = NKey.generate()
    place = meet(plane, "mallory", key)
    before = plane.ask()
    asyncio.run(try_everything(plane, place, key))
    assert plane.ask() == before
    assert other.ask()["phase"] == "RunCommand"
    # The keys of one plane are worth nothing at another one, even under the same names.
    with pytest.raises(BusRefused):
        asyncio.run(elsewhere(meet(other, "spy", key), place, key))


async def elsewhere(there: Place, ours: Place, key: NKey) -> None:
    """Use our plane's JWT at another plane's bus."""
    wrong = msgspec.structs.replace(there.welcome, jwt=ours.welcome.jwt)
    bus = await on_the_bus(msgspec.structs.replace(there, welcome=wrong), key, "spy", [])
    await bus.close()


async def try_everything(plane: Held, place: Place, key: NKey) -> None:
    violations: list[str] = []
    bus = await on_the_bus(place, key, "mallory", violations)
    try:
        await its_own_is_allowed(bus, violations)
        quit_order = messages.encode(order_of(plane))
        for subject in (
            subjects.order_all("team", "a"),  # as the master
            subjects.order("team", "a", "honest"),
            subjects.report("team", "a", "honest"),  # as another worker
            subjects.order_all("team", "b"),  # to another job
            subjects.report("team", "b", "victim"),
            "$JS.API.INFO",
            "$JS.API.STREAM.LIST",
            "$KV.aegis.job",
            "$SYS.REQ.SERVER.PING",
        ):
            await bus.publish(subject, quit_order)
            assert await violated(violations, subject), f"{subject} could be published on"
        for subject in (
            subjects.report("team", "a", "honest"),
            subjects.report_wildcard("team", "a"),
            subjects.order("team", "a", "honest"),
            subjects.order_all("team", "b"),
            subjects.report_wildcard("team", "b"),
            f"{subjects.inbox(NKey.generate().public)}.>",
            "$KV.>",
            "$JS.>",
            "$SYS.>",
            ">",
        ):
            await bus.subscribe(subject, lambda _: None)
            assert await violated(violations, subject), f"{subject} could be heard"
        with pytest.raises((BusUnavailable, nats.errors.Error)):
            await bus.call(lambda client: client.jetstream().account_info(), 1.0)
    finally:
        await bus.close()


async def its_own_is_allowed(bus: BusConnection, violations: list[str]) -> None:
    orders: asyncio.Queue[bytes] = asyncio.Queue()
    await bus.subscribe(subjects.order_all("team", "a"), lambda message: orders.put_nowait(message.data))
    await bus.subscribe(subjects.order("team", "a", "mallory"), lambda _: None)
    await bus.publish(subjects.report("team", "a", "mallory"), b"not a message")
    # Orders are repeated until everybody has acknowledged them, and mallory hasn't.
    order = messages.decode(await asyncio.wait_for(orders.get(), 10)).data
    assert isinstance(order, Order)
    assert violations == []


def order_of(plane: Held) -> messages.Message:
    """An order to close the job, as the master would send it."""
    forged = Order(
        seq_num=99, incarnation=1, action=Action.CLOSE, assignments=(), store="", checks=(), restart_count=0,
        recover_count=0, max_retry=0, outcome="Failed", reason="forged",
    )  # fmt: skip
    return messages.Message(
        aegis_name="a", aegis_namespace="team", worker="master", type=MessageType.ORDER,
        phase=messages.WirePhase.COMMAND, data=forged, time_stamp=1.0, seq_num=99, uid="", incarnation=1,
    )  # fmt: skip


def test_an_agent_that_has_ended_is_lost_within_moments_and_waited_for(hold: Hold, agent: MakeAgent) -> None:
    plane = hold(spec={"worker_num": 2, "min_worker_num": 2})
    one, two = agents = (agent(plane, "one"), agent(plane, "two"))
    both_run(agents)
    two.close()
    one.obey(Action.STOP)
    assert plane.ask()["recoverCount"] == 1
    back = agent(plane, "two")
    back.join()
    back.obey(Action.STOP)
    for name in (one, back):
        name.obey(Action.TROUBLESHOOT)
    assert {name.obey(Action.RUN).incarnation for name in (one, back)} == {2}
    assert {worker["name"]: worker["retries"] for worker in plane.ask()["workers"]} == {"one": 1, "two": 1}


def test_a_report_that_no_message_can_carry_keeps_no_job_from_its_end(hold: Hold, agent: MakeAgent) -> None:
    plane = hold()
    worker = agent(plane, "a")
    worker.run()
    loud = tuple(
        Failure(rank=rank, local_rank=rank, time=1.0, exit_code=1, last_lines=("x" * 9000,))
        for rank in range(60)
    )
    for _ in range(2):
        worker.say(MessageType.ERROR, failures=loud, reason="rank 0 ended with exit code 1")
        worker.obey(Action.TROUBLESHOOT)
        worker.obey(Action.RUN)
    worker.say(MessageType.FINISH)
    report = worker.wait(FinalReportArrived).report
    assert (report.phase, report.recover_count) == ("Succeed", 2) and "shortened" in report.summary
    assert worker.wait(Order, lambda order: order.action is Action.CLOSE).outcome == "Succeed"


def test_whoever_was_started_anew_joins_those_who_live_and_takes_nothing_from_them(
    hold: Hold, agent: MakeAgent
) -> None:
    plane = hold()
    worker = agent(plane, "a")
    worker.run()
    meet(plane, "of an allocation that was requeued", NKey.generate(), attempt=1)
    view = plane.ask()
    assert (view["phase"], view["incarnation"]) == ("RunCommand", 1)
    assert undisturbed(worker)
    worker.close()
    meet(plane, "a", NKey.generate(), attempt=1)
    assert [line.transition for line in plane.journal()].count("requeued") == 1


def test_a_job_that_waits_for_its_scheduler_misses_nobody_who_leaves(hold: Hold, agent: MakeAgent) -> None:
    three = {"worker_num": 3, "min_worker_num": 3}
    plane = hold(spec={**three, "requeue": True, "rejoin_timeout_s": 0.5})
    agents = [agent(plane, name) for name in ("one", "two", "three")]
    for one in agents:
        one.join()
    for action in (Action.READY, Action.BOOTCHECK, Action.RUN):
        for one in agents:
            one.obey(action)
    agents[2].close()
    for one in agents[:2]:
        assert one.wait(Order, lambda order: order.action is Action.CLOSE).outcome == "Requeue"
    told = len(plane.journal())
    agents[1].close()
    time.sleep(3.0)  # three times as long as it takes until somebody who leaves is missed
    assert len(plane.journal()) == told


def test_the_log_has_no_traceback_after_all_that(hold: Hold, agent: MakeAgent) -> None:
    plane = hold()
    agent(plane, "a").run()
    pid = plane.pid
    plane.host.close(wait=False)
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: ended(pid), "end of the plane")
    assert "Traceback" not in Path(plane.config.path / "plane.log").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_under_the_run_directory_ends_no_job(
    hold: Hold, agent: MakeAgent, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(small)], check=True)
    try:
        plane = hold(run_dir=str(small / "run"))
        worker = agent(plane, "a")
        worker.run()
        master = children(plane.pid)["master"]
        with contextlib.suppress(OSError), open(small / "others", "wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        for _ in range(2):
            fail(worker)
            worker.obey(Action.TROUBLESHOOT)
            worker.obey(Action.RUN)
        worker.say(MessageType.FINISH)
        assert worker.wait(FinalReportArrived).report.phase == "Succeed"
        assert worker.wait(Order, lambda order: order.action is Action.CLOSE).outcome == "Succeed"
        assert children(plane.pid)["master"] == master
    finally:
        plane.close()
        subprocess.run(["umount", "-l", str(small)], check=True)
