"""The flags of `aegis-run` about automatic actions: the policy, the guard's settings, and paging."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.core.policy import settings
from aegis_elastic.core.policy.settings import BadPolicy, Policy
from aegis_elastic.observe.paging import NOTIFY_ENV, BadTarget, targets_of

POLICY_FILE = "aegis.toml"


def add_guard_flags(add: Callable[..., None], path: Callable[[str], Path]) -> None:
    """Declare them. `add` and `path` as in `launch.flags.group`."""
    add(
        "policy",
        "A policy file (TOML) with limits on automatic actions. The default is ./aegis.toml, if it is "
        "there. Flags override the file.",
        type=path,
        metavar="FILE",
    )
    add(
        "policy-mode",
        "`observe` decides, writes into the journal and pages, but does nothing to a node that hangs or is "
        "slow; `act` does. The brake for correlated failures works under both. The default is act.",
        choices=("act", "observe"),
    )
    add(
        "notify",
        "Where humans are called: https://... gets each page as JSON; other URLs are apprise's (extra "
        "`notify`). Best as @FILE with one a line, or in AEGIS_NOTIFY: an address is a secret.",
        metavar="URL|@FILE",
    )
    for setting, default in settings.defaults().items():
        kind = settings.SETTINGS[setting]
        add(
            settings.flag_of(setting),
            f"The guard's setting {setting}: {settings.ABOUT[setting]}. The default is {default:g}.",
            type=_number(kind),
            metavar="SECONDS" if setting.endswith("_s") else "SHARE" if kind is float else "N",
        )


def is_ours(name: str) -> bool:
    """Whether this is the name of one of these flags in a namespace."""
    return name in ("aegis_policy", "aegis_policy_mode", "aegis_notify") or name.startswith("aegis_guard_")


def read(args: argparse.Namespace, environment: Mapping[str, str]) -> tuple[Policy, tuple[str, ...]]:
    """The policy that the flags and the file give, and the addresses for pages. UsageError."""
    changes = {
        setting: value
        for setting in settings.SETTINGS
        if (value := getattr(args, f"aegis_guard_{setting}")) is not None
    }
    # A variable, unlike a command line, is not visible to everybody.
    given = args.aegis_notify if args.aegis_notify != environment.get(NOTIFY_ENV) else None
    try:
        made = settings.with_changes(_from_file(args.aegis_policy), changes, args.aegis_policy_mode)
        return made, targets_of(given, environment)
    except (BadPolicy, BadTarget) as error:
        raise UsageError(str(error)) from error


def load(path: Path) -> Policy:
    """The policy in this file. UsageError."""
    try:
        return settings.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"cannot read the policy {path}: {error.strerror or error}") from error
    except BadPolicy as error:
        raise UsageError(str(error)) from error


def _from_file(named: Path | None) -> Policy:
    if named is None and not os.path.exists(POLICY_FILE):
        return Policy()
    return load(named or Path(POLICY_FILE))


def _number(kind: type) -> Callable[[str], Any]:
    wanted = "a whole number" if kind is int else "a number"

    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None

    return convert
