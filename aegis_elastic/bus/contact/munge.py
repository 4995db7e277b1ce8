"""Proofs by munge, which authenticates users among the nodes of a Slurm cluster.

No secret has to be distributed: a credential that a process of this user makes on one node is decoded by
munged on another, which names the user. It takes the place of a MAC with the join secret; `unmunge` accepts a
credential once and for five minutes, so none can be replayed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

# Stands for munge in the place of a join secret; no real secret may be this.
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
    decoded = _run(["unmunge"], credential)
    header, _, payload = decoded.partition("\n\n")
    status = re.search(r"^STATUS:\s+Success\b", header, re.MULTILINE)
    uid = re.search(r"^UID:\s+\S+ \((\d+)\)", header, re.MULTILINE)
    return bool(status and uid and int(uid[1]) == os.getuid() and payload.strip() == digest)


def _run(argv: list[str], text: str) -> str:
    """The command's output; "" if it fails, which is no proof."""
    try:
        done = subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
