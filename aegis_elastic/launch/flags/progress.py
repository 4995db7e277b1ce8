"""The flags of `aegis-run` about progress: whether it is watched, and how long a pause means nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aegis_elastic.core.detection.progress import FLOOR_S


def add_pace_flags(add: Callable[..., None], seconds: Callable[[], Callable[[str], Any]]) -> None:
    """Declare them. `add` and `seconds` as in `launch.flags.group`."""
    add(
        "progress",
        "Watch how far each rank is, by torch's own hooks for optimizers and without a change to the script: "
        "what finds ranks that hang or are slow. `on` or `off`; the default is on.",
        "on",
        choices=("on", "off"),
    )
    add(
        "hang-after-s",
        "Seconds without a step that never mean anything. Longer ones do if they are longer than twice the "
        f"longest pause that this job has made so far. The default is {FLOOR_S:g}.",
        FLOOR_S,
        type=seconds(),
        metavar="SECONDS",
    )
