"""First contact: one gRPC call by which a worker that knows only `host:port` gets its credentials for the
bus.

The plane's certificate is self-signed, and is not distributed beforehand. The worker accepts the certificate
that it is shown, and both sides prove knowledge of the join secret *over that certificate*: a man in the
middle, who has to show another one, can produce neither proof. Without a secret the first certificate is
trusted (trust on first use), of which the caller warns.

The worker generates its NKey; only the public half is in `Hello`, so the key can't be stolen on the way. gRPC
is used without protobuf: messages are msgspec structs in JSON, so nothing can clash with the protobuf of a
training image.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl

import grpc
import msgspec

from aegis_elastic.bus import tls
from aegis_elastic.bus.contact import munge

METHOD = "/aegis.FirstContact/Hello"
SERVER_NAME = "aegis"
SCHEMA = 1
NONCE_BYTES = 16


class ContactError(Exception):
    """First contact failed. `retry`: a later attempt may succeed (nobody answers); otherwise none will."""

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


class Dismissed(ContactError):
    """The job refuses this worker: its node is tainted, or the job has ended."""


class Hello(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=False):
    """A worker's request. `uid` is this life of the agent; `node_ip` is numeric; `attempt`: how often the
    scheduler has restarted the whole job; `parks`: if it can't take part, it wants to wait for the job's end.
    """

    namespace: str
    job: str
    worker: str
    uid: str
    node_name: str
    node_ip: str
    nproc: int
    ordinal: int
    user_public_key: str
    nonce: str
    proof: str = ""
    schema: int = SCHEMA
    parks: bool = False
    attempt: int = 0


class Welcome(msgspec.Struct, frozen=True, rename="camel"):
    """The plane's answer: a JWT for the bus at `bus_port` of the same host, and the state of the job. The bus
    is at `bus_url` instead if that is given, where the certificate is one of `bus_ca` ("": no TLS).

    `parked`: why the worker takes no part in the job, and may only wait for its end (as `parks` asked for).
    """

    jwt: str
    bus_port: int
    seq_num: int
    incarnation: int
    generation: int
    max_retry: int
    recover_count: int
    proof: str = ""
    parked: str = ""
    bus_url: str = ""
    bus_ca: str = ""


class Place(msgspec.Struct, frozen=True):
    """The result of first contact: the welcome, the plane's certificate, and whether a secret proved it."""

    welcome: Welcome
    certificate_pem: str
    proven: bool

    def bus_url(self, host: str) -> str:
        """The URL of the bus, if the plane is on `host`."""
        named = f"[{host}]" if ":" in host else host
        return self.welcome.bus_url or f"tls://{named}:{self.welcome.bus_port}"

    @property
    def bus_ca(self) -> str | None:
        """The certificates, in PEM, that the bus may show; None if it has no TLS."""
        return (self.welcome.bus_ca or None) if self.welcome.bus_url else self.certificate_pem


def new_nonce() -> str:
    """A fresh random nonce, hex."""
    return os.urandom(NONCE_BYTES).hex()


def hello_proof(secret: bytes, fingerprint: str, hello: Hello) -> str:
    """The proof that the sender of this Hello knows the secret and was shown this certificate."""
    without_proof = msgspec.structs.replace(hello, proof="")
    return _prove(secret, "hello", fingerprint, msgspec.json.encode(without_proof))


def is_hello_proof(secret: bytes, fingerprint: str, hello: Hello) -> bool:
    """Whether this Hello's proof is what `hello_proof` makes. With munge it can be checked once."""
    without_proof = msgspec.structs.replace(hello, proof="")
    return _is_proof(secret, hello.proof, "hello", fingerprint, msgspec.json.encode(without_proof))


def welcome_proof(secret: bytes, fingerprint: str, hello: Hello, welcome: Welcome) -> str:
    """The proof that the plane which answers this Hello knows the secret and owns this certificate."""
    without_proof = msgspec.structs.replace(welcome, proof="")
    content = hello.nonce.encode() + msgspec.json.encode(without_proof)
    return _prove(secret, "welcome", fingerprint, content)


def is_welcome_proof(secret: bytes, fingerprint: str, hello: Hello, welcome: Welcome) -> bool:
    """Whether this Welcome's proof is what `welcome_proof` makes. With munge it can be checked once."""
    content = hello.nonce.encode() + msgspec.json.encode(msgspec.structs.replace(welcome, proof=""))
    return _is_proof(secret, welcome.proof, "welcome", fingerprint, content)


def _prove(secret: bytes, label: str, fingerprint: str, content: bytes) -> str:
    digest = _mac(secret, label, fingerprint, content)
    return munge.prove(digest) if secret == munge.MUNGE else digest


def _is_proof(secret: bytes, proof: str, label: str, fingerprint: str, content: bytes) -> bool:
    digest = _mac(secret, label, fingerprint, content)
    return munge.is_proof(proof, digest) if secret == munge.MUNGE else proofs_equal(proof, digest)


def _mac(secret: bytes, label: str, fingerprint: str, content: bytes) -> str:
    message = b"\0".join([b"aegis", label.encode(), fingerprint.encode(), content])
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def proofs_equal(left: str, right: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(left.encode(), right.encode())


def call(
    host: str,
    port: int,
    hello: Hello,
    secret: bytes | None,
    timeout_s: float,
    *,
    known_pem: str | None = None,
) -> Place:
    """Make first contact. Blocking; raises ContactError (with `retry` when nobody answered) or Dismissed.

    `known_pem`: the certificate of our job's plane. A host that shows another one isn't that plane (yet).
    """
    try:
        pem = _shown_certificate(host, port, timeout_s)
    except ContactError as error:
        raise ContactError(str(error), retry=error.retry or known_pem is not None) from None
    if known_pem is not None and pem != known_pem:
        raise ContactError(
            f"cannot reach the control plane at {host}:{port}: another one answers there, with no record "
            "of this job",
            retry=True,
        )
    fingerprint = tls.fingerprint(pem)
    if secret is not None:
        hello = msgspec.structs.replace(hello, proof=hello_proof(secret, fingerprint, hello))
    credentials = grpc.ssl_channel_credentials(root_certificates=pem.encode())
    options = [("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.enable_http_proxy", 0)]
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.secure_channel(target, credentials, options) as channel:
        rpc = channel.unary_unary(METHOD)
        try:
            answer: bytes = rpc(msgspec.json.encode(hello), timeout=timeout_s)
        except grpc.RpcError as error:
            raise _contact_error(error, f"{host}:{port}", hello, secret) from None
    welcome = msgspec.json.decode(answer, type=Welcome)
    if secret is not None and not is_welcome_proof(secret, fingerprint, hello, welcome):
        raise ContactError(
            f"cannot join job {hello.job!r}: the control plane at {host}:{port} could not prove that it "
            "knows the join secret; give every node the same secret, or none"
        )
    return Place(welcome, pem, proven=secret is not None)


def _shown_certificate(host: str, port: int, timeout_s: float) -> str:
    endpoint = f"{host}:{port}"
    try:
        return ssl.get_server_certificate((host, port), timeout=timeout_s)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        # also by a control plane that is just ending
        raise ContactError(
            f"cannot reach the control plane at {endpoint}: the connection is closed", retry=True
        ) from None
    except ssl.SSLError as error:
        why = f"another program answers there ({error.reason or error})"
        raise ContactError(f"cannot reach the control plane at {endpoint}: {why}") from None
    except ConnectionResetError:
        raise ContactError(
            f"cannot reach the control plane at {endpoint}: the connection is reset", retry=True
        ) from None
    except socket.gaierror as error:
        raise ContactError(
            f"cannot reach the control plane at {endpoint}: {error.strerror}", retry=True
        ) from None
    except OSError as error:
        why = error.strerror or str(error) or "no answer"
        raise ContactError(f"cannot reach the control plane at {endpoint}: {why}", retry=True) from None


_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def _contact_error(error: grpc.RpcError, endpoint: str, hello: Hello, secret: bytes | None) -> ContactError:
    code, details = error.code(), error.details() or ""
    if code in _UNREACHABLE:
        return ContactError(f"cannot reach the control plane at {endpoint}: {details}", retry=True)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        ours = "ours is another one" if secret is not None else "we have none"
        return ContactError(
            f"cannot join job {hello.job!r} at {endpoint}: it asks for a join secret, and {ours}"
        )
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return Dismissed(f"cannot join job {hello.job!r} at {endpoint}: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ContactError(f"cannot reach the control plane at {endpoint}: another program answers there")
    return ContactError(f"cannot join job {hello.job!r} at {endpoint}: {details or code.name}")
