"""Which host is meant: whether the endpoint is ours to serve, and under which address the others reach us."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from aegis_elastic.control.errors import UsageError


def resolve(host: str) -> str:
    """The numeric address of `host`, IPv4 if it has one. UsageError if it can't be resolved."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass  # A name: ask the resolver.
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UsageError(f"cannot use the endpoint's host {host!r}: {error.strerror}") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


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


def is_ours(address: str) -> bool:
    """Whether that numeric address belongs to this host."""
    return ipaddress.ip_address(address).is_loopback or address in own_addresses()


def address_towards(address: str) -> str:
    """Our own address on the way to another host; no packet is sent for that. UsageError if there is no
    way.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise UsageError(f"cannot reach the endpoint's host {address}: {error.strerror}") from None
        return str(probe.getsockname()[0])
