"""Request and output of the stress test, apart from `burn.py` since its caller needs no torch."""

from __future__ import annotations

import msgspec

from aegis_elastic.core.model import CheckResult


class Request(msgspec.Struct, frozen=True, rename="camel"):
    """How long to burn, and optionally the side of the matrices and the CPU threads (0: the default)."""

    duration_s: float
    size: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        if self.duration_s <= 0 or self.size < 0 or self.threads < 0:
            raise ValueError(f"duration must be above 0 s, size and threads not below 0 (got {self})")


class Progress(msgspec.Struct, frozen=True, rename="camel"):
    """Progress of one device: products so far, wrong elements in them, speed, temperature (None: unknown)."""

    device: str
    elapsed_s: float
    passes: int
    wrong: int
    tflops: float
    temperature_c: int | None


class OutputLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of output: progress of a device, or its result."""

    progress: Progress | None = None
    result: CheckResult | None = None
