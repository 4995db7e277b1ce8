"""What torchelastic knows and doesn't tell a rendezvous handler: read from the frames that called us.

A handler is given neither the number of ranks nor the number of restarts, and it is called again after a
failure without being told of it. Both are plain local variables of the callers, values of public types;
asking the user to say them twice would be worse. `tests/rendezvous` pins it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TypeVar

from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

_T = TypeVar("_T")


def launch_config() -> LaunchConfig | None:
    """The configuration of the launch that is making us, or None if it is not torchelastic's launcher."""
    return next(_locals("config", LaunchConfig), None)


def failures() -> tuple[ProcessFailure, ...]:
    """Of the ranks that made torchelastic come back to the rendezvous; () if none failed."""
    result = next(_locals("run_result", RunResult), None)
    if result is None or not result.is_failed():
        return ()
    return tuple(result.failures.values())


def final_failures() -> tuple[ProcessFailure, ...] | None:
    """Of the ranks for which torchelastic gives up, None if all ended well. For use while it shuts down."""
    error = sys.exc_info()[1]
    if isinstance(error, ChildFailedError):
        return tuple(error.failures.values())
    return None if error is None else ()


def _locals(name: str, kind: type[_T]) -> Iterator[_T]:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        value = frame.f_locals.get(name)
        if isinstance(value, kind):
            yield value
