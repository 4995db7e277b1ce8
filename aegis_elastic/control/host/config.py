"""Configuration of a control plane, from the launcher that starts it: one 0600 JSON file, so that no secret
is in an argv.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from aegis_elastic.core.detection.progress import FLOOR_S
from aegis_elastic.core.model import JobSpec
from aegis_elastic.core.policy.settings import Policy

CONFIG_FILE = "plane.json"
SOCKET_FILE = "plane.sock"
ADMIN_FILE = "admin.json"
LOG_FILE = "plane.log"


class NodesConfig(msgspec.Struct, frozen=True, rename="camel"):
    """What a plane does about nodes beyond its job: `state_dir` or `store` ("etcd://...") hold their records.

    `taint_s`: how long a taint of ours lasts, 0 until it is lifted. `isolation`: the driver's name, see
    `control.isolation.drivers`; `isolation_max`: how many nodes may be isolated at once. `record`: where a
    platform keeps its record of the job, see `control.isolation.config_map`.
    """

    state_dir: str = ""
    store: str = ""
    taint_s: float = 86400.0
    isolation: str = "none"
    isolation_max: int = 4
    isolation_dry_run: bool = False
    record: str = ""


class BusConfig(msgspec.Struct, frozen=True, rename="camel"):
    """A bus that somebody else runs: `url` ("" for one of our own), the file with the keys that it trusts,
    and the certificates that it may show ("" where it has none).
    """

    url: str = ""
    keys_file: str = ""
    ca_pem: str = ""


class PlaneConfig(msgspec.Struct, frozen=True, rename="camel"):
    """One embedded plane. `directory` (0700) holds keys, certificate, store and sockets over its lives.

    `host`, `port`: where first contact listens (port 0: any). `job_dir`: where the job's generations keep
    their run directories; `run_dir` overrides that. `resume`: whether a record that hasn't ended is continued
    (a requeue) or archived (an anonymous job's name means nothing to a later start). `leads`: the generation
    that this plane leads already, 0 before it has begun: whoever is restarted goes on with that one.
    `metrics_port` None: no metrics are served. `notify`: addresses for pages, which are secrets.
    """

    directory: str
    host: str
    port: int
    spec: JobSpec
    job_dir: str
    run_dir: str = ""
    secret: str = ""
    resume: bool = True
    leads: int = 0
    linger_s: float = 60.0
    restarts_max: int = 5
    jwt_life_s: float = 86400.0
    silent_s: float = 30.0
    attribution_s: float = 1.0
    hosts: tuple[str, ...] = ()
    fail_fast: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    hang_after_s: float = FLOOR_S
    nodes: NodesConfig = NodesConfig()
    bus: BusConfig = BusConfig()
    policy: Policy = Policy()
    notify: tuple[str, ...] = ()
    check_paths: dict[str, str] = {}

    @property
    def path(self) -> Path:
        """The plane's directory."""
        return Path(self.directory)


def save(config: PlaneConfig) -> Path:
    """Write the configuration where `load` finds it; returns the file. OSError as the file system says."""
    config.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chmod(config.path, 0o700)
    target = config.path / CONFIG_FILE
    write_private(target, msgspec.json.encode(config))
    return target


def load(path: Path) -> PlaneConfig:
    """Read a configuration that `save` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=PlaneConfig)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only we can read, all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def log_to(path: Path, descriptors: tuple[int, ...]) -> None:
    """Let these descriptors of this process write to the end of that file from now on."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in descriptors:
        os.dup2(log, descriptor)
    os.close(log)
