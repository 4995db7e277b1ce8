"""How the ends of ranks are told to a person, in one line."""

from __future__ import annotations

from aegis_elastic.core.model import Failure

RANKS_MAX = 8


def told(failure: Failure) -> str:
    """How one rank ended: "rank 3 ended with signal SIGKILL"."""
    how = f"signal {failure.signal}" if failure.signal else f"exit code {failure.exit_code}"
    what = f": {failure.exception}" if failure.exception else ""
    return f"rank {failure.rank} ended with {how}{what}"


def describe_exits(failures: tuple[Failure, ...]) -> str:
    """How a node's ranks ended: those that failed, by rank, the first few of many."""
    if not failures:
        return "every rank ended with exit code 0"
    ends = [told(failure) for failure in sorted(failures, key=lambda failure: failure.rank)]
    more = [f"and {len(ends) - RANKS_MAX} more"] if len(ends) > RANKS_MAX else []
    return "; ".join(ends[:RANKS_MAX] + more)
