"""Which host is meant: whether the endpoint is ours to serve, and under which address the others reach us."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from aegis_elastic.bus.contact import address
from aegis_elastic.control.host.errors import UsageError


def resolve(host: str) -> str:
    """The numeric address of `host`, IPv4 if it has one. UsageError if it can't be resolved."""
    try:
        return address.look_up(host)[0]
    except OSError as error:
        raise UsageError(f"cannot use the endpoint's host {host!r}: {error.strerror}") from None


def node_name() -> str:
    """This node's name as its scheduler knows it: $AEGIS_NODE_NAME where a container has a hostname of its
    own (on Kubernetes from `spec.nodeName`), else the hostname.
    """
    return os.environ.get("AEGIS_NODE_NAME") or socket.gethostname()


def own_addresses() -> frozenset[str]:
    """Every address of this host's interfaces, numeric."""
    return frozenset(
        entry.address.split("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    )


def is_ours(numeric: str) -> bool:
    """Whether that numeric address belongs to this host."""
    return ipaddress.ip_address(numeric).is_loopback or numeric in own_addresses()


def address_towards(there: str) -> str:
    """Our own address on the way to another host; no packet is sent for that. UsageError if there is no
    way.
    """
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, 9))
        except OSError as error:
            raise UsageError(f"cannot reach the endpoint's host {there}: {error.strerror}") from None
        return str(probe.getsockname()[0])
