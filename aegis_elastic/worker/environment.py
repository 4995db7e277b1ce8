"""The environment of a rank: our site folder first on its PYTHONPATH, and none of our secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

SITE_DIR = str(Path(__file__).resolve().parent / "site")
# the site folder's sitecustomize acts only if this is there, and removes it before the script's first line
MARKER = "AEGIS_WORKER_SITE"
SECRETS = ("AEGIS_JOIN_SECRET", "AEGIS_NOTIFY")
# names of the variables that we have set for our own processes only; ranks don't get these
OUR_OWN = "AEGIS_OUR_OWN_VARIABLES"


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of ``env`` without the variables that carry our secrets."""
    return {key: value for key, value in env.items() if key not in SECRETS}


def set_for_ourselves(env: MutableMapping[str, str], **wanted: str) -> None:
    """Set those of these variables that are not set, for our own processes and not for the ranks."""
    ours = {key: value for key, value in wanted.items() if key not in env}
    env.update(ours)
    names = [*env.get(OUR_OWN, "").split(","), *ours]
    env[OUR_OWN] = ",".join(name for name in names if name)


def as_given(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of ``env`` for the user's programs: without secrets, and without what we set for ourselves."""
    given = without_secrets(env)
    for name in given.pop(OUR_OWN, "").split(","):
        given.pop(name, None)
    return given


def prepare_env(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of ``env`` for a rank: without secrets, with our site folder first on PYTHONPATH.

    Idempotent. A Python that ignores PYTHONPATH (``-I``, ``-E``) doesn't use the folder. If the package is in
    a folder that PYTHONPATH can't express (its name contains the path separator), only the secrets are
    removed.
    """
    prepared = as_given(env)
    if os.pathsep in SITE_DIR:
        return prepared
    original = prepared.get("PYTHONPATH")
    rest = [entry for entry in original.split(os.pathsep) if entry != SITE_DIR] if original else []
    prepared["PYTHONPATH"] = os.pathsep.join([SITE_DIR, *rest])
    # whether PYTHONPATH was set: after our entry is removed, empty and unset look the same
    prepared.setdefault(MARKER, "unset" if original is None else "set")
    return prepared
