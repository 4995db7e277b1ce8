"""The names of all checks, and the seconds that each may take. An overrun is a finding."""

from __future__ import annotations

from collections.abc import Mapping

from aegis_elastic.core.diagnosis.recovery import CHEAP_CHECKS

# Local, without torch, run side by side; on a healthy node they take well below a second.
CHEAP = CHEAP_CHECKS
# With torch; one after the other and in this order on every node, since most of them meet their peers.
TORCH = ("env", "health", "allreduce_connection", "allreduce_performance")
ALL = CHEAP + TORCH

# Seconds (specification, section 8). Where it gives none: runtime takes milliseconds when all is well,
# but the first cuInit on a node without persistence daemon takes seconds; hang reads the stacks of a node's
# ranks; env and health are the bootcheck, where a cold file system pays for its first `import torch` too.
DEFAULT_BUDGETS_S: Mapping[str, float] = {
    "io": 30.0,
    "gpu": 66.0,
    "runtime": 10.0,
    "rdma": 25.0,
    "hang": 20.0,
    "env": 60.0,
    "health": 122.0,
    "allreduce_connection": 122.0,
    "allreduce_performance": 182.0,
}

# `import torch` comes before the first check that needs it and has its own budget, or a slow disk would be
# reported as a broken network.
IMPORT_BUDGET_S = 60.0


def budget_s(check: str, overrides: Mapping[str, float]) -> float:
    """Seconds that `check` may take; `overrides` win over the table."""
    return overrides.get(check, DEFAULT_BUDGETS_S[check])
