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


class Receiver:
    """Collects the texts of the messages that it receives, and waits for one."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self._arrived = asyncio.Condition()

    async def __call__(self, message: Message) -> None:
        async with self._arrived:
            self.received.append(message.data.decode())
            self._arrived.notify_all()

    async def wait_received(self, text: str, timeout_s: float = 15) -> None:
        async with self._arrived:
            await asyncio.wait_for(self._arrived.wait_for(lambda: text in self.received), timeout_s)

    async def on(self, bus: BusConnection, subject: str) -> "Receiver":
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
        orders = await Receiver().on(worker, ORDERS)
        reports = await Receiver().on(master, REPORT)
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
            await orders.wait_received(f"order {life}")
            # The worker may have been quicker than the master: state is repeated, as a heartbeat does.
            await worker.publish(REPORT, b"newest %d" % life)
            await reports.wait_received(f"newest {life}")
            await later.unsubscribe()
        assert "stale" not in reports.received

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
        await asyncio.wait_for(worker._client.ping(), 5)  # type: ignore[union-attr]
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
        before = bus._client
        await asyncio.sleep(2.5)  # two pings and more
        assert bus._client is before
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
        orders, reports = await Receiver().on(worker, ORDERS), await Receiver().on(master, REPORT)
        publishing = True

        async def publish_numbers(bus: BusConnection, subject: str) -> int:
            sent = 0
            while publishing:
                await bus.publish(subject, b"%d" % sent)
                sent += 1
                await asyncio.sleep(0.001)
            return sent

        publishers = [
            asyncio.create_task(publish_numbers(worker, REPORT)),
            asyncio.create_task(publish_numbers(master, ORDERS)),
        ]
        for _ in range(5):
            before = worker._client
            await worker.renew(jwt())
            assert worker._client is not before
            await asyncio.sleep(0.05)
        publishing = False
        sent_reports, sent_orders = [await task for task in publishers]
        await reports.wait_received(str(sent_reports - 1))
        await orders.wait_received(str(sent_orders - 1))
        assert {int(text) for text in reports.received} == set(range(sent_reports))
        assert [int(text) for text in reports.received] == sorted(int(text) for text in reports.received)
        assert {int(text) for text in orders.received} == set(range(sent_orders))
        assert alarms == []

    with_plane(scenario)


def test_a_refused_renewal_keeps_the_old_jwt_in_force(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        credentials = plane.worker("w")
        worker = await plane.connect(credentials)
        foreign_jwt = worker_jwt(
            PlaneKeys.generate(), credentials.key.public, ns="team", job="a", worker="w", expires_s=60
        )
        with pytest.raises(BusRefused):
            await worker.renew(foreign_jwt)
        assert worker.connected
        assert worker._credentials == credentials

    with_plane(scenario)


def test_an_expired_connection_is_reported_and_comes_back_with_a_new_jwt(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        refused, down = asyncio.Event(), asyncio.Event()
        credentials = plane.worker("w", expires_s=0.1)
        worker = await plane.connect(
            credentials, on_disconnect=lambda why: down.set(), on_refused=lambda why: refused.set()
        )
        orders = await Receiver().on(worker, ORDERS)
        await asyncio.wait_for(down.wait(), 5)
        await asyncio.wait_for(refused.wait(), 5)
        await worker.renew(
            worker_jwt(plane.keys, credentials.key.public, ns="team", job="a", worker="w", expires_s=60)
        )
        await worker.wait_connected(5)
        master = await plane.connect(plane.master())
        await master.publish(ORDERS, b"welcome")
        await orders.wait_received("welcome")

    with_plane(scenario)


def test_a_request_ends_when_the_server_dies(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        master = await plane.connect(plane.master())
        worker = await plane.connect(plane.worker("w"))
        requested = asyncio.Event()
        await master.subscribe(REPORT, lambda message: requested.set())
        request = asyncio.create_task(worker.request(REPORT, b"?", 30))
        await requested.wait()
        await plane.server.kill()
        with pytest.raises(BusUnavailable, match="cannot get an answer"):
            await asyncio.wait_for(request, 5)
        with pytest.raises(BusUnavailable, match="not connected for"):
            await worker.request(REPORT, b"?", 0.1)

    with_plane(scenario)


def test_a_request_that_nobody_listens_to_fails_at_once(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        worker = await plane.connect(plane.worker("w"))
        with pytest.raises(BusUnavailable, match="nobody listens"):
            await worker.request(REPORT, b"?", 5)

    with_plane(scenario)


def test_a_callback_that_fails_or_is_slow_disturbs_no_other(
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
        received: list[bytes] = []
        done = asyncio.Event()

        async def once(message: Message) -> None:
            received.append(message.data)
            await subscription.unsubscribe()
            done.set()

        subscription = await bus.subscribe("x", once)
        for n in range(3):
            await bus.publish("x", b"%d" % n)
        await done.wait()
        await bus._client.ping()  # type: ignore[union-attr]
        assert received == [b"0"]

    with_plane(scenario)


def test_a_server_that_is_not_there_is_reported_in_time(with_plane: PlaneTest) -> None:
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


def test_use_after_close_and_bad_use_raise(with_plane: PlaneTest) -> None:
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


def test_a_thousand_failures_at_once_disconnect_nobody(with_plane: PlaneTest) -> None:
    """The master may be busy deciding when the reports of a crash come in, each with the output of eight
    ranks.
    """

    def report_failures(plane: Plane, workers: list[Credentials]) -> None:
        async def all_report() -> None:
            connect = BusConnection.connect
            buses = [
                await connect([plane.server.url], credentials, name=f"u{n}", ca_pem=plane.pem)
                for n, credentials in enumerate(workers)
            ]
            for _ in range(100):
                for n, bus in enumerate(buses):
                    await bus.publish(subjects.report("team", "a", f"w{n}"), b"x" * 100_000)
            for bus in buses:
                await bus.close()

        asyncio.run(all_report())

    async def scenario(plane: Plane) -> None:
        lost: list[str] = []
        received: list[str] = []
        master = await plane.connect(plane.master(), on_disconnect=lost.append)
        await master.subscribe("aegis.team.a.report.*", lambda message: received.append(message.subject))
        reporting = asyncio.create_task(
            asyncio.to_thread(report_failures, plane, [plane.worker(f"w{n}") for n in range(10)])
        )
        while not received:  # noqa: ASYNC110 - the callback can't wake this task
            await asyncio.sleep(0.01)
        time.sleep(1.0)  # noqa: ASYNC251 - the master is busy
        await reporting
        while len(received) < 1000 and not lost:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (lost, len(received)) == ([], 1000)

    with_plane(scenario)
