"""Level 2: the launcher executes itself again, a clean process under the same name.

Its process id stays, so whoever waits for it (a shell, a scheduler) notices nothing; memory, threads, loaded
libraries and the devices that they hold go. Two descriptors are handed on, since letting them go would let
others in between: the lock on the worker's name, and the hold on the plane, which would else end with its
last holder. What else the new process must know to be the same worker is in one variable, which it removes
before anybody else sees it; the rest it reads from the same command line and the environment of the start.
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
_FIRST = 3  # behind stdin, stdout and stderr


class Legacy(msgspec.Struct, frozen=True, rename="camel"):
    """What the new process has of the old one. Descriptors are -1 where there was none.

    `run_id` and `port` matter where nobody chose them: a job of one node that takes any free port.
    """

    worker: str
    lock: int
    hold: int
    job_name: str
    run_id: str
    port: int


def take(environment: MutableMapping[str, str]) -> Legacy | None:
    """What the process that we were has left; None at a first start. Removes the variable."""
    text = environment.pop(VARIABLE, "")
    if not text:
        return None
    try:
        legacy = msgspec.json.decode(text, type=Legacy)
    except msgspec.DecodeError:
        return None  # Somebody else's idea: nothing that was handed on to us.
    for fd in (legacy.lock, legacy.hold):
        with contextlib.suppress(OSError):
            os.set_inheritable(fd, False)
    return legacy


def same_job(options: Options, legacy: Legacy) -> Options:
    """The options as the process that we were had them, where they are made up at every start."""
    config = replace(options.config, run_id=legacy.run_id)
    endpoint = replace(options.endpoint, port=legacy.port)
    return replace(options, config=config, endpoint=endpoint, job_name=legacy.job_name)


def descriptors() -> frozenset[int]:
    """The open descriptors that a program executed now would get, beside the three standard ones."""
    return frozenset(fd for fd in _open() if fd >= _FIRST and os.get_inheritable(fd))


def execute(legacy: Legacy, given: frozenset[int]) -> NoReturn:
    """Become the clean process. `given`: the descriptors that we got at our own start, which it gets, too.

    OSError if the program can't be executed; then we are still who we were.
    """
    kept = frozenset(fd for fd in (legacy.lock, legacy.hold) if fd >= 0)
    for fd in descriptors() - given:
        with contextlib.suppress(OSError):  # closed meanwhile
            os.set_inheritable(fd, False)
    for fd in kept:
        os.set_inheritable(fd, True)
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**_first_environment(), VARIABLE: msgspec.json.encode(legacy).decode()}
    os.execve(sys.executable, sys.orig_argv, environment)


def _open() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):  # that of the listing itself
            os.fstat(fd)
            yield fd


def _first_environment() -> Mapping[str, str]:
    """The environment of our start: what we have set since was for ourselves."""
    pairs = (part.partition(b"=") for part in Path("/proc/self/environ").read_bytes().split(b"\0") if part)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
