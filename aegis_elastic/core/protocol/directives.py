"""What the master says to one worker alone, on its own order subject: about its place in the job, not
about its work.
"""

from __future__ import annotations

import msgspec

from aegis_elastic.core.accounts.report import Report
from aegis_elastic.core.protocol.messages import MESSAGE_BYTES_MAX, BadMessage


class _Directive(msgspec.Struct, frozen=True, tag_field="word", rename="camel"):
    """Base: `uid` is the life of the agent that is meant; another life ignores it."""

    uid: str


class JwtRenewal(_Directive, tag="renewal", frozen=True, rename="camel"):
    """A newer JWT for the bus, before the old one runs out. It is no secret: it is worth nothing without
    the key.
    """

    jwt: str


class Dismissal(_Directive, tag="dismissal", frozen=True, rename="camel"):
    """Leave the job: `reason` says why (a faulty or tainted node, or the job has ended)."""

    reason: str


class Rejoin(_Directive, tag="recall", frozen=True, rename="camel"):
    """Make first contact again: the master doesn't know this life of the agent."""

    reason: str


class Reexec(_Directive, tag="renew", frozen=True, rename="camel"):
    """Execute yourself again in a clean process, under the same name (level 2)."""

    reason: str


class OperatorCheck(_Directive, tag="look", frozen=True, rename="camel"):
    """An operator wants this node looked at, beside whatever it does: run `checks`, or load its devices for
    `burn_s` seconds. `look` names the request; `world` (the fields of `checks.contract.request.World`) is
    where the collective checks meet.
    """

    check_id: str = msgspec.field(name="look")
    checks: tuple[str, ...] = ()
    budgets_s: dict[str, float] = {}
    burn_s: float = 0.0
    world: dict[str, int | str] = {}


class FinalReport(_Directive, tag="finalReport", frozen=True, rename="camel"):
    """The job's report, sent to everybody just before the order to close."""

    report: Report


Directive = JwtRenewal | Dismissal | Rejoin | Reexec | OperatorCheck | FinalReport

_decoder = msgspec.json.Decoder(Directive)


def encode(directive: Directive) -> bytes:
    """The word as JSON."""
    return msgspec.json.encode(directive)


def decode(raw: bytes) -> Directive:
    """The word in these bytes, or BadMessage."""
    if len(raw) > MESSAGE_BYTES_MAX:
        raise BadMessage(f"cannot read {len(raw)} bytes: a word has at most {MESSAGE_BYTES_MAX}")
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"cannot read the master's word: {error}") from error
