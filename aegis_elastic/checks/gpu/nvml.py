"""Queries of NVML, and the values that all probes of the gpu check share.

Drivers and GPUs differ in what they support. An unsupported query returns None, which is never a fault;
errors that only a broken GPU gives are raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pynvml

from aegis_elastic.checks.contract.child_process import Scalar

# Errors of the GPU or of its driver. All others are about the query: not supported, not in this library, not
# with these rights, no such link, another version of the structure.
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

# The vendor's advice, the gravest first: take the node out and replace the part; give it no new work and have
# an operator restart its services or the node; reset the GPU; restart the application; monitor it.
ADVICE = ("isolate", "drain", "reset", "restart", "watch")
# The gravest first: hardware decides whether the node may stay; a GPU that is only slow comes last.
SCOPES = ("hardware", "node", "software", "unknown", "slow")


class Problem(NamedTuple):
    """A finding about one GPU: code, scope (`SCOPES`), text for people, the vendor's `ADVICE`."""

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
    was read, for the details and for the next check; `previous` has the facts of the last check.
    """

    index: int
    handle: object
    bus: str
    facts: dict[str, Scalar]
    previous: Mapping[str, Scalar]

    def grown(self, counter: str, value: int) -> int:
        """Records a counter; returns its growth since the last check (0 if there was none)."""
        self.facts[counter] = value
        then = self.previous.get(counter)
        if not isinstance(then, int) or isinstance(then, bool):
            return 0
        return value - then if value >= then else value  # below its last value it was reset in between


Probe = Callable[[Card], "list[Problem]"]


def query(function: Callable[..., Any], *arguments: object) -> Any:
    """The result, or None if GPU or driver don't support the query. Raises NVMLError of `CARD_ERRORS`."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in CARD_ERRORS:
            raise
        return None


def field(handle: object, number: int | None) -> int | None:
    """The value of one of NVML's numbered 32-bit fields; None if GPU, driver or client don't support it."""
    if number is None:
        return None
    values = query(pynvml.nvmlDeviceGetFieldValues, handle, [number])
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    value = values[0].value
    return int(value.siVal if values[0].valueType == pynvml.NVML_VALUE_TYPE_SIGNED_INT else value.uiVal)
