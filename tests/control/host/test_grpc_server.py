"""Who is let in at first contact, who isn't, and what is told to whom: against a running plane."""

from __future__ import annotations

import grpc
import msgspec
import pytest

from aegis_elastic.bus import tls
from aegis_elastic.bus.contact import first_contact
from aegis_elastic.bus.contact.first_contact import ContactError, Dismissed
from aegis_elastic.bus.credentials import NKey
from aegis_elastic.control.host.errors import AdminUnreachable
from aegis_elastic.control.host.grpc_server import ADMIN_METHOD
from aegis_elastic.launch.ctl import admin_client
from tests.control.conftest import Hold, MakeAgent
from tests.control.planes import Held, hello, meet, wait_for

SECRET = b"the right secret"


def workers(plane: Held) -> list[str]:
    view = plane.ask()
    return [*(str(worker["name"]) for worker in view["workers"]), *view["plane"]["spares"]]


def test_the_secret_on_both_sides_proves_both(hold: Hold) -> None:
    plane = hold(secret=SECRET.decode())
    place = meet(plane, "a", NKey.generate(), SECRET)
    assert place.proven
    assert place.certificate_pem == (plane.config.path / "plane.crt").read_text()
    assert workers(plane) == ["a"]


def test_without_a_secret_the_first_contact_is_trusted_but_not_called_proven(hold: Hold) -> None:
    plane = hold()
    assert not meet(plane, "a", NKey.generate()).proven
    assert workers(plane) == ["a"]


@pytest.mark.parametrize(
    ("planes", "ours", "says"),
    [
        ("the right secret", b"another secret", "it asks for a join secret, and ours is another one"),
        ("the right secret", None, "it asks for a join secret, and we have none"),
        ("", b"the right secret", "this worker has a join secret and the control plane has none"),
    ],
)
def test_whoever_has_another_secret_is_told_and_gets_no_seat(
    hold: Hold, planes: str, ours: bytes | None, says: str
) -> None:
    plane = hold(secret=planes)
    with pytest.raises(ContactError, match=says) as caught:
        meet(plane, "a", NKey.generate(), ours)
    assert not caught.value.retry
    assert planes == "" or planes not in str(caught.value)
    assert workers(plane) == []


def test_an_introduction_that_was_changed_on_the_way_proves_nothing(hold: Hold) -> None:
    plane = hold(secret=SECRET.decode())
    fingerprint = tls.fingerprint((plane.config.path / "plane.crt").read_text())

    honest = hello(plane, "a", NKey.generate())
    proof = first_contact.hello_proof(SECRET, fingerprint, honest)
    stolen = msgspec.structs.replace(honest, user_public_key=NKey.generate().public, proof=proof)
    assert call(plane, first_contact.METHOD, msgspec.json.encode(stolen)) is grpc.StatusCode.UNAUTHENTICATED
    assert workers(plane) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"job": "another"}, "serves job 'job' of namespace 'team'"),
        ({"namespace": "others"}, "serves job 'job' of namespace 'team'"),
        ({"schema": first_contact.SCHEMA + 1}, "newer than the control plane"),
        ({"user_public_key": "not a key"}, "public half"),
        ({"worker": ""}, "worker, uid and nproc >= 1 are needed"),
    ],
)
def test_an_introduction_that_makes_no_sense_here_is_refused(
    shared_plane: Held, changes: dict[str, str], says: str
) -> None:
    with pytest.raises(ContactError, match=says) as caught:
        meet(shared_plane, **{"worker": "a", **changes}, key=NKey.generate())  # type: ignore[arg-type]
    assert not caught.value.retry
    assert workers(shared_plane) == []


def test_one_worker_s_name_belongs_to_one_living_agent(hold: Hold, agent: MakeAgent) -> None:
    plane = hold()
    first = agent(plane, "a")
    first.run()
    with pytest.raises(ContactError, match="a"):
        meet(plane, "a", NKey.generate())
    assert plane.ask()["phase"] == "RunCommand"
    assert first.link.connected


def test_a_job_that_has_ended_sends_newcomers_away(hold: Hold, agent: MakeAgent) -> None:
    plane = hold()
    agent(plane, "a").run()
    plane.ask("quit", reason="enough")
    wait_for(lambda: plane.ask()["phase"] == "Failed", "the job's end")
    with pytest.raises(Dismissed, match="Failed"):
        meet(plane, "b", NKey.generate())


@pytest.mark.parametrize("payload", [b"", b"{}", b"\xff\x00", b"[]", b'{"namespace": 3}', b"{" * 5000])
@pytest.mark.parametrize("method", [first_contact.METHOD, ADMIN_METHOD])
def test_malformed_calls_are_refused_and_nothing_breaks(
    shared_plane: Held, method: str, payload: bytes
) -> None:
    assert call(shared_plane, method, payload) is grpc.StatusCode.INVALID_ARGUMENT
    assert workers(shared_plane) == []


def test_the_admin_call_needs_the_token_and_the_certificate(hold: Hold) -> None:
    plane = hold()
    found = admin_client.load(plane.host.run_dir)
    assert found is not None
    with pytest.raises(AdminUnreachable, match="wrong admin credentials"):
        admin_client.call(msgspec.structs.replace(found, token="0" * 32), "status")
    another = hold("another")
    theirs = admin_client.load(another.host.run_dir)
    assert theirs is not None
    with pytest.raises(AdminUnreachable):
        admin_client.call(msgspec.structs.replace(found, cert_pem=theirs.cert_pem), "status")


def call(plane: Held, method: str, payload: bytes) -> grpc.StatusCode:
    """The code with which these bytes are refused."""
    pem = (plane.config.path / "plane.crt").read_bytes()
    options = [("grpc.ssl_target_name_override", first_contact.SERVER_NAME)]
    where = f"127.0.0.1:{plane.host.port}"
    with grpc.secure_channel(where, grpc.ssl_channel_credentials(pem), options) as channel:
        try:
            channel.unary_unary(method)(payload, timeout=10)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK
