"""Subjects of the bus, and the escape that makes any name one token.

NATS matches whole dot-separated tokens, so namespace, job and worker must each be exactly one token: a name
with `.`, `*`, `>` or white space could otherwise match another job's subjects. `escape` turns any
non-empty text into one token of `[A-Za-z0-9_=-]`, which is also what JetStream's key-value keys allow;
`unescape` undoes it.
"""

import re

_ROOT = "aegis"
_INBOX_ROOT = "_INBOX"
_ALL = "all"
# The token of a worker that is called `all`: its orders must not go to all, nor theirs to it only.
_NAMED_ALL = "=61ll"
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_ESCAPED = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")
_USER_KEY = re.compile(r"U[A-Z2-7]{55}")


def escape(name: str) -> str:
    """Return `name` as one subject token; bytes of its UTF-8 form outside `[A-Za-z0-9_-]` become `=XX`.

    Raises ValueError for an empty name (an empty token is not a token) and for lone surrogates.
    """
    if not name:
        raise ValueError("cannot make a subject of an empty name: give at least one character")
    return "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in name.encode())


def unescape(token: str) -> str:
    """Return the name that `escape` turns into `token`; ValueError if there is none."""
    if not _ESCAPED.fullmatch(token):
        raise ValueError(f"cannot read {token!r}: not an escaped name ([A-Za-z0-9_-] and =XX)")
    parts = token.split("=")
    raw = parts[0].encode() + b"".join(bytes([int(part[:2], 16)]) + part[2:].encode() for part in parts[1:])
    name = raw.decode(errors="replace")
    if escape(name) != token:
        raise ValueError(f"cannot read {token!r}: no name is escaped like that")
    return name


def order_all(ns: str, job: str) -> str:
    """Subject of the master's orders to every worker of a job."""
    return f"{_ROOT}.{escape(ns)}.{escape(job)}.order.{_ALL}"


def order(ns: str, job: str, worker: str) -> str:
    """Subject of the master's orders to one worker."""
    return f"{_ROOT}.{escape(ns)}.{escape(job)}.order.{_worker(worker)}"


def report(ns: str, job: str, worker: str) -> str:
    """Subject of one worker's reports."""
    return f"{_ROOT}.{escape(ns)}.{escape(job)}.report.{_worker(worker)}"


def report_wildcard(ns: str, job: str) -> str:
    """Subject that matches the reports of every worker of a job and nothing else."""
    return f"{_ROOT}.{escape(ns)}.{escape(job)}.report.*"


def worker_of_report(subject: str) -> str:
    """Return the worker whose report subject this is; ValueError for any other subject."""
    tokens = subject.split(".")
    if len(tokens) != 5 or tokens[0] != _ROOT or tokens[3] != "report":
        raise ValueError(f"cannot tell the worker of {subject!r}: want {_ROOT}.<ns>.<job>.report.<worker>")
    return _ALL if tokens[4] == _NAMED_ALL else unescape(tokens[4])


def inbox(user_public_key: str) -> str:
    """Prefix of the inboxes of one user, named by the key that only it can sign for."""
    if not _USER_KEY.fullmatch(user_public_key):
        raise ValueError(
            f"cannot name an inbox after {user_public_key!r}: not the public half of a user NKey"
        )
    return f"{_INBOX_ROOT}.{user_public_key}"


def is_inbox(subject: str) -> bool:
    """Whether `subject` is an inbox of some user.

    The sender chooses the reply subject: who answers with more rights than the sender has must check it, or
    can be made to publish anywhere.
    """
    tokens = subject.split(".")
    return len(tokens) >= 3 and tokens[0] == _INBOX_ROOT and _USER_KEY.fullmatch(tokens[1]) is not None


def _worker(worker: str) -> str:
    return _NAMED_ALL if worker == _ALL else escape(worker)
