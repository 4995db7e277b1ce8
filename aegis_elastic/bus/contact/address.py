"""Where a host's name leads, now: names outlive addresses where whoever answers to them may be replaced."""

from __future__ import annotations

import ipaddress
import socket


def look_up(host: str) -> tuple[str, ...]:
    """The numeric addresses of `host`, IPv4 first; an address is its own. OSError if it leads nowhere."""
    try:
        return (str(ipaddress.ip_address(host.strip("[]"))),)
    except ValueError:
        pass  # A name: ask the resolver.
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
