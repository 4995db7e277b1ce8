"""The configs that TLC checks: which module, how large, with which defect switched on, and what must come of it.

Four kinds. `safety` and `liveness` must hold and be exhausted; `witness` must reach what it names, so that a
bound that keeps a model from getting anywhere is noticed; `defect` must be violated: each switches on one
known wrong reading of the specification, and names the property that catches it.
"""

from __future__ import annotations

from typing import NamedTuple


class Model(NamedTuple):
    """One config. `expect` is the property that a `defect` must violate ("" for the other kinds)."""

    name: str
    module: str
    kind: str
    constants: dict[str, str]
    invariants: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()
    expect: str = ""
    slow: bool = False

    def config(self) -> str:
        """The text of the .cfg file."""
        lines = ["SPECIFICATION Spec", *(f"CONSTANT {name} = {value}" for name, value in self.constants.items())]
        lines += [f"INVARIANT {name}" for name in self.invariants]
        lines += [f"PROPERTY {name}" for name in self.properties]
        return "\n".join(lines) + "\n"


def _set(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"{prefix}{i + 1}" for i in range(count)) + "}"


def _with(defect: str) -> str:
    return f'{{"{defect}"}}' if defect else "{}"


PHASES_INVARIANTS = (
    "ValidPhase", "ValidInnerPhase", "RecoverCountBound", "RetriesBound", "PhaseConsistency", "MaxAgrees", "Aligned",
    "NeverRunsExceeded", "FailedHasReason", "QuitIsNotExhaustion", "RecoveryBounded", "OneErrorPerIncarnation",
    "SuccessIsEarned", "ReadyWhenMissingAreBack",
)  # fmt: skip
PHASES_STEPS = (
    "TerminalAbsorbing", "CountOnlyInRun", "OneBump", "FailureIsCounted", "ExceededIsFinal", "FailedAfterDiagnosis",
    "BootBeforeRun", "DoneIsNotMissed",
)  # fmt: skip
PHASES_LIVENESS = ("RecoveryEnds", "JobEnds", "NoLostFailure", "QuitIsObeyed", "ExceededEnds", "BootEnds")

# Each known wrong reading of the phase layer, and the property that must catch it.
PHASES_DEFECTS: dict[str, str] = {
    "noGuard": "ExceededIsFinal",
    "capHides": "ExceededIsFinal",
    "noCountCap": "RecoverCountBound",
    "failAtOnce": "FailedAfterDiagnosis",
    "sumLosses": "OneBump",
    "noAlign": "Aligned",
    "countInRecovery": "CountOnlyInRun",
    "noBudget": "RecoveryEnds",
    "bootSkipped": "BootBeforeRun",
    "resurrects": "TerminalAbsorbing",
    "waitsForAll": "ReadyWhenMissingAreBack",
    "quitIsExhaustion": "QuitIsNotExhaustion",
    "quitForgotten": "QuitIsObeyed",
    "errorNotCounted": "FailureIsCounted",
    "manyErrors": "OneErrorPerIncarnation",
    "doneIsMissed": "DoneIsNotMissed",
    "lossOverlooked": "SuccessIsEarned",
}
PHASES_WITNESSES = frozenset(
    {
        "Pending", "BootChecking", "RunCommand", "Restarting", "Troubleshooting", "Succeed", "Failed by quit",
        "Failed by the limit", "Failed by the budget", "Succeed with every retry used", "several lost at once",
        "lost while booting", "lost while recovering", "an Error",
    }
)  # fmt: skip


def phases_constants(workers: int, max_retry: int, budget: int = 2, defect: str = "") -> dict[str, str]:
    return {
        "Workers": _set("w", workers),
        "MaxRetry": str(max_retry),
        "Budget": str(budget),
        "Defects": _with(defect),
    }


def _defect(module: str, constants: dict[str, str], defect: str, expect: str, invariants: frozenset[str]) -> Model:
    of = (expect,)
    return Model(
        f"{module} with {defect}",
        module,
        "defect",
        constants,
        of if expect in invariants else (),
        () if expect in invariants else of,
        expect,
    )


PHASES: tuple[Model, ...] = (
    Model("Phases 3/2", "Phases", "safety", phases_constants(3, 2), PHASES_INVARIANTS, PHASES_STEPS),
    Model("Phases 2/1", "Phases", "liveness", phases_constants(2, 1), (), PHASES_LIVENESS),
    Model("Phases 3/1", "Phases", "liveness", phases_constants(3, 1), (), PHASES_LIVENESS, slow=True),
    Model("Phases 3/1", "Phases", "witness", phases_constants(3, 1), ("Reached",)),
    Model("Phases 4/3", "Phases", "safety", phases_constants(4, 3), PHASES_INVARIANTS, PHASES_STEPS, slow=True),
    *(
        _defect("Phases", phases_constants(2, 2, 2, name), name, by, frozenset(PHASES_INVARIANTS))
        for name, by in PHASES_DEFECTS.items()
    ),
)
