"""The sources of a job's join secret. The first that has one wins; with none, it is trust on first use."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path

from aegis_elastic.bus.contact import munge

SECRET_ENV = "AEGIS_JOIN_SECRET"
SHARED_FILE = "join-secret"
KUBERNETES_FILE = Path("/var/run/secrets/aegis/join-secret")
SECRET_BYTES_MIN = 8


class SecretError(ValueError):
    """A secret was named but can't be used; the message says which and why."""


def find_secret(
    secret_file: Path | None, environment: Mapping[str, str], state_dir: Path | None
) -> tuple[bytes | None, str]:
    """The join secret and where it came from (for one line to the user), or (None, "").

    Order: the file that was named, the environment, munge in a Slurm job, a 0600 file in the shared state
    directory (created if the directory is given and has none: the first node writes it, the others read
    it), the mounted Kubernetes Secret.
    """
    if secret_file is not None:
        return read_secret(secret_file), f"the file {secret_file}"
    if SECRET_ENV in environment:
        return _checked(environment[SECRET_ENV].encode(), f"${SECRET_ENV}"), f"${SECRET_ENV}"
    if "SLURM_JOB_ID" in environment and munge.works():
        return munge.MUNGE, "munge: processes of this user on the nodes of this Slurm cluster"
    if state_dir is not None:
        path = state_dir / SHARED_FILE
        _make_shared(path)
        return read_secret(path), f"the shared state directory ({path})"
    if KUBERNETES_FILE.exists():
        return read_secret(KUBERNETES_FILE, shared_by_mount=True), f"the mounted secret {KUBERNETES_FILE}"
    return None, ""


def read_secret(path: Path, *, shared_by_mount: bool = False) -> bytes:
    """The secret in a file that nobody else may read; SecretError otherwise."""
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise SecretError(f"cannot use the join secret {path}: {error.strerror}") from None
    if not shared_by_mount and mode & (stat.S_IRGRP | stat.S_IROTH):
        raise SecretError(f"cannot use the join secret {path}: others can read it; run chmod 600 {path}")
    return _checked(content, str(path))


def _checked(content: bytes, name: str) -> bytes:
    secret = content.strip()
    if len(secret) < SECRET_BYTES_MIN:
        raise SecretError(f"cannot use the join secret {name}: shorter than {SECRET_BYTES_MIN} bytes")
    if secret == munge.MUNGE:
        raise SecretError(f"cannot use the join secret {name}: {secret.decode()} is not secret")
    return secret


def _make_shared(path: Path) -> None:
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(os.urandom(32).hex().encode())
                file.flush()
                os.fsync(descriptor)
            # Atomic, and the first wins: no other node ever reads a part of a secret.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            temporary.unlink()
    except OSError as error:
        raise SecretError(f"cannot keep a join secret in {path.parent}: {error.strerror}") from None
