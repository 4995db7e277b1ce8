"""What the stress test is asked and what it says: apart from it, because who asks needs no torch."""

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
    """Where one device is: products so far, wrong elements in them, speed, temperature (None: unknown)."""

    device: str
    elapsed_s: float
    passes: int
    wrong: int
    tflops: float
    temperature_c: int | None


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of output: either of them."""

    progress: Progress | None = None
    result: CheckResult | None = None
