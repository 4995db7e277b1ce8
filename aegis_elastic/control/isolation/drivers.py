"""From the name of an isolation driver, as users give it, to the driver."""

from __future__ import annotations

import shlex

from aegis_elastic.control.isolation.api_server import Client, from_pod
from aegis_elastic.control.isolation.command import Command
from aegis_elastic.control.isolation.contract import TIMEOUT_S, Driver, DryRun
from aegis_elastic.control.isolation.file import NodeFile
from aegis_elastic.control.isolation.kubernetes import Kubernetes, workload
from aegis_elastic.control.isolation.slurm import Slurm

NAMES = "slurm, kubernetes[:WORKLOAD], file:PATH, command:ARGV, none"


def parse(named: str) -> tuple[str, str]:
    """Kind and the rest of a driver's name. ValueError if nothing is called that, wherever it is used."""
    kind, _, rest = named.partition(":")
    bare, full = ("none", "slurm", "kubernetes"), ("kubernetes", "file", "command")
    if kind not in (full if rest else bare):
        raise ValueError(f"{named!r} is no isolation driver: want one of {NAMES}")
    if kind == "kubernetes":
        workload(rest)
    if kind == "command":
        _words(rest)
    return kind, rest


def make(named: str, *, dry_run: bool = False, timeout_s: float = TIMEOUT_S) -> Driver | None:
    """The driver of that name; None for "none". ValueError if it can't be used here."""
    kind, rest = parse(named)
    driver: Driver
    if kind == "none":
        return None
    if kind == "slurm":
        driver = Slurm(timeout_s)
    elif kind == "kubernetes":
        driver = Kubernetes(Client(from_pod("isolate with kubernetes"), timeout_s), workload(rest))
    elif kind == "file":
        driver = NodeFile(rest, timeout_s)
    else:
        driver = Command(_words(rest), timeout_s)
    return DryRun(driver) if dry_run else driver


def _words(template: str) -> list[str]:
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise ValueError(f"cannot read the command {template!r}: {error}") from None
    if not any("{node}" in word for word in words[1:]):
        raise ValueError(
            f"cannot use the command {template!r}: want {{node}} among its arguments (and {{reason}} or "
            "{action} where they are wanted)"
        )
    return words
