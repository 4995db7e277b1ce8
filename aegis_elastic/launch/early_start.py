"""What can be started before the command line is understood, because understanding it takes torch's parser.

A guess only: a plane that turns out not to be needed here ends unused.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence

from aegis_elastic.control.host.plane_process import StartingPlane

# With these nothing is started.
_HELP = frozenset({"-h", "--help", "--aegis-explain-flags", "--aegis_explain_flags"})


def start_plane(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> StartingPlane | None:
    """A plane that waits for its orders, if the endpoint looks as if it were this host's."""
    return StartingPlane() if not _HELP.intersection(words) and looks_ours(words, environment) else None


def looks_ours(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether this host would serve the plane. Asks no name server: a name that isn't ours is no."""
    host = _given(words, "rdzv-endpoint") or environment.get("PET_RDZV_ENDPOINT", "")
    if _given(words, "aegis-plane") or environment.get("AEGIS_PLANE"):
        return False
    host = host or _given(words, "master-addr") or environment.get("PET_MASTER_ADDR", "")
    if not host and environment.get("SLURM_NODEID", "0") != "0" and "SLURM_STEP_ID" in environment:
        return False  # Nodes of an allocation meet at its first one.
    if not host or "--standalone" in words:
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


def _given(words: Sequence[str], flag: str) -> str:
    """The value of a flag in either spelling, as `--flag VALUE` or `--flag=VALUE`; "" if it isn't there."""
    spellings = (f"--{flag}", f"--{flag.replace('-', '_')}")
    value = ""
    for index, word in enumerate(words):
        name, equals, attached = word.partition("=")
        if name in spellings:
            value = attached if equals else "".join(words[index + 1 : index + 2])
    return value
