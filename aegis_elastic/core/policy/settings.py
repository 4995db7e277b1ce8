"""Settings of the policy for automatic actions, with their defaults; from `aegis.toml` and flags.

```toml
mode = "act"            # "observe": decide, journal and page, but do nothing to a node

[guard]
persistence_s = 180     # every setting of `Guard` by its name
```

The figures are those of the specification, section 11. All times in seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_type_hints

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0, le=30 * 86400)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=30 * 86400)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1000)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

Mode = Literal["act", "observe"]


class BadPolicy(ValueError):
    """A policy that can't be used; the text names the setting, its value, and what would be right."""


class Guard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of the storm guard, in the order in which its rules use them."""

    observations: Count = 2
    heartbeat_stale_s: Positive = 120.0
    error_state_s: Positive = 1800.0
    persistence_s: Seconds = 180.0
    cooldown_s: Seconds = 600.0
    actions_per_day: Count = 3
    lock_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 60.0
    act_timeout_s: Positive = 300.0
    escalation_s: Positive = 600.0
    look_s: Positive = 5.0
    brake_share: Share = 0.3
    brake_nodes: Count = 2
    brake_window_s: Positive = 600.0
    hold_max_s: Positive = 3600.0
    probe_s: Positive = 5.0
    release_jitter_s: Seconds = 10.0


# What each setting means, for `aegis-run -h` and the documentation; a test holds that none is missing.
ABOUT = {
    "observations": "bad observations in a row before a condition counts at all",
    "heartbeat_stale_s": "how long a process that tells of no steps may stand still before it is frozen",
    "error_state_s": "how long a recovery may last before a human is called",
    "persistence_s": "how long a condition must hold before anything is done about it",
    "cooldown_s": "how long after an action of ours a node's trouble counts as its consequence",
    "actions_per_day": "guarded actions a node in 24 hours; then alerts only",
    "lock_s": "life of the lock on a node whose holder has died",
    "act_timeout_s": "how long an action may take before it counts as failed",
    "escalation_s": "how long after an action a condition may last before a human is called",
    "look_s": "how often a condition that lasts is looked at again",
    "brake_share": "share of the nodes that may fail together before it is not the nodes' fault",
    "brake_nodes": "how many nodes that must be at least",
    "brake_window_s": "within which time failures count as together",
    "hold_max_s": "how long a recovery waits at most for something that everybody depends on",
    "probe_s": "how often one node looks whether that is there again",
    "release_jitter_s": "within which time after that jobs go on, each at a moment of its own",
}


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything in a policy file."""

    mode: Mode = "act"
    guard: Guard = msgspec.field(default_factory=Guard)


# The type of each setting without its bounds: int or float.
SETTINGS: dict[str, type] = get_type_hints(Guard)


def parse(content: bytes, name: str) -> Policy:
    """The policy in a TOML file called `name`, or BadPolicy."""
    try:
        return msgspec.toml.decode(content, type=Policy)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadPolicy(f"cannot use the policy {name}: {_plain_text(str(error))}") from error


def with_changes(policy: Policy, changes: dict[str, Any], mode: Mode | None = None) -> Policy:
    """The policy with some settings of its guard replaced, or BadPolicy."""
    try:
        guard = msgspec.convert({**msgspec.structs.asdict(policy.guard), **changes}, Guard)
    except msgspec.ValidationError as error:
        raise BadPolicy(
            f"cannot use the guard's settings (--aegis-guard-...): {_plain_text(str(error))}"
        ) from error
    return Policy(mode or policy.mode, guard)


def defaults() -> dict[str, float]:
    """Every setting of the guard with its default."""
    return msgspec.structs.asdict(Guard())


def flag_of(setting: str) -> str:
    """The flag of `aegis-run` for a setting of the guard."""
    return f"guard-{setting.replace('_', '-')}"


def _plain_text(text: str) -> str:
    """msgspec's error text, with the path as a person writes it; lists the settings if one is unknown."""
    text = text.replace("`$.guard.", "`").replace("`$.", "`").replace(" - at `", " for `")
    if "unknown field" in text:
        text += f"; there are mode, and in [guard]: {', '.join(SETTINGS)}"
    return text
