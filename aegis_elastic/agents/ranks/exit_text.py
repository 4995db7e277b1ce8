"""The exits of ranks as text for people, in one line."""

from __future__ import annotations

from aegis_elastic.core.model import Failure

RANKS_MAX = 8


def describe_exit(failure: Failure) -> str:
    """How one rank ended, such as "rank 3 ended with signal SIGKILL"."""
    end = f"signal {failure.signal}" if failure.signal else f"exit code {failure.exit_code}"
    exception = f": {failure.exception}" if failure.exception else ""
    return f"rank {failure.rank} ended with {end}{exception}"


def describe_exits(failures: tuple[Failure, ...]) -> str:
    """How a node's ranks ended: those that failed, by rank, at most RANKS_MAX."""
    if not failures:
        return "every rank ended with exit code 0"
    ends = [describe_exit(failure) for failure in sorted(failures, key=lambda failure: failure.rank)]
    more = [f"and {len(ends) - RANKS_MAX} more"] if len(ends) > RANKS_MAX else []
    return "; ".join(ends[:RANKS_MAX] + more)
