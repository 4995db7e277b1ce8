"""Directives: what the master sends to one worker on that worker's order subject, about its place in the job.

What all workers are to do is an order (`core.protocol.orders`).
"""

from __future__ import annotations

import msgspec

from aegis_elastic.core.accounts.report import Report
from aegis_elastic.core.protocol.messages import MESSAGE_BYTES_MAX, BadMessage


class _Directive(msgspec.Struct, frozen=True, tag_field="word", rename="camel"):
    """Base: `uid` names the addressed life of the agent; any other life ignores the directive."""

    uid: str


class JwtRenewal(_Directive, tag="renewal", frozen=True, rename="camel"):
    """A newer JWT for the bus, before the old one expires. No secret: it is worthless without the key."""

    jwt: str


class Dismissal(_Directive, tag="dismissal", frozen=True, rename="camel"):
    """Leave the job, because of `reason`: a faulty or tainted node, or the job has ended."""

    reason: str


class Rejoin(_Directive, tag="recall", frozen=True, rename="camel"):
    """Make first contact again: the master doesn't know this life of the agent."""

    reason: str


class Reexec(_Directive, tag="renew", frozen=True, rename="camel"):
    """Execute yourself again in a clean process, under the same name (level 2)."""

    reason: str


class OperatorCheck(_Directive, tag="look", frozen=True, rename="camel"):
    """An operator check of this node, beside its other work: run `checks` within `budgets_s` (seconds by
    check), or load its devices for `burn_s` seconds.

    `check_id` names the request; `world` (the fields of `checks.contract.request.World`) is where collective
    checks form their process group.
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
    """The directive as JSON."""
    return msgspec.json.encode(directive)


def decode(raw: bytes) -> Directive:
    """The directive in these bytes. Raises BadMessage for anything else."""
    if len(raw) > MESSAGE_BYTES_MAX:
        raise BadMessage(f"cannot read {len(raw)} bytes: a directive has at most {MESSAGE_BYTES_MAX}")
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"cannot read a directive: {error}") from error
