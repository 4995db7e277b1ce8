"""Entries, changes, errors and the limits of keys and values, shared by all stores."""

import re
from collections.abc import Callable
from typing import NamedTuple

KEY_CHARS_MAX = 512
VALUE_BYTES_MAX = 1024 * 1024 - 4096
_KEY = re.compile(r"[A-Za-z0-9_=-]+(\.[A-Za-z0-9_=-]+)*")


class StoreError(Exception):
    """Base of the errors of the stores."""


class StoreUnavailable(StoreError):
    """The machine's fault: no answer in time. Whether a write took effect is unknown: read, then decide."""


class KeyExists(StoreError):
    """The key that was to be created exists."""


class RevisionConflict(StoreError):
    """The key no longer has the revision that the change was based on."""


class LeaseLost(StoreError):
    """The lease is not ours any more."""


class BadKey(StoreError, ValueError):
    """Our own fault: a key, prefix or value that no store accepts. Escape foreign names with
    `bus.subjects.escape`.
    """


class Entry(NamedTuple):
    """A key's value, and the revision at which it was written."""

    key: str
    value: bytes
    revision: int


class Change(NamedTuple):
    """A change that a watch reports: the key's newest entry, None if it is gone."""

    key: str
    entry: Entry | None


def check_key(key: str) -> None:
    """Raise BadKey unless `key` is dotted tokens of `[A-Za-z0-9_=-]`, 512 characters at most."""
    if not _KEY.fullmatch(key) or len(key) > KEY_CHARS_MAX:
        raise BadKey(
            f"cannot use {key[:80]!r} as a key: want dot-separated tokens of [A-Za-z0-9_=-], "
            f"{KEY_CHARS_MAX} characters at most"
        )


def check_prefix(prefix: str) -> None:
    """Raise BadKey unless `prefix` is "" or a key."""
    if prefix:
        check_key(prefix)


def check_value(key: str, value: bytes) -> None:
    """Raise BadKey if the key or the size of the value is out of bounds."""
    check_key(key)
    if len(value) > VALUE_BYTES_MAX:
        raise BadKey(f"cannot store {len(value)} bytes under {key}: the limit is {VALUE_BYTES_MAX}")


def check_ttl(key: str, ttl_s: float) -> None:
    """Raise ValueError for a lease shorter than a second: stores count in whole seconds."""
    if not ttl_s >= 1:
        raise ValueError(f"cannot lease {key} for {ttl_s} s: want 1 s at least")


def below(prefix: str) -> Callable[[str], bool]:
    """Return the test whether a key lies below `prefix`."""
    return (lambda key: key.startswith(prefix + ".")) if prefix else (lambda key: True)
