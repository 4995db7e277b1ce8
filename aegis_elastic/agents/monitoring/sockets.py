"""Traffic of the ranks' TCP connections, from the kernel (sock_diag): bytes, and the time spent sending.

The kernel counts for every connection how long it has had data to send (busy time), and how much of that the
receiver's full window was the limit. The rest is due to the network. No packet is inspected, and no
privileges are needed in our own network namespace.

Connections within this host are left out: they don't use the network.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST_DUMP = 0x301
_DONE, _ERROR = 3, 2
_WITH_INFO = 1 << 1  # of INET_DIAG_INFO, which is 2
_INFO = 2
# States in which data may be sent or received: established, FIN_WAIT1, CLOSE_WAIT.
_STATES = (1 << 1) | (1 << 4) | (1 << 8)
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_DUMP_REQUEST = struct.Struct("=BBBBI48x")
_SOCKET_BYTES = 72  # of inet_diag_msg
_RECEIVE_BYTES = 1 << 18
_TIMEOUT_S = 1.0
_MICRO = 1e-6


class Traffic(NamedTuple):
    """One connection so far. `busy_s`: how long it had data to send without the receiver being the limit;
    `queued_bytes`: not yet sent, or not yet acknowledged, at this moment.
    """

    sent_bytes: int
    received_bytes: int
    busy_s: float
    queued_bytes: int


class Connections:
    """Reads all TCP connections at once. `close` it."""

    def __init__(self) -> None:
        """OSError where the kernel has no sock_diag."""
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG)
        self._socket.settimeout(_TIMEOUT_S)
        self._number = 0

    def read(self) -> dict[tuple[int, int], Traffic]:
        """(inode, cookie) -> traffic of every connection to another host. OSError."""
        found: dict[tuple[int, int], Traffic] = {}
        for family in (socket.AF_INET, socket.AF_INET6):
            self._dump(family, found)
        return found

    def close(self) -> None:
        """Close the descriptor."""
        self._socket.close()

    def _dump(self, family: int, found: dict[tuple[int, int], Traffic]) -> None:
        self._number += 1
        request = _DUMP_REQUEST.pack(family, socket.IPPROTO_TCP, _WITH_INFO, 0, _STATES)
        header = _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST_DUMP, self._number, 0)
        self._socket.send(header + request)
        while True:
            data = self._socket.recv(_RECEIVE_BYTES)
            offset = 0
            while offset + _HEADER.size <= len(data):
                length, kind, _, number, _ = _HEADER.unpack_from(data, offset)
                if number == self._number:  # else it is of an earlier dump that timed out
                    if kind in (_DONE, _ERROR):
                        return
                    _take(data, offset + _HEADER.size, offset + length, found)
                offset += (length + 3) & ~3


def _take(data: bytes, start: int, end: int, found: dict[tuple[int, int], Traffic]) -> None:
    """Read one inet_diag_msg with its attributes."""
    source, target = data[start + 8 : start + 24], data[start + 24 : start + 40]
    if source == target or _is_loopback(data[start], target):
        return
    (cookie,) = struct.unpack_from("=Q", data, start + 44)
    queued, _, inode = struct.unpack_from("=III", data, start + 60)
    offset = start + _SOCKET_BYTES
    while offset + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if kind == _INFO:
            traffic = _traffic(data[offset + _ATTRIBUTE.size : offset + length], queued)
            if traffic is not None:
                found[inode, cookie] = traffic
            return
        offset += max((length + 3) & ~3, _ATTRIBUTE.size)


def _is_loopback(family: int, address: bytes) -> bool:
    if family == socket.AF_INET:
        return address[0] == 127
    mapped = address[:12] == b"\0" * 10 + b"\xff\xff"
    return address[12] == 127 if mapped else address == b"\0" * 15 + b"\1"


def _traffic(info: bytes, queued: int) -> Traffic | None:
    """From tcp_info, which only ever grows at its end; None from a kernel before 4.10."""
    if len(info) < 184:
        return None
    sent, received = struct.unpack_from("=QQ", info, 120)
    busy, limited = struct.unpack_from("=QQ", info, 168)
    return Traffic(sent, received, max(busy - limited, 0) * _MICRO, queued)
