"""Who may publish, as whom, and for how long: against the real server."""

import asyncio
import copy
import os
import pickle
import time
import traceback
from pathlib import Path

import pytest

from aegis_elastic.bus import credentials, subjects
from aegis_elastic.bus.connection import BusConnection
from aegis_elastic.bus.credentials import Credentials, CredentialsUnreadable, NKey, PlaneKeys
from aegis_elastic.bus.errors import BusRefused
from aegis_elastic.bus.subscription import Message
from tests.bus.plane import Plane, PlaneTest


async def receives(listener: BusConnection, subject: str) -> "asyncio.Queue[bytes]":
    received: asyncio.Queue[bytes] = asyncio.Queue()
    await listener.subscribe(subject, lambda message: received.put_nowait(message.data))
    return received


def tells(violations: list[str], subject: str) -> bool:
    """Whether one of the violations is about `subject`; nats-py gives the server's text in lower case."""
    return any(f'"{subject.lower()}"' in violation for violation in violations)


async def settle(*connections: BusConnection) -> None:
    """Return when all that these have sent has been handled, and what that caused has arrived."""
    for _ in range(2):
        for bus in connections:
            assert bus._client is not None
            await bus._client.ping()


def test_a_worker_hears_its_orders_and_reports_as_itself(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        violations: list[str] = []
        master = await plane.connect(plane.master())
        worker = await plane.connect(plane.worker("w.1"), on_violation=violations.append)
        everybody = await receives(worker, subjects.order_all("team", "a"))
        own = await receives(worker, subjects.order("team", "a", "w.1"))
        reports: asyncio.Queue[Message] = asyncio.Queue()
        await master.subscribe(subjects.report_wildcard("team", "a"), reports.put_nowait)
        await master.publish(subjects.order_all("team", "a"), b"stop")
        await master.publish(subjects.order("team", "a", "w.1"), b"leave")
        await worker.publish(subjects.report("team", "a", "w.1"), b"ready")
        assert await everybody.get() == b"stop"
        assert await own.get() == b"leave"
        report = await reports.get()
        assert (subjects.worker_of_report(report.subject), report.data) == ("w.1", b"ready")
        assert violations == []

    with_plane(scenario)


def test_a_worker_asks_the_master_and_gets_the_answer_in_its_own_inbox(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        master = await plane.connect(plane.master())
        worker = await plane.connect(plane.worker("w"))

        async def answer(message: Message) -> None:
            assert await master.respond(message, b"yes")

        await master.subscribe(subjects.report_wildcard("team", "a"), answer)
        assert (await worker.request(subjects.report("team", "a", "w"), b"may I?", 5)).data == b"yes"

    with_plane(scenario)


FORBIDDEN_TO_SAY = {
    "report of another job": subjects.report("team", "b", "w1"),
    "report as another worker": subjects.report("team", "a", "w2"),
    "order to all, as the master": subjects.order_all("team", "a"),
    "order to another worker": subjects.order("team", "a", "w2"),
    "order to itself": subjects.order("team", "a", "w1"),
    "order of another job": subjects.order_all("team", "b"),
    "report in another namespace": subjects.report("other", "a", "w1"),
    "JetStream": "$JS.API.INFO",
    "a key-value bucket": "$KV.job.status",
    "the server": "$SYS.REQ.SERVER.PING",
    "anything": "anything",
}


def test_a_worker_can_not_say_anything_else(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        violations: list[str] = []
        worker = await plane.connect(plane.worker("w1"), on_violation=violations.append)
        master = await plane.connect(plane.master())
        received = await receives(master, ">")
        for what, subject in FORBIDDEN_TO_SAY.items():
            violations.clear()
            await worker.publish(subject, what.encode())
            await settle(worker, master)
            assert tells(violations, subject), what
        inbox = subjects.inbox(master._credentials.key.public)
        await worker.publish(f"{inbox}.1", b"another's inbox")
        await settle(worker, master)
        assert received.empty(), received.get_nowait()
        await worker.publish(subjects.report("team", "a", "w1"), b"but this")
        assert await received.get() == b"but this"

    with_plane(scenario)


FORBIDDEN_TO_HEAR = {
    "reports of its own job": subjects.report_wildcard("team", "a"),
    "another worker's report": subjects.report("team", "a", "w1"),
    "orders to another worker": subjects.order("team", "a", "w2"),
    "orders of another job": subjects.order_all("team", "b"),
    "its namesake's orders in another job": subjects.order("team", "b", "w1"),
    "all orders": "aegis.team.a.order.*",
    "the whole job": "aegis.team.a.>",
    "all inboxes": "_INBOX.>",
    "everything": ">",
    "the server": "$SYS.>",
    "JetStream": "$JS.>",
    "key-value": "$KV.>",
}


def test_a_worker_can_not_hear_anything_else(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        violations: list[str] = []
        worker = await plane.connect(plane.worker("w1"), on_violation=violations.append)
        master = await plane.connect(plane.master())
        other = await plane.connect(plane.worker("w1", job="b"))
        queues = {}
        for what, subject in FORBIDDEN_TO_HEAR.items():
            violations.clear()
            queues[what] = await receives(worker, subject)
            await settle(worker)
            assert tells(violations, subject), what
        for subject in FORBIDDEN_TO_SAY.values():
            if not subject.startswith("$JS"):
                await master.publish(subject, b"secret")
        await other.publish(subjects.report("team", "b", "w1"), b"secret")
        await settle(master, other, worker)
        assert {what: queue.qsize() for what, queue in queues.items() if queue.qsize()} == {}

    with_plane(scenario)


def test_a_worker_has_no_rights_on_the_store(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        master = await plane.connect(plane.master())
        await master.call(lambda nc: nc.jetstream().create_key_value(bucket="job"), 5)
        violations: list[str] = []
        worker = await plane.connect(plane.worker("w"), on_violation=violations.append)
        with pytest.raises(Exception, match=r"(?i)no answer|timeout"):
            await worker.call(lambda nc: nc.jetstream(timeout=0.3).key_value("job"), 0.5)
        assert tells(violations, "$JS.API.STREAM.INFO.KV_job")

    with_plane(scenario)


def test_an_answer_never_goes_where_a_worker_may_not_publish(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        master = await plane.connect(plane.master())
        worker = await plane.connect(plane.worker("w"))
        victim = await receives(master, subjects.order_all("team", "b"))
        answered: asyncio.Queue[bool] = asyncio.Queue()

        async def answer(message: Message) -> None:
            answered.put_nowait(await master.respond(message, b"stop"))

        await master.subscribe(subjects.report_wildcard("team", "a"), answer)
        assert worker._client is not None
        await worker._client.nats.publish(
            subjects.report("team", "a", "w"), b"?", reply=subjects.order_all("team", "b")
        )
        assert await answered.get() is False
        await settle(master)
        assert victim.empty()

    with_plane(scenario)


def test_bad_credentials_are_refused_at_once(with_plane: PlaneTest, tmp_path: Path) -> None:
    async def scenario(plane: Plane) -> None:
        stranger = PlaneKeys.generate()
        key = NKey.generate()
        good = plane.worker("w")
        who = {"ns": "team", "job": "a", "worker": "w", "expires_s": 600.0}
        rogue = credentials.worker_jwt(stranger, key.public, **who)  # type: ignore[arg-type]
        head, _, signature = good.jwt.split(".")
        other_body = plane.master().jwt.split(".")[1]
        bad = {
            "another plane's": Credentials(key, rogue),
            "forged claims": Credentials(good.key, ".".join((head, other_body, signature))),
            "another's JWT": Credentials(key, good.jwt),
            "none": Credentials(key, ""),
            "junk": Credentials(key, "a.b.c"),
            "signed by the user itself": Credentials(
                key, credentials._sign(key, key.public, "w", {"type": "user", "version": 2}, None)
            ),
            "signed by the wrong account": Credentials(
                key,
                credentials._sign(stranger.account, key.public, "w", {"type": "user", "version": 2}, None),
            ),
        }
        for what, creds in bad.items():
            start = time.monotonic()
            with pytest.raises(BusRefused, match="cannot connect"):
                await plane.connect(creds, what)
            assert time.monotonic() - start < 3, what
        await plane.connect(good)

    with_plane(scenario)


def test_an_expired_jwt_is_refused(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        key = NKey.generate()
        claims = {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1}
        expired = credentials._sign(plane.keys.account, key.public, "w", claims, int(time.time()) - 1)
        with pytest.raises(BusRefused, match="cannot connect"):
            await plane.connect(Credentials(key, expired))

    with_plane(scenario)


def test_a_revoked_user_is_dropped_and_stays_out_even_after_a_restart(
    with_plane: PlaneTest, tmp_path: Path
) -> None:
    async def scenario(plane: Plane) -> None:
        lost: asyncio.Queue[str] = asyncio.Queue()
        refused: asyncio.Queue[str] = asyncio.Queue()
        bad, good = plane.worker("bad"), plane.worker("good")
        await plane.connect(bad, on_disconnect=lost.put_nowait, on_refused=refused.put_nowait)
        witness = await plane.connect(good)
        await plane.server.revoke(bad.key.public)
        assert "revoked" in (await lost.get()).lower()
        await refused.get()
        assert witness.connected
        plane.server.keys.save(tmp_path / "keys")
        await plane.server.kill()
        plane.server.keys = PlaneKeys.load(tmp_path / "keys")
        await plane.server.start()
        with pytest.raises(BusRefused):
            await plane.connect(bad)
        await witness.wait_connected(10)

    with_plane(scenario)


def test_private_halves_stay_inside() -> None:
    keys = PlaneKeys.generate()
    key = NKey.generate()
    seeds = [held._seed() for held in (keys.operator, keys.account, keys.system, key)]
    shown = repr(keys) + repr(key) + repr(Credentials(key, "a.jwt.here")) + str(key)
    assert not any(seed in shown for seed in seeds)
    assert "a.jwt.here" not in shown
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(key)
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(key)
    with pytest.raises(ValueError, match="damaged") as raised:
        NKey(seeds[0][:-1].encode())
    assert seeds[0][:-1] not in "".join(traceback.format_exception(raised.value))


def test_keys_are_kept_in_a_private_file_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = PlaneKeys.load_or_generate(path).revoking(NKey.generate().public, until_s=5)
    assert path.stat().st_mode & 0o777 == 0o600
    keys.save(path)
    again = PlaneKeys.load_or_generate(path)
    assert again.operator_jwt == keys.operator_jwt
    assert again.revocations == keys.revocations
    assert [k.public for k in (again.operator, again.account, again.system)] == [
        k.public for k in (keys.operator, keys.account, keys.system)
    ]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"{}", b"junk", b'{"format": 2}'])
def test_a_damaged_key_file_is_reported_without_its_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    credentials.write_private(path, content)
    with pytest.raises(CredentialsUnreadable, match="damaged"):
        PlaneKeys.load(path)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    PlaneKeys.load_or_generate(path)
    os.chmod(path, 0o640)
    with pytest.raises(CredentialsUnreadable, match="0640"):
        PlaneKeys.load(path)
    with pytest.raises(CredentialsUnreadable, match="No such file"):
        PlaneKeys.load(tmp_path / "absent")


def test_expiry_can_be_read_from_a_jwt() -> None:
    keys, key = PlaneKeys.generate(), NKey.generate()
    jwt = credentials.master_jwt(keys, key.public, expires_s=100)
    expiry = credentials.expires_at_s(jwt)
    assert expiry is not None
    assert 99 <= expiry - time.time() <= 102
    assert credentials.expires_at_s(keys.operator_jwt) is None
    with pytest.raises(ValueError, match="not a JWT"):
        credentials.expires_at_s("x")


@pytest.mark.parametrize("expires_s", [0, -1, float("nan")])
def test_a_jwt_that_is_born_expired_is_refused(expires_s: float) -> None:
    with pytest.raises(ValueError, match="positive number"):
        credentials.master_jwt(PlaneKeys.generate(), NKey.generate().public, expires_s=expires_s)
