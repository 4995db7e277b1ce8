"""The environment that a training process gets from us: our site folder first on its path, and no secret of
ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SITE_DIR = str(Path(__file__).resolve().parent / "site")
# the site folder's sitecustomize acts only if this is there, and removes it before the script's first line
MARKER = "AEGIS_WORKER_SITE"
SECRETS = ("AEGIS_JOIN_SECRET",)
# set by the launcher when it silences torch's C++ warnings for itself: then the ranks get what they had
# before
OUR_LOG_LEVEL = "AEGIS_OUR_CPP_LOG_LEVEL"


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of ``env`` without the variables that carry our secrets."""
    return {key: value for key, value in env.items() if key not in SECRETS}


def prepare_env(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of ``env`` for a rank: without secrets, with our site folder first on PYTHONPATH.

    Idempotent. A Python that ignores PYTHONPATH (``-I``, ``-E``) just doesn't see the folder. Where the
    package lies under a folder that PYTHONPATH can't express (its name holds the path separator), only the
    secrets go.
    """
    prepared = without_secrets(env)
    if prepared.pop(OUR_LOG_LEVEL, None):
        prepared.pop("TORCH_CPP_LOG_LEVEL", None)
    if os.pathsep in SITE_DIR:
        return prepared
    original = prepared.get("PYTHONPATH")
    rest = [entry for entry in original.split(os.pathsep) if entry != SITE_DIR] if original else []
    prepared["PYTHONPATH"] = os.pathsep.join([SITE_DIR, *rest])
    # whether PYTHONPATH was there: after our entry is taken out, empty and unset look the same
    prepared.setdefault(MARKER, "unset" if original is None else "set")
    return prepared
