"""Proofs by munge, the service by which the nodes of a Slurm cluster know each other's users.

No secret has to be handed out: a credential that this user's processes make on one node is opened on another
by munged there, which says whose it is. What is proved is the same as with a join secret, knowledge of what
both sides have seen; `unmunge` opens a credential once and for five minutes, so none can be used again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

# Stands for a join secret wherever one is asked for; nobody else may choose it as one.
MUNGE = b"munge://"
_TIMEOUT_S = 10.0


def works() -> bool:
    """Whether munged answers here."""
    return shutil.which("munge") is not None and shutil.which("unmunge") is not None and bool(prove("works"))


def prove(digest: str) -> str:
    """A credential over `digest` that only our own user can open; "" if munged doesn't answer."""
    made = _run(["munge", "--restrict-uid", str(os.getuid())], digest)
    return made.strip() if made.startswith("MUNGE:") else ""


def is_proof(credential: str, digest: str) -> bool:
    """Whether a process of our own user, on any node of the cluster, made this credential over `digest`."""
    if not credential.startswith("MUNGE:"):
        return False
    opened = _run(["unmunge"], credential)
    about, _, payload = opened.partition("\n\n")
    status = re.search(r"^STATUS:\s+Success\b", about, re.MULTILINE)
    by = re.search(r"^UID:\s+\S+ \((\d+)\)", about, re.MULTILINE)
    return bool(status and by and int(by[1]) == os.getuid() and payload.strip() == digest)


def _run(argv: list[str], given: str) -> str:
    """What the command says; "" if it fails, which is no proof."""
    try:
        done = subprocess.run(
            argv, input=given, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
