"""Resolves a host's name when it is used: a name stays where its host, and so the address, is replaced."""

from __future__ import annotations

import ipaddress
import socket


def look_up(host: str) -> tuple[str, ...]:
    """The numeric addresses of `host`, IPv4 first; an address is returned as is. OSError if there is none."""
    try:
        return (str(ipaddress.ip_address(host.strip("[]"))),)
    except ValueError:
        pass  # a name, for the resolver
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
