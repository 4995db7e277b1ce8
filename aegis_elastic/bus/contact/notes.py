"""A worker's notes to the plane, by gRPC beside first contact.

The bus carries state; a note says what has happened, and must arrive once. A worker proves that a note is its
own with what first contact gave it: its JWT, and a signature by its NKey over the note *and* the plane's
certificate, so that no man in the middle can pass one on. There is no new secret.
"""

from __future__ import annotations

import grpc
import msgspec

from aegis_elastic.bus import tls
from aegis_elastic.bus.contact.first_contact import SERVER_NAME
from aegis_elastic.bus.credentials import NKey
from aegis_elastic.core.detection.anomalies import Anomaly

METHOD = "/aegis.FirstContact/Note"
ANOMALIES_MAX = 64
NOTE_BYTES_MAX = 1 << 18


class NoteRefused(Exception):
    """The plane refused a note. `retry`: it may accept it later."""

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


class Note(msgspec.Struct, frozen=True, rename="camel"):
    """What one life of an agent has noticed. `number` counts its notes from 1: a repeated one counts once."""

    namespace: str
    job: str
    worker: str
    uid: str
    number: int
    anomalies: tuple[Anomaly, ...]


class Envelope(msgspec.Struct, frozen=True):
    """A signed note, with the proof of its author."""

    jwt: str
    signature: bytes
    note: bytes


def signed_part(fingerprint: str, note: bytes) -> bytes:
    """What the signature is over."""
    return b"\0".join([b"aegis", b"note", fingerprint.encode(), note])


def send(
    host: str, port: int, certificate_pem: str, key: NKey, jwt: str, note: Note, timeout_s: float
) -> None:
    """Deliver a note to the plane that owns this certificate. Blocking; raises NoteRefused."""
    encoded = msgspec.json.encode(note)
    signature = key.sign(signed_part(tls.fingerprint(certificate_pem), encoded))
    credentials = grpc.ssl_channel_credentials(root_certificates=certificate_pem.encode())
    options = [("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.enable_http_proxy", 0)]
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.secure_channel(target, credentials, options) as channel:
        try:
            channel.unary_unary(METHOD)(
                msgspec.msgpack.encode(Envelope(jwt, signature, encoded)), timeout=timeout_s
            )
        except grpc.RpcError as error:
            # A plane that was restarted may not know us yet.
            final = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
            raise NoteRefused(
                f"cannot send a note to {host}:{port}: {error.details() or error.code().name}",
                retry=error.code() not in final,
            ) from None
