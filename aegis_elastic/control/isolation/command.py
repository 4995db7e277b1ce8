"""Isolation by a program of the user's own, without a shell; and the running of programs for other
drivers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aegis_elastic.control.isolation.contract import Outcome

PLACES = ("{node}", "{reason}", "{action}")
# A reason fits in this many bytes; the rest of the output is dropped.
OUTPUT_BYTES_MAX = 65536
OUTPUT_CHARS_MAX = 200
# Of our own environment a program gets what it needs to be found and to find its configuration, no secrets.
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "TMPDIR", "KUBECONFIG")
PASSED_ON_PREFIXES = ("SLURM_", "LD_LIBRARY_")
SECRETS = ("SLURM_JWT",)
# What was killed is gone in a moment, unless it waits for a dead device or file server.
END_S = 5.0
# Asks to be killed with us and becomes the program. A program of its own: the same lines in a `preexec_fn`
# make Python fork, and in a fork of a process with gRPC's threads anything may hang, the master with it.
_START_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""

logger = logging.getLogger(__name__)


class Ran(NamedTuple):
    """How a program ended. `code` None: it was ended by us at its timeout. `output`: both streams, cut
    off.
    """

    code: int | None
    output: str

    @property
    def why(self) -> str:
        """The failure in words; "" after success."""
        output = " ".join(self.output.split())[-OUTPUT_CHARS_MAX:]
        if self.code is None:
            return f"no answer in time{f', it had said: {output}' if output else ''}"
        how = f"exit code {self.code}" if self.code >= 0 else f"signal {-self.code}"
        return f"{how}{f': {output}' if output else ''}" if self.code else ""


class Command:
    """`command:ARGV...`: one argument vector with `{node}`, and perhaps `{reason}` and `{action}`, in it.

    `{action}` is "isolate" or "release"; a program that doesn't ask for it is never called to release.
    """

    name = "command"

    def __init__(self, template: Sequence[str], timeout_s: float) -> None:
        """ValueError if there is no such program."""
        if shutil.which(template[0]) is None:
            raise ValueError(f"cannot use the command {template[0]!r}: there is no such program here")
        self._template = tuple(template)
        self._timeout_s = timeout_s

    async def isolate(self, node: str, reason: str) -> Outcome:
        """See `Driver.isolate`."""
        return await self._call("isolate", node, reason)

    async def release(self, node: str) -> Outcome:
        """See `Driver.release`."""
        if not any("{action}" in word for word in self._template):
            return Outcome(False, f"the command can only isolate: release {node} yourself, or use {{action}}")
        return await self._call("release", node, "")

    async def _call(self, action: str, node: str, reason: str) -> Outcome:
        filled = [
            _filled(word, {"node": node, "reason": reason, "action": action}) for word in self._template
        ]
        ran = await run(filled, self._timeout_s)
        if ran.why:
            return Outcome(False, f"{filled[0]} did not {action} {node}: {ran.why}")
        return Outcome(True, f"{filled[0]} was asked to {action} {node}")


async def run(argv: Sequence[str], timeout_s: float, also: Sequence[str] = ()) -> Ran:
    """Run a program to its end, or end it, with all that it started, at its timeout. OSError: no start.

    `also`: what it gets of our environment besides what every program gets.
    """
    if shutil.which(argv[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _START_WITH_PARENT, str(os.getpid()), *argv),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment(os.environ, also),
        start_new_session=True,
    )
    assert process.stdout is not None
    output = bytearray()

    async def to_the_end() -> int:
        assert process.stdout is not None
        while chunk := await process.stdout.read(4096):
            output.extend(chunk[: OUTPUT_BYTES_MAX - len(output)])
        return await process.wait()

    code: int | None = None
    try:
        code = await asyncio.wait_for(to_the_end(), timeout_s)
    except asyncio.TimeoutError:
        pass  # `code` None says so.
    finally:
        if code is None:
            await _end(process)
    return Ran(code, output.decode(errors="replace"))


def environment(ours: Mapping[str, str], also: Sequence[str]) -> dict[str, str]:
    """What a program gets of our environment."""
    return {
        name: value
        for name, value in ours.items()
        if name in PASSED_ON or name in also or (name.startswith(PASSED_ON_PREFIXES) and name not in SECRETS)
    }


def _filled(word: str, values: Mapping[str, str]) -> str:
    # One pass, so that braces in a reason are nobody's placeholders.
    out, rest = "", word
    while rest:
        place = next((place for place in PLACES if rest.startswith(place)), None)
        out += values[place[1:-1]] if place else rest[0]
        rest = rest[len(place or "x") :]
    return out


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill what the program leads: it may be gone itself while its children live, and hold its output."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of it has ended meanwhile
    except PermissionError:
        logger.warning("cannot end process %d: it runs as another user", process.pid)
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except asyncio.TimeoutError:
        logger.warning("process %d does not end; it is left alone", process.pid)
