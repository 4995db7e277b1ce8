"""One call to a job's master: gRPC over TLS, pinned to the certificate that the run directory holds.

`admin.json` (0600) in the run directory has the address, the certificate and the token. The call is a gRPC
unary `/aegis.Admin/Call` with JSON on both sides: `{"token", "op", "args"}` in, `{"ok": true, "data"}` or
`{"ok": false, "error"}` out.
"""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from aegis_elastic.control.host.errors import AdminRefused, AdminUnreachable, BadRecord

METHOD = "/aegis.Admin/Call"
# The master is authenticated by the pinned certificate; this is only the name in it.
SERVER_NAME = "aegis"
ADMIN_FILE = "admin.json"


class Admin(msgspec.Struct, frozen=True, rename="camel"):
    """How to reach a job's master. `endpoint` is `host:port`, `token` authorises the calls."""

    endpoint: str
    cert_pem: str
    token: str

    def __repr__(self) -> str:
        # Without the token, which must not get into a log by a traceback or an f-string.
        return f"Admin({self.endpoint!r})"


# Finds the master of the job that the arguments name; None if the job has ended.
FindMaster = Callable[[argparse.Namespace], Admin | None]


class _Response(msgspec.Struct, frozen=True):
    ok: bool
    data: Any = None
    error: str = ""


def load(run_dir: Path) -> Admin | None:
    """How to reach the master of this run; None if its run directory doesn't say (it never started, or
    ended).

    BadRecord for a file that can't be read, or that others can read: they could act in our name.
    """
    path = run_dir / ADMIN_FILE
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadRecord(f"cannot read {path}: {error.strerror or error}") from error
    if mode & 0o077:
        raise BadRecord(f"cannot use {path}: others may read it (mode {stat.S_IMODE(mode):04o}); want 0600")
    try:
        return msgspec.json.decode(content, type=Admin)
    except msgspec.DecodeError as error:
        raise BadRecord(f"cannot read {path}: {error}") from error


def call(admin: Admin, op: str, args: Mapping[str, Any] | None = None, *, timeout_s: float = 10.0) -> Any:
    """Have the master do `op`; returns its data.

    AdminUnreachable if it doesn't answer in `timeout_s`, or hasn't the pinned certificate; AdminRefused if it
    refuses.
    """
    # grpc takes a tenth of a second to import, and writes its own lines about refused connections.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc

    request = msgspec.json.encode({"token": admin.token, "op": op, "args": dict(args or {})})
    trusted = grpc.ssl_channel_credentials(root_certificates=admin.cert_pem.encode())
    # Never by a proxy that is set for the whole site.
    options = [("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(admin.endpoint, trusted, options) as channel:
        try:
            raw = channel.unary_unary(METHOD)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            why = f"{error.code().name.lower()}: {error.details()}"
            raise AdminUnreachable(f"cannot reach the master at {admin.endpoint}: {why}") from error
    try:
        response = msgspec.json.decode(raw, type=_Response)
    except msgspec.DecodeError as error:
        raise AdminRefused(f"cannot understand the answer of {admin.endpoint} to {op!r}: {error}") from error
    if not response.ok:
        raise AdminRefused(f"cannot {op}: {response.error or 'the master gave no reason'}")
    return response.data
