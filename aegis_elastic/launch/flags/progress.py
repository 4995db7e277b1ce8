"""The flags of `aegis-run` about progress: whether it is watched, and how long a pause may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aegis_elastic.core.detection.progress import FLOOR_S


def add_progress_flags(add: Callable[..., None], seconds: Callable[[], Callable[[str], Any]]) -> None:
    """Declare them. `add` and `seconds` as in `launch.flags.group`."""
    add(
        "progress",
        "Watch the steps of each rank, by torch's own hooks for optimizers and without a change to the "
        "script, to find ranks that hang or are slow. `on` or `off`; the default is on.",
        "on",
        choices=("on", "off"),
    )
    add(
        "hang-after-s",
        "Seconds without a step that never count as a hang. A longer pause counts if it is longer than "
        f"twice the longest pause of this job so far. The default is {FLOOR_S:g}.",
        FLOOR_S,
        type=seconds(),
        metavar="SECONDS",
    )
