"""The connection outlives crashes and hangs of the server, and the expiry of its own JWT."""

import asyncio
import os
import signal
import time

import pytest

from aegis_elastic.bus import client, subjects
from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.bus.credentials import Credentials, NKey, PlaneKeys, worker_jwt
from aegis_elastic.bus.errors import BusClosed, BusRefused, BusUnavailable, BusUsage
from aegis_elastic.bus.subscription import Message
from tests.bus.plane import Plane, PlaneTest

ORDERS, REPORT = subjects.order_all("team", "a"), subjects.report("team", "a", "w")


class Ear:
    """Counts how often each text was heard, and waits for one."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._news = asyncio.Condition()

    async def __call__(self, message: Message) -> None:
        async with self._news:
            self.heard.append(message.data.decode())
            self._news.notify_all()

    async def wait_heard(self, text: str, timeout_s: float = 15) -> None:
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(lambda: text in self.heard), timeout_s)

    async def on(self, bus: BusConnection, subject: str) -> "Ear":
        await bus.subscribe(subject, self.__call__)
        return self


def test_subscriptions_work_again_after_the_server_was_killed(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        events: asyncio.Queue[str] = asyncio.Queue()
        worker = await plane.connect(
            plane.worker("w"),
            on_disconnect=lambda why: events.put_nowait("down"),
            on_reconnect=lambda: events.put_nowait("up"),
        )
        master = await plane.connect(plane.master())
        orders = await Ear().on(worker, ORDERS)
        reports = await Ear().on(master, REPORT)
        for life in range(3):
            await plane.server.kill()
            assert await events.get() == "down"
            assert not worker.connected
            await worker.publish(REPORT, b"stale")
            await worker.publish(REPORT, b"newest %d" % life)
            later = await worker.subscribe(f"{ORDERS}", lambda message: None)
            await plane.server.start()
            assert await asyncio.wait_for(events.get(), 10) == "up"
            await master.wait_connected(10)
            await master.publish(ORDERS, b"order %d" % life)
            await orders.wait_heard(f"order {life}")
            # The worker may have been quicker than the master: state is repeated, as a heartbeat does.
            await worker.publish(REPORT, b"newest %d" % life)
            await reports.wait_heard(f"newest {life}")
            await later.unsubscribe()
        assert "stale" not in reports.heard

    with_plane(scenario)


def test_what_was_published_while_the_server_was_down_arrives(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        master = await plane.connect(plane.master())
        await master.call(lambda nc: nc.jetstream().add_stream(name="all", subjects=["aegis.>"]), 5)
        worker = await plane.connect(plane.worker("w"))
        await plane.server.kill()
        for n in range(500):
            await worker.publish(REPORT, b"%d" % n)
        await plane.server.start()
        await worker.wait_connected(10)
        await asyncio.wait_for(worker._link.ping(), 5)  # type: ignore[union-attr]
        last = await master.call(lambda nc: nc.jetstream().get_last_msg("all", REPORT), 10)
        assert last.data == b"499"

    with_plane(scenario)


def test_a_hung_server_is_noticed_and_its_return_too(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        down, up = asyncio.Event(), asyncio.Event()
        worker = await plane.connect(
            plane.worker("w"), on_disconnect=lambda why: down.set(), on_reconnect=up.set
        )
        pid = plane.server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            # More than the socket takes: nothing may wait for a peer that reads nothing.
            for n in range(40):
                await asyncio.wait_for(worker.publish(REPORT + str(n), b"x" * 1_000_000), 5)
            await asyncio.wait_for(down.wait(), 10)
            assert not worker.connected
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.wait_for(up.wait(), 15)

    with_plane(scenario, tls=True)  # where closing takes an answer of the peer, unless one is careful


def test_a_healthy_connection_is_left_alone(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        alarms: list[str] = []
        bus = await plane.connect(
            plane.worker("w"),
            on_disconnect=alarms.append,
            on_reconnect=lambda: alarms.append("up"),
            on_violation=alarms.append,
            on_refused=alarms.append,
        )
        before = bus._link
        await asyncio.sleep(2.5)  # two pings and more
        assert bus._link is before
        assert alarms == []

    with_plane(scenario)


def test_a_renewal_loses_nothing_in_either_direction(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        key = NKey.generate()

        def jwt() -> str:
            return worker_jwt(plane.keys, key.public, ns="team", job="a", worker="w", expires_s=60)

        alarms: list[str] = []
        worker = await plane.connect(Credentials(key, jwt()), on_disconnect=alarms.append)
        master = await plane.connect(plane.master())
        orders, reports = await Ear().on(worker, ORDERS), await Ear().on(master, REPORT)
        talking = True

        async def talk(bus: BusConnection, subject: str) -> int:
            said = 0
            while talking:
                await bus.publish(subject, b"%d" % said)
                said += 1
                await asyncio.sleep(0.001)
            return said

        talks = [asyncio.create_task(talk(worker, REPORT)), asyncio.create_task(talk(master, ORDERS))]
        for _ in range(5):
            before = worker._link
            await worker.renew(jwt())
            assert worker._link is not before
            await asyncio.sleep(0.05)
        talking = False
        said_reports, said_orders = [await task for task in talks]
        await reports.wait_heard(str(said_reports - 1))
        await orders.wait_heard(str(said_orders - 1))
        assert {int(text) for text in reports.heard} == set(range(said_reports))
        assert [int(text) for text in reports.heard] == sorted(int(text) for text in reports.heard)
        assert {int(text) for text in orders.heard} == set(range(said_orders))
        assert alarms == []

    with_plane(scenario)


def test_a_refused_renewal_keeps_the_old_jwt_in_force(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        who = plane.worker("w")
        worker = await plane.connect(who)
        stranger = worker_jwt(
            PlaneKeys.generate(), who.key.public, ns="team", job="a", worker="w", expires_s=60
        )
        with pytest.raises(BusRefused):
            await worker.renew(stranger)
        assert worker.connected
        assert worker._credentials == who

    with_plane(scenario)


def test_an_expired_connection_says_so_and_comes_back_with_a_new_jwt(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        refused, down = asyncio.Event(), asyncio.Event()
        who = plane.worker("w", expires_s=0.1)
        worker = await plane.connect(
            who, on_disconnect=lambda why: down.set(), on_refused=lambda why: refused.set()
        )
        orders = await Ear().on(worker, ORDERS)
        await asyncio.wait_for(down.wait(), 5)
        await asyncio.wait_for(refused.wait(), 5)
        await worker.renew(
            worker_jwt(plane.keys, who.key.public, ns="team", job="a", worker="w", expires_s=60)
        )
        await worker.wait_connected(5)
        master = await plane.connect(plane.master())
        await master.publish(ORDERS, b"welcome")
        await orders.wait_heard("welcome")

    with_plane(scenario)


def test_a_request_ends_when_the_server_dies(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        master = await plane.connect(plane.master())
        worker = await plane.connect(plane.worker("w"))
        asked = asyncio.Event()
        await master.subscribe(REPORT, lambda message: asked.set())
        request = asyncio.create_task(worker.request(REPORT, b"?", 30))
        await asked.wait()
        await plane.server.kill()
        with pytest.raises(BusUnavailable, match="cannot get an answer"):
            await asyncio.wait_for(request, 5)
        with pytest.raises(BusUnavailable, match="not connected for"):
            await worker.request(REPORT, b"?", 0.1)

    with_plane(scenario)


def test_nobody_there_is_an_answer_too(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        worker = await plane.connect(plane.worker("w"))
        with pytest.raises(BusUnavailable, match="nobody listens"):
            await worker.request(REPORT, b"?", 5)

    with_plane(scenario)


def test_a_callback_that_fails_or_dawdles_harms_nobody(
    with_plane: PlaneTest, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(plane: Plane) -> None:
        lost = asyncio.Event()
        worker = await plane.connect(plane.worker("w"), on_disconnect=lambda why: lost.set())
        master = await plane.connect(plane.master())
        finished: list[bytes] = []
        started, go = asyncio.Event(), asyncio.Event()

        async def slow(message: Message) -> None:
            if message.data == b"bad":
                raise RuntimeError("no good")
            started.set()
            await go.wait()
            finished.append(message.data)

        def plain(message: Message) -> None:
            raise RuntimeError("no good either")

        await worker.subscribe(ORDERS, slow)
        await worker.subscribe(ORDERS, plain)
        await master.publish(ORDERS, b"bad")
        await master.publish(ORDERS, b"good")
        await started.wait()
        await plane.server.kill()  # must not cut the callback short
        await lost.wait()
        await plane.server.start()
        await worker.wait_connected(10)
        go.set()
        await worker.close()
        assert set(finished) == {b"good"}, "perhaps twice: the master could not know that it had arrived"

    with_plane(scenario)
    assert "no good" in caplog.text
    assert "no good either" in caplog.text


def test_unsubscribe_from_inside_the_callback(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        bus = await plane.connect(plane.master())
        heard: list[bytes] = []
        done = asyncio.Event()

        async def once(message: Message) -> None:
            heard.append(message.data)
            await subscription.unsubscribe()
            done.set()

        subscription = await bus.subscribe("x", once)
        for n in range(3):
            await bus.publish("x", b"%d" % n)
        await done.wait()
        await bus._link.ping()  # type: ignore[union-attr]
        assert heard == [b"0"]

    with_plane(scenario)


def test_nobody_home_is_said_in_time(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        await plane.server.stop()
        start = time.monotonic()
        with pytest.raises(BusUnavailable, match=r"cannot connect to nats://127\.0\.0\.1"):
            await plane.connect(plane.master(), timeout_s=0.5)
        assert time.monotonic() - start < 5

    with_plane(scenario)


def test_any_of_several_servers_will_do(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        bus = await BusConnection.connect(
            ["nats://127.0.0.1:1", plane.server.url], plane.master(), name="me", timeout_s=5
        )
        assert bus.connected
        await bus.close()

    with_plane(scenario)


def test_use_after_close_and_bad_use_are_said(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        bus = await plane.connect(plane.master())
        with pytest.raises(BusUsage, match="without wildcards"):
            await bus.publish("a.*", b"")
        with pytest.raises(BusUsage, match="without wildcards"):
            await bus.publish("a b", b"")
        with pytest.raises(BusUsage, match="2000000 bytes"):
            await bus.publish("a", bytes(2_000_000))
        with pytest.raises(BusUsage, match="at least one URL"):
            await BusConnection.connect([], plane.master(), name="x")
        await bus.close()
        await bus.close()
        assert not bus.connected
        for use in (
            bus.publish("a", b""),
            bus.request("a", b"", 1),
            bus.subscribe("a", lambda message: None),
            bus.renew("x"),
            bus.wait_connected(1),
        ):
            with pytest.raises(BusClosed):
                await use

    with_plane(scenario)


def test_retries_begin_quickly_and_stay_bounded() -> None:
    waits = [[client.retry_s(attempt) for _ in range(50)] for attempt in range(40)]
    assert max(waits[0]) <= 0.1
    assert all(0.05 <= wait <= 2.0 for row in waits for wait in row)
    assert min(waits[39]) >= 1.0
    assert len(set(waits[39])) > 1, "without jitter thousands come back in step"


def test_close_ends_a_connection_that_is_just_reconnecting(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        for pause_s in (0, 0.001, 0.003, 0.01, 0.03):
            lost = asyncio.Event()
            bus = await plane.connect(plane.worker("w"), on_disconnect=lambda why, lost=lost: lost.set())
            await plane.server.kill()
            await plane.server.start()
            await lost.wait()
            await asyncio.sleep(pause_s)
            await asyncio.wait_for(bus.close(), 8)

    with_plane(scenario)


def test_names_as_long_as_names_may_be_connect(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        bus = await plane.connect(plane.worker("ü" * 120, job="é" * 240, ns="ö" * 60))
        assert bus.connected

    with_plane(scenario)


def test_a_thousand_failures_at_once_throw_nobody_off_the_bus(with_plane: PlaneTest) -> None:
    """The master may be busy deciding when the reports of a crash come in, each with the words of eight
    ranks.
    """

    def tell(plane: Plane, workers: list[Credentials]) -> None:
        async def all_tell() -> None:
            connect = BusConnection.connect
            buses = [
                await connect([plane.server.url], who, name=f"u{n}", ca_pem=plane.pem)
                for n, who in enumerate(workers)
            ]
            for _ in range(100):
                for n, bus in enumerate(buses):
                    await bus.publish(subjects.report("team", "a", f"w{n}"), b"x" * 100_000)
            for bus in buses:
                await bus.close()

        asyncio.run(all_tell())

    async def scenario(plane: Plane) -> None:
        lost: list[str] = []
        heard: list[str] = []
        master = await plane.connect(plane.master(), on_disconnect=lost.append)
        await master.subscribe("aegis.team.a.report.*", lambda message: heard.append(message.subject))
        telling = asyncio.create_task(
            asyncio.to_thread(tell, plane, [plane.worker(f"w{n}") for n in range(10)])
        )
        while not heard:  # noqa: ASYNC110 - a callback of the bus is no place to wake anybody
            await asyncio.sleep(0.01)
        time.sleep(1.0)  # noqa: ASYNC251 - it decides
        await telling
        while len(heard) < 1000 and not lost:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (lost, len(heard)) == ([], 1000)

    with_plane(scenario)
