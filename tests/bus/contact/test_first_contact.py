"""First contact against those who are no control plane of ours: what is an error for ever, what for now."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import msgspec
import pytest

from aegis_elastic.bus.contact import first_contact
from aegis_elastic.bus.contact.first_contact import ContactError, Dismissed, Hello, Welcome
from aegis_elastic.bus.credentials import NKey
from aegis_elastic.bus.tls import Certificate, make_certificate

SECRET = b"the right secret"
HELLO = Hello(
    namespace="team", job="job", worker="a", uid="1", node_name="n", node_ip="10.0.0.1", nproc=1, ordinal=-1,
    user_public_key=NKey.generate().public, nonce=first_contact.new_nonce(),
)  # fmt: skip
WELCOME = Welcome("jwt", 4222, 1, 0, 1, 3, 0)

Answer = Callable[[Hello, grpc.ServicerContext], Welcome]


class PlaneAddress(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """A plane's gRPC service with an answer of the test's."""

    def __init__(self, answer: Answer, method: str = first_contact.METHOD) -> None:
        self._answer, self._method = answer, method

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method != self._method:
            return None

        def call(payload: bytes, context: grpc.ServicerContext) -> bytes:
            return msgspec.json.encode(self._answer(msgspec.json.decode(payload, type=Hello), context))

        return grpc.unary_unary_rpc_method_handler(call)


@contextlib.contextmanager
def serving(certificate: Certificate, answer: Answer, method: str = first_contact.METHOD) -> Iterator[int]:
    """A TLS gRPC server on the loopback; gives its port."""
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((PlaneAddress(answer, method),))
    pair = (certificate.key_path.read_bytes(), certificate.pem.encode())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path, ["aegis", "127.0.0.1"])


def call(port: int, secret: bytes | None = None, timeout_s: float = 10.0) -> first_contact.Place:
    return first_contact.call("127.0.0.1", port, HELLO, secret, timeout_s)


def refused(port: int, secret: bytes | None = None, timeout_s: float = 10.0) -> ContactError:
    with pytest.raises(ContactError) as caught:
        call(port, secret, timeout_s)
    return caught.value


def refusing(code: grpc.StatusCode, why: str) -> Answer:
    def answer(_: Hello, context: grpc.ServicerContext) -> Welcome:
        context.abort(code, why)
        return WELCOME

    return answer


def test_a_place_and_the_certificate_that_it_is_pinned_to(certificate: Certificate) -> None:
    with serving(certificate, lambda *_: WELCOME) as port:
        place = call(port)
    assert (place.welcome, place.proven) == (WELCOME, False)
    assert place.certificate_pem.strip() == certificate.pem.strip()


def test_with_a_secret_each_side_proves_it_over_the_certificate(certificate: Certificate) -> None:
    seen: list[Hello] = []

    def answer(hello: Hello, _: grpc.ServicerContext) -> Welcome:
        seen.append(hello)
        proof = first_contact.welcome_proof(SECRET, certificate.fingerprint, hello, WELCOME)
        return msgspec.structs.replace(WELCOME, proof=proof)

    with serving(certificate, answer) as port:
        assert call(port, SECRET).proven
        error = refused(port, b"another secret")
    expected = first_contact.hello_proof(SECRET, certificate.fingerprint, HELLO)
    assert [hello.proof == expected for hello in seen] == [True, False]
    assert (error.retry, "could not prove" in str(error)) == (False, True)


def test_a_middleman_who_passes_everything_on_is_found_out(tmp_path: Path, certificate: Certificate) -> None:
    (tmp_path / "middle").mkdir()
    own = make_certificate(tmp_path / "middle", ["aegis"])

    def plane(hello: Hello, context: grpc.ServicerContext) -> Welcome:
        if not first_contact.proofs_equal(
            hello.proof, first_contact.hello_proof(SECRET, certificate.fingerprint, hello)
        ):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong")
        return WELCOME

    def middleman(hello: Hello, context: grpc.ServicerContext) -> Welcome:
        # Were the plane to believe it, the worker still would not: the proof is over another certificate.
        proof = first_contact.welcome_proof(SECRET, certificate.fingerprint, hello, WELCOME)
        return msgspec.structs.replace(WELCOME, proof=proof)

    with serving(own, middleman) as port:
        assert "could not prove" in str(refused(port, SECRET))
    with serving(certificate, plane) as port:
        stolen = msgspec.structs.replace(
            HELLO, proof=first_contact.hello_proof(SECRET, own.fingerprint, HELLO)
        )
        with pytest.raises(ContactError, match="asks for a join secret"):
            first_contact.call("127.0.0.1", port, stolen, None, 10.0)


def test_a_plane_that_proves_nothing_to_one_with_a_secret_is_not_joined(
    certificate: Certificate,
) -> None:
    with serving(certificate, lambda *_: WELCOME) as port:
        error = refused(port, SECRET)
    assert not error.retry
    assert "give every node the same secret, or none" in str(error)


@pytest.mark.parametrize(
    ("code", "text", "retry", "kind"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "it asks for a join secret, and we have none", False, ContactError),
        (grpc.StatusCode.PERMISSION_DENIED, "why", False, Dismissed),
        (grpc.StatusCode.FAILED_PRECONDITION, "why", False, ContactError),
        (grpc.StatusCode.UNAVAILABLE, "why", True, ContactError),
    ],
)
def test_each_refusal_in_words(
    certificate: Certificate, code: grpc.StatusCode, text: str, retry: bool, kind: type[ContactError]
) -> None:
    with serving(certificate, refusing(code, "why")) as port:
        error = refused(port)
    assert (type(error), error.retry) == (kind, retry)
    assert text in str(error)


def test_another_grpc_program_is_no_plane(certificate: Certificate) -> None:
    with serving(certificate, lambda *_: WELCOME, "/somebody.Else/Call") as port:
        error = refused(port)
    assert (error.retry, "another program answers there" in str(error)) == (False, True)


def test_nobody_there_yet_is_no_reason_to_give_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert refused(port).retry


def test_whoever_says_nothing_costs_the_timeout_and_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        error = refused(mute.getsockname()[1], timeout_s=0.3)
    assert error.retry


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 64])
def test_a_program_that_speaks_something_else_is_named_as_such(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(4096)
                client.sendall(greeting)

        thread = threading.Thread(target=serve)
        thread.start()
        error = refused(listener.getsockname()[1])
        thread.join()
    assert (error.retry, "another program answers there" in str(error)) == (False, True)


def test_tls_that_is_no_grpc_does_not_hang(certificate: Certificate) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert_path, certificate.key_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10.0)

        def serve() -> None:
            for _ in range(2):
                client, _ = listener.accept()
                with contextlib.suppress(OSError), context.wrap_socket(client, server_side=True) as tls:
                    tls.sendall(b"HTTP/1.1 404 Not Found\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        error = refused(listener.getsockname()[1], timeout_s=3.0)
        thread.join()
    assert str(error).startswith("cannot ")


def test_a_host_that_has_no_address_may_get_one() -> None:
    with pytest.raises(ContactError) as caught:
        first_contact.call("no-such-host.invalid", 1, HELLO, None, 1.0)
    assert caught.value.retry
