"""Level 2: the launcher executes itself again (execve), a clean process under the same worker name.

Its process id stays, so whoever waits for it (a shell, a scheduler) notices nothing; memory, threads, loaded
libraries and the devices that they hold are released. Two descriptors are inherited, since closing them would
let others in between: the lock on the worker's name, and the socket that keeps the plane alive, which would
end with its last holder. What else the new process must know is in one variable, which it removes from its
environment at once; the rest it reads from the same command line and the environment of the first start.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec

from aegis_elastic.launch.flags.options import Options

VARIABLE = "AEGIS_RENEWED"
_FIRST_FD = 3  # behind stdin, stdout and stderr


class Handover(msgspec.Struct, frozen=True, rename="camel"):
    """What the new process gets from the old one. Descriptors are -1 where there was none.

    `run_id` and `port` matter where nobody chose them: a job of one node that takes any free port.
    """

    worker: str
    lock_fd: int = msgspec.field(name="lock")
    plane_fd: int = msgspec.field(name="hold")
    job_name: str
    run_id: str
    port: int


def take_handover(environment: MutableMapping[str, str]) -> Handover | None:
    """What the process before us handed over; None at a first start. Removes the variable."""
    text = environment.pop(VARIABLE, "")
    if not text:
        return None
    try:
        handover = msgspec.json.decode(text, type=Handover)
    except msgspec.DecodeError:
        return None  # set by someone else: nothing was handed over
    for fd in (handover.lock_fd, handover.plane_fd):
        with contextlib.suppress(OSError):
            os.set_inheritable(fd, False)
    return handover


def same_job(options: Options, handover: Handover) -> Options:
    """The options with what is generated at every start (run id, free port, job name) as before."""
    config = replace(options.config, run_id=handover.run_id)
    endpoint = replace(options.endpoint, port=handover.port)
    return replace(options, config=config, endpoint=endpoint, job_name=handover.job_name)


def inheritable_fds() -> frozenset[int]:
    """The open descriptors that an executed program would inherit, without stdin, stdout and stderr."""
    return frozenset(fd for fd in _open_fds() if fd >= _FIRST_FD and os.get_inheritable(fd))


def execute(handover: Handover, inherited_fds: frozenset[int]) -> NoReturn:
    """Become the clean process. `inherited_fds`: the descriptors that we got at our own start, which it gets,
    too.

    OSError if the program can't be executed; nothing has changed then.
    """
    kept = frozenset(fd for fd in (handover.lock_fd, handover.plane_fd) if fd >= 0)
    for fd in inheritable_fds() - inherited_fds:
        with contextlib.suppress(OSError):  # closed meanwhile
            os.set_inheritable(fd, False)
    for fd in kept:
        os.set_inheritable(fd, True)
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**_first_environment(), VARIABLE: msgspec.json.encode(handover).decode()}
    os.execve(sys.executable, sys.orig_argv, environment)


def _open_fds() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.fstat(fd)
            yield fd


def _first_environment() -> Mapping[str, str]:
    """The environment of our first start: what we have set since was for this process only."""
    pairs = (part.partition(b"=") for part in Path("/proc/self/environ").read_bytes().split(b"\0") if part)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
