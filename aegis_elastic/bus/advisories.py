"""The server's advisories on its clients: who connected, who disconnected, and why.

The kernel closes a killed process's sockets, so the server notices an agent's death at once, long before any
heartbeat is overdue. Only the system account may subscribe to these messages (`credentials.system_jwt`).
"""

from dataclasses import dataclass

import msgspec

CONNECTS = "$SYS.ACCOUNT.*.CONNECT"
_PEER_CLOSED = frozenset({"Client Closed", "Read Error"})
DISCONNECTS = "$SYS.ACCOUNT.*.DISCONNECT"


@dataclass(frozen=True)
class Connect:
    """A client has connected. `name` is the one that it gave: the worker's uid."""

    user_public_key: str
    name: str
    client_id: int


@dataclass(frozen=True)
class Disconnect:
    """A client's connection is gone.

    `reason` is the server's text: "Client Closed" or "Read Error" when the peer's end was closed (by itself,
    or by the kernel when its process died; the second if it left something unread), "Stale Connection" when
    it stopped answering, "Authentication Expired", "Credentials Revoked", "Server Shutdown" and so on. A
    client that reconnects or renews has another `client_id`, so an old connection's end says nothing of the
    new one.
    """

    user_public_key: str
    name: str
    reason: str
    client_id: int

    @property
    def closed_by_peer(self) -> bool:
        """Whether the peer's end was closed, as when its process ends, and not by us or for silence."""
        return self.reason in _PEER_CLOSED


class _Client(msgspec.Struct):
    id: int = 0
    name: str = ""
    # Under JWTs the server gives the user's public key here.
    user: str = ""
    nkey: str = ""


class _Advisory(msgspec.Struct):
    type: str
    client: _Client
    reason: str = ""


_DECODER = msgspec.json.Decoder(_Advisory)


def parse_connect(payload: bytes) -> Connect:
    """Read a message of `CONNECTS`; ValueError if it is none."""
    client = _read(payload, "client_connect").client
    return Connect(client.nkey or client.user, client.name, client.id)


def parse_disconnect(payload: bytes) -> Disconnect:
    """Read a message of `DISCONNECTS`; ValueError if it is none."""
    advisory = _read(payload, "client_disconnect")
    client = advisory.client
    return Disconnect(client.nkey or client.user, client.name, advisory.reason, client.id)


def _read(payload: bytes, kind: str) -> _Advisory:
    try:
        advisory = _DECODER.decode(payload)
    except msgspec.MsgspecError as error:
        raise ValueError(f"cannot read a {kind} advisory: {error}") from error
    if not advisory.type.endswith("." + kind):
        raise ValueError(f"cannot read a {kind} advisory: it is a {advisory.type}")
    return advisory
