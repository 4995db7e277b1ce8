"""Asking NVML, and what an answer amounts to: the common ground of the gpu check's probes.

Drivers and cards differ in what they know. A question that one doesn't know has the answer None, which is
never a fault; errors that only a broken card gives go up to whoever examines it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pynvml

from aegis_elastic.checks.contract.child_process import Scalar

# Errors that speak of the card or of its driver. All others speak of the question: not supported, not in this
# library, not with these rights, no such link, another version of the structure.
CARD_ERRORS = frozenset(
    {
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_INSUFFICIENT_POWER,
        pynvml.NVML_ERROR_IRQ_ISSUE,
        pynvml.NVML_ERROR_CORRUPTED_INFOROM,
        pynvml.NVML_ERROR_OPERATING_SYSTEM,
        pynvml.NVML_ERROR_TIMEOUT,
        pynvml.NVML_ERROR_UNKNOWN,
    }
)

# The vendor's words for what to do, the gravest first: take the node out and replace the part; give it no new
# work and have an operator restart its services or the node; reset the GPU; restart the application; look.
ADVICE = ("isolate", "drain", "reset", "restart", "watch")
# Hardware decides whether the node may stay, so it comes before all else; a card that is only slow, last.
SCOPES = ("hardware", "node", "software", "unknown", "slow")


class Problem(NamedTuple):
    """A finding about one card: code, whose fault (`SCOPES`), words for a person, the vendor's `ADVICE`."""

    finding: str
    scope: str
    text: str
    advice: str

    @property
    def gravity(self) -> tuple[int, int]:
        """Sorts the gravest problem first."""
        return SCOPES.index(self.scope), ADVICE.index(self.advice)


@dataclass(frozen=True)
class Card:
    """One GPU under examination.

    `bus` is its PCI address as the kernel log writes it ("0000:1b:00"), "" if unknown. `facts` collects what
    was read, for the details and for the next check; `before` is what the last check had read.
    """

    index: int
    handle: object
    bus: str
    facts: dict[str, Scalar]
    before: Mapping[str, Scalar]

    def grown(self, counter: str, value: int) -> int:
        """Notes a counter, and says by how much it grew since the last check (0 if there was none)."""
        self.facts[counter] = value
        then = self.before.get(counter)
        if not isinstance(then, int) or isinstance(then, bool):
            return 0
        return value - then if value >= then else value  # below its last value it was reset in between


Probe = Callable[[Card], "list[Problem]"]


def ask(question: Callable[..., Any], *arguments: object) -> Any:
    """The answer, or None where card or driver don't know the question. Raises NVMLError of `CARD_ERRORS`."""
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error.value in CARD_ERRORS:
            raise
        return None


def field(handle: object, number: int | None) -> int | None:
    """The value of one of NVML's numbered 32-bit fields; None if card, driver or client don't know it."""
    if number is None:
        return None
    values = ask(pynvml.nvmlDeviceGetFieldValues, handle, [number])
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    value = values[0].value
    return int(value.siVal if values[0].valueType == pynvml.NVML_VALUE_TYPE_SIGNED_INT else value.uiVal)
