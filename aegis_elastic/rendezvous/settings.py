"""From what torchelastic gives a rendezvous handler to what our agent and plane want to know.

Ours are the keys of `--rdzv-conf` that begin with `aegis_`; they are named as the flags of `aegis-run`, and
anything else that begins so is refused: a misspelt setting must not be taken for none.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from aegis_elastic.agents.plane.link import Identity
from aegis_elastic.agents.standalone.fallback import Meeting
from aegis_elastic.bus.contact.secret import SecretError, find_secret
from aegis_elastic.control.host import addresses, run_directories
from aegis_elastic.control.host.config import PlaneConfig
from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.core.model import JobSpec

_T = TypeVar("_T")

PREFIX = "aegis_"
DEFAULT_PORT = 29400
KEYS = frozenset(
    {
        "aegis_bootcheck", "aegis_troubleshoot", "aegis_namespace", "aegis_worker_name", "aegis_state_dir",
        "aegis_join_secret_file", "aegis_run_dir", "aegis_plane_linger_s", "aegis_lost_timeout_s",
        "aegis_rejoin_timeout_s", "aegis_fallback_port",
    }
)  # fmt: skip
CHOICES = {
    "aegis_bootcheck": ("off", "env", "full"),
    "aegis_troubleshoot": ("adaptive", "full", "off"),
}


@dataclass(frozen=True)
class Surroundings:
    """One node's launch under the stock launcher. `address`: of the plane; its name where others host it,
    since that may lead to another address when its host is replaced.
    """

    identity: Identity
    address: str
    port: int
    ours: bool
    secret: bytes | None
    plane: PlaneConfig
    meeting: Meeting
    join_timeout_s: float


def read(parameters: RendezvousParameters, launch: LaunchConfig) -> Surroundings:
    """All of it. UsageError says what can't be used and what would be right."""
    conf: Mapping[str, object] = parameters.config
    _refuse_unknown(conf)
    try:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    except ValueError as error:
        raise UsageError(f"cannot use the rendezvous endpoint {parameters.endpoint!r}: {error}") from None
    if port == 0 and parameters.min_nodes > 1:
        raise UsageError(
            f"cannot use {parameters.endpoint} for {parameters.min_nodes} nodes: port 0 means any free port, "
            "which the other nodes can't know"
        )
    address = addresses.resolve(host)
    ours = addresses.is_ours(address)
    node_ip = parameters.local_addr or (address if ours else addresses.address_towards(address))
    named = parameters.run_id if parameters.run_id not in ("", "none") else ""
    job = named or f"job-{port or uuid.uuid4().hex[:12]}"
    namespace = _value(conf, "aegis_namespace", str, "default")
    join_timeout_s = _value(conf, "join_timeout", float, 600.0)
    last_call_s = _value(conf, "last_call_timeout", float, 30.0)
    secret = _secret(conf)
    spec = JobSpec(
        job_name=job,
        namespace=namespace,
        worker_num=parameters.max_nodes,
        min_worker_num=parameters.min_nodes,
        max_retry=launch.max_restarts,
        bootcheck=_value(conf, "aegis_bootcheck", str, "full"),
        troubleshoot=_value(conf, "aegis_troubleshoot", str, "adaptive"),
        join_timeout_s=join_timeout_s,
        last_call_s=last_call_s,
        rejoin_timeout_s=_value(conf, "aegis_rejoin_timeout_s", float, join_timeout_s),
    )
    job_dir = run_directories.job_dir(namespace, job)
    plane = PlaneConfig(
        directory=str(job_dir / "plane"),
        host=address,
        port=port,
        spec=spec,
        job_dir=str(job_dir),
        run_dir=_value(conf, "aegis_run_dir", str, ""),
        secret=(secret or b"").decode(),
        resume=bool(named),
        linger_s=_value(conf, "aegis_plane_linger_s", float, 60.0),
        silent_s=_value(conf, "aegis_lost_timeout_s", float, 30.0),
        hosts=(address, socket.gethostname()),
    )
    identity = Identity(
        namespace=namespace,
        job=job,
        worker=_value(conf, "aegis_worker_name", str, socket.gethostname()),
        uid=uuid.uuid4().hex,
        node_name=addresses.node_name(),
        node_ip=node_ip,
        nproc=launch.nproc_per_node,
    )
    meeting = Meeting(
        host=address,
        port=_value(conf, "aegis_fallback_port", int, port + 1),
        hosting=ours,
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        max_restarts=launch.max_restarts,
        wait_s=join_timeout_s,
        last_call_s=last_call_s,
    )
    return Surroundings(
        identity, address if ours else host, port, ours, secret, plane, meeting, join_timeout_s
    )


def _refuse_unknown(conf: Mapping[str, object]) -> None:
    for key, value in conf.items():
        if key.startswith(PREFIX) and key not in KEYS:
            raise UsageError(f"cannot use {key!r} in --rdzv-conf: ours are {', '.join(sorted(KEYS))}")
        if key in CHOICES and value not in CHOICES[key]:
            raise UsageError(f"cannot use {key}={value} in --rdzv-conf: want {' or '.join(CHOICES[key])}")


def _value(conf: Mapping[str, object], key: str, kind: Callable[[str], _T], default: _T) -> _T:
    """The setting as the type that it has. Numbers must not be negative, texts not empty."""
    if key not in conf:
        return default
    text = str(conf[key])
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or value == "" or (isinstance(value, (int, float)) and not value >= 0):
        wanted = "a text" if kind is str else "a number of 0 or more"
        raise UsageError(f"cannot use {key}={text} in --rdzv-conf: want {wanted}")
    return value


def _secret(conf: Mapping[str, object]) -> bytes | None:
    given = conf.get("aegis_join_secret_file"), conf.get("aegis_state_dir")
    secret_file, state_dir = (Path(str(path)) if path else None for path in given)
    try:
        secret, _ = find_secret(secret_file, os.environ, state_dir)
    except SecretError as error:
        raise UsageError(str(error)) from None
    return secret
