"""Starts the control plane's process before the command line is parsed, for which torch must be imported.

It is a guess from a few flags: a plane that turns out not to be needed here ends unused.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence

from aegis_elastic.control.host.plane_process import StartingPlane

# With these nothing is started.
_HELP = frozenset({"-h", "--help", "--aegis-explain-flags", "--aegis_explain_flags"})


def start_plane(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> StartingPlane | None:
    """A plane process that waits for its configuration, if the endpoint seems to be this host's."""
    return StartingPlane() if not _HELP.intersection(argv) and endpoint_is_local(argv, environment) else None


def endpoint_is_local(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether this host would serve the plane. No name server is asked: other names count as remote."""
    host = _flag_value(argv, "rdzv-endpoint") or environment.get("PET_RDZV_ENDPOINT", "")
    if _flag_value(argv, "aegis-plane") or environment.get("AEGIS_PLANE"):
        return False
    host = host or _flag_value(argv, "master-addr") or environment.get("PET_MASTER_ADDR", "")
    if not host and environment.get("SLURM_NODEID", "0") != "0" and "SLURM_STEP_ID" in environment:
        return False  # Nodes of an allocation meet at its first one.
    if not host or "--standalone" in argv:
        return True
    host = host.rsplit(":", 1)[0] if host.count(":") == 1 else host.strip("[]")
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return False
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))  # which only works for an address of our own
        except OSError:
            return False
        return True


def _flag_value(argv: Sequence[str], flag: str) -> str:
    """The value of a flag in either spelling, as `--flag VALUE` or `--flag=VALUE`; "" if it isn't given."""
    spellings = (f"--{flag}", f"--{flag.replace('-', '_')}")
    value = ""
    for index, argument in enumerate(argv):
        name, equals, attached = argument.partition("=")
        if name in spellings:
            value = attached if equals else "".join(argv[index + 1 : index + 2])
    return value
