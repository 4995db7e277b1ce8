"""Retries: charging a worker, the job's count, and when the limit is exceeded. Arithmetic only, no state.

The job's count is the maximum over its workers. A restart concerns all of them, so the counts align at the
next start of training, without distributed bookkeeping. `maxRetry` failures are survived, the next one is one
too many; it is counted (so a worker's retries may reach maxRetry + 1), but never past that.
"""

from __future__ import annotations

from collections.abc import Iterable


def charge(retries: int, max_retry: int) -> int:
    """One more failure of a worker with `retries` so far; at most `max_retry + 1`."""
    return min(retries + 1, max_retry + 1)


def recover_count(retries: Iterable[int], max_retry: int) -> int:
    """The job's count while it lives: the largest of its workers', capped at the limit."""
    return min(max(retries, default=0), max_retry)


def exceeded(retries: Iterable[int], max_retry: int) -> bool:
    """Whether some worker failed more often than the user allows."""
    return any(count > max_retry for count in retries)
