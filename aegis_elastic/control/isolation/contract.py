"""What every isolation driver promises, whichever scheduler is behind it.

A driver is called with the node's name and a reason. It never raises for what the scheduler answers or
doesn't answer: that is in the `Outcome`, since a failed isolation is to be paged and tried again. It is
idempotent: a node that is out already is a success.
"""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple, Protocol

from aegis_elastic.core.policy.node_records import clip

TIMEOUT_S = 30.0
# What hosts are called everywhere; it begins with no dash, so that no program takes it for an option.
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
# Schedulers show reasons on one line; an equals sign or a quote could be taken for another field there.
_UNSAFE = re.compile(r"[^A-Za-z0-9 .,:;()/_+#%-]")
REASON_CHARS_MAX = 160
MARK = "aegis:"


class Outcome(NamedTuple):
    """Whether the node is now as it was to be, and in words what was done or why not."""

    ok: bool
    message: str


class Driver(Protocol):
    """One way to take a node out and to give it back."""

    name: str

    async def isolate(self, node: str, reason: str) -> Outcome:
        """Have nothing more scheduled on this node."""

    async def release(self, node: str) -> Outcome:
        """Take our own isolation back; one that is somebody else's stays."""


class DryRun:
    """A driver that answers what the other would do, and does nothing."""

    def __init__(self, driver: Driver) -> None:
        self.name = driver.name

    async def isolate(self, node: str, reason: str) -> Outcome:
        """See `Driver.isolate`."""
        return Outcome(True, f"dry run: {self.name} would isolate {node} ({reason})")

    async def release(self, node: str) -> Outcome:
        """See `Driver.release`."""
        return Outcome(True, f"dry run: {self.name} would release {node}")


def unfit(node: str) -> str:
    """Why this node's name is given to no scheduler; "" if it is fine."""
    if _NODE.fullmatch(node):
        return ""
    return f"cannot name {clip(node)!r} to a scheduler: want letters, digits, dots and dashes"


def safe_reason(reason: str) -> str:
    """The reason with our mark before it, as it can stand on any command line and in any list."""
    words = " ".join(_UNSAFE.sub(" ", clip(reason)).split())
    return f"{MARK} {words}"[:REASON_CHARS_MAX].rstrip()


async def call_driver(one: Driver, action: str, node: str, reason: str) -> Outcome:
    """Have a driver `isolate` or `release`, or say why its name can't be used. Never raises an Exception."""
    why = unfit(node)
    if why:
        return Outcome(False, why)
    try:
        if action == "release":
            return await one.release(node)
        return await one.isolate(node, safe_reason(reason))
    except asyncio.CancelledError:
        raise
    except Exception as error:  # noqa: BLE001 - a driver's fault is an outcome, and must end nothing of ours
        return Outcome(False, f"{one.name} broke: {type(error).__name__}: {error}")
