"""The master's gRPC server: first contact and notes of workers, and the admin call of `aegisctl`.

gRPC's threads only decode and check; calls are answered in the master's event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import msgspec

from aegis_elastic.bus import credentials
from aegis_elastic.bus.contact import first_contact, notes
from aegis_elastic.bus.contact.first_contact import Hello, Welcome
from aegis_elastic.bus.contact.notes import Envelope, Note
from aegis_elastic.bus.credentials import NotThisWorker, PlaneKeys
from aegis_elastic.bus.tls import Certificate

ADMIN_METHOD = "/aegis.Admin/Call"
THREADS = 4
ANSWER_TIMEOUT_S = 20.0
MESSAGE_BYTES_MAX = 1 << 20

Greeter = Callable[[Hello], Awaitable[Welcome]]
AdminHandler = Callable[[str, dict[str, Any]], Awaitable[Any]]
NoteTaker = Callable[[Note], Awaitable[None]]


class Refused(Exception):
    """The master doesn't want this worker; the text says why."""


class AddressTaken(OSError):
    """The port for first contact is used by another program."""


class AdminCall(msgspec.Struct, frozen=True):
    """One request of `aegisctl`."""

    token: str
    op: str
    args: dict[str, Any] = {}


class GrpcServer(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """All services on one port, in TLS. Make it in the event loop that answers; `open` it, `close` it."""

    def __init__(
        self,
        certificate: Certificate,
        secret: bytes | None,
        token: str,
        greet: Greeter,
        admin: AdminHandler,
        take_note: NoteTaker,
        keys: PlaneKeys,
    ) -> None:
        """`keys`: what workers' JWTs are signed with. `take_note` raises Refused, or ValueError for
        nonsense.
        """
        self._certificate = certificate
        self._secret = secret
        self._token = token
        self._greet = greet
        self._admin = admin
        self._take_note = take_note
        self._keys = keys
        self._loop = asyncio.get_running_loop()
        self._server: grpc.Server | None = None
        self._fingerprint = certificate.fingerprint

    def open(self, host: str, port: int) -> int:
        """Listen; returns the port. AddressTaken if it can't."""
        pool = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="aegis-grpc")
        # Without SO_REUSEPORT: two planes on one port would each get half of the workers.
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)]
        server = grpc.server(pool, options=options)
        server.add_generic_rpc_handlers((self,))
        key, pem = self._certificate.key_path.read_bytes(), self._certificate.pem.encode()
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = server.add_secure_port(where, grpc.ssl_server_credentials([(key, pem)]))
        except RuntimeError:
            bound = 0
        if not bound:
            raise AddressTaken(f"cannot listen on {where}: {_why_not(host, port)}")
        server.start()
        self._server = server
        return int(bound)

    def close(self) -> None:
        """Stop listening; calls that are under way get a moment."""
        if self._server is not None:
            self._server.stop(0.2).wait()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """gRPC's hook: which method is called (the name is gRPC's)."""
        if handler_call_details.method == first_contact.METHOD:
            return grpc.unary_unary_rpc_method_handler(self._hello)
        if handler_call_details.method == ADMIN_METHOD:
            return grpc.unary_unary_rpc_method_handler(self._call)
        if handler_call_details.method == notes.METHOD:
            return grpc.unary_unary_rpc_method_handler(self._note)
        return None

    def _hello(self, payload: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            hello = msgspec.json.decode(payload, type=Hello)
        except msgspec.MsgspecError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a Hello: {error}")
        if hello.schema > first_contact.SCHEMA:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker is newer than the control plane")
        if self._secret is None and hello.proof:
            # It would find out by our answer, but by then it would have joined.
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this worker has a join secret and the control plane has none; give every node the same "
                "secret, or none",
            )
        if self._secret is not None and not first_contact.is_hello_proof(
            self._secret, self._fingerprint, hello
        ):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the join secret is missing or wrong")
        try:
            welcome = self._run_in_loop(self._greet(hello))
        except Refused as refusal:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(refusal))
        except ValueError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except concurrent.futures.TimeoutError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the master is busy")
        if self._secret is not None:
            proof = first_contact.welcome_proof(self._secret, self._fingerprint, hello, welcome)
            welcome = msgspec.structs.replace(welcome, proof=proof)
        return msgspec.json.encode(welcome)

    def _note(self, payload: bytes, context: grpc.ServicerContext) -> bytes:
        if len(payload) > notes.NOTE_BYTES_MAX:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a note of {len(payload)} bytes")
        try:
            envelope = msgspec.msgpack.decode(payload, type=Envelope)
            note = msgspec.json.decode(envelope.note, type=Note)
            signed = notes.signed_part(self._fingerprint, envelope.note)
            who = {"ns": note.namespace, "job": note.job, "worker": note.worker}
            credentials.check_worker(self._keys, envelope.jwt, envelope.signature, signed, **who)
            self._run_in_loop(self._take_note(note))
        except NotThisWorker as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        except Refused as refusal:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(refusal))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a note: {error}")
        except concurrent.futures.TimeoutError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the master is busy")
        return b""

    def _call(self, payload: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            call = msgspec.json.decode(payload, type=AdminCall)
        except msgspec.MsgspecError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not an admin call: {error}")
        if not first_contact.proofs_equal(call.token, self._token):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong admin credentials")
        try:
            data = self._run_in_loop(self._admin(call.op, call.args))
        except (ValueError, KeyError) as error:
            return msgspec.json.encode({"ok": False, "error": str(error)})
        except concurrent.futures.TimeoutError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the master is busy")
        return msgspec.json.encode({"ok": True, "data": data})

    def _run_in_loop(self, work: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(ANSWER_TIMEOUT_S)


def _why_not(host: str, port: int) -> str:
    """Why that address can't be listened on, which gRPC doesn't say."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        hints = {errno.EADDRINUSE: "another program uses that port", errno.EADDRNOTAVAIL: "not our address"}
        return hints.get(error.errno or 0, error.strerror or str(error))
    return "gRPC can't, though it is free"
