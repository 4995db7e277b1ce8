"""Mutants that no property can kill, because they do what production does. Each with the reason.

A survivor is matched by its source, function-free: the name that `Mutant.name` gives, without the line, would
be ambiguous, so the text of the line is named instead (see `mutants.Mutant.name`).
"""

from __future__ import annotations

ACCEPTED: dict[str, str] = {}
