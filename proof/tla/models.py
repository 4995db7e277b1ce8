"""The configs that TLC checks: which module, how large, which defect is on, and what must come of it.

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
    symmetry: str = ""

    def config(self) -> str:
        """The text of the .cfg file."""
        lines = [
            "SPECIFICATION Spec",
            *(f"CONSTANT {name} = {value}" for name, value in self.constants.items()),
        ]
        lines += [f"INVARIANT {name}" for name in self.invariants]
        lines += [f"PROPERTY {name}" for name in self.properties]
        lines += [f"SYMMETRY {self.symmetry}"] if self.symmetry else []
        return "\n".join(lines) + "\n"


def _set(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"{prefix}{i + 1}" for i in range(count)) + "}"


def _with(defect: str) -> str:
    return f'{{"{defect}"}}' if defect else "{}"


PHASES_INVARIANTS = (
    "ValidPhase", "ValidInnerPhase", "RecoverCountBound", "RetriesBound", "PhaseConsistency", "MaxAgrees",
    "Aligned", "NeverRunsExceeded", "FailedHasReason", "QuitIsNotExhaustion", "RecoveryBounded",
    "OneErrorPerIncarnation", "SuccessIsEarned", "ReadyWhenMissingAreBack", "NothingPendingWhileRunning",
)  # fmt: skip
PHASES_STEPS = (
    "TerminalAbsorbing", "CountOnlyInRun", "OneBump", "FailureIsCounted", "ExceededIsFinal",
    "FailedAfterDiagnosis", "BootBeforeRun", "DoneIsNotMissed", "RefundOnce", "RefundEnds", "HeldWaits",
    "RenewOnce",
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
# The same of what is rarer: holds and refunds, level 2, retries earned back.
PHASES_RARE_DEFECTS: dict[str, str] = {
    "refundsTwice": "RefundEnds",
    "refundsTheDead": "TerminalAbsorbing",
    "heldGoesOn": "HeldWaits",
    "holdsForEver": "RecoveryEnds",
    "renewsTwice": "RenewOnce",
}
ALL_RARE = ("hold", "renew", "earn")
# Their actions, which can't be taken where none of them can happen.
RARE = frozenset({"Hold", "Release", "Saved", "FinishBroken", "RuleRefund", "RuleRelease", "RuleRenew"})
PHASES_WITNESSES = frozenset(
    {
        "Pending", "BootChecking", "RunCommand", "Restarting", "Troubleshooting", "Succeed", "Failed by quit",
        "Failed by the limit", "Failed by the budget", "Succeed with every retry used",
        "several lost at once", "lost while booting", "lost while recovering", "an Error",
        "a charge given back", "released, and checked again", "a clean process on its way",
        "level 2 did not help",
    }
)  # fmt: skip


def may(*rare: str) -> str:
    """The constant of `Phases.tla` that lets these things happen."""
    return "{" + ", ".join(f'"{name}"' for name in rare) + "}"


def phases_constants(
    workers: int, max_retry: int, budget: int = 2, defect: str = "", may: str = "{}"
) -> dict[str, str]:
    return {
        "May": may,
        "Workers": _set("w", workers),
        "MaxRetry": str(max_retry),
        "Budget": str(budget),
        "Defects": _with(defect),
    }


def _defect(
    module: str, constants: dict[str, str], defect: str, expect: str, invariants: frozenset[str]
) -> Model:
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
    Model(
        "Phases 2/1, all that may be", "Phases", "safety", phases_constants(2, 1, may=may(*ALL_RARE)),
        PHASES_INVARIANTS, PHASES_STEPS,
    ),
    Model(
        "Phases 2/0 with holds", "Phases", "liveness", phases_constants(2, 0, may=may("hold")), (),
        PHASES_LIVENESS,
    ),
    Model(
        "Phases 2/1", "Phases", "witness", phases_constants(2, 1, may=may(*ALL_RARE)),
        ("Reached", "Unreached"),
    ),
    Model("Phases 4/3", "Phases", "safety", phases_constants(4, 3), PHASES_INVARIANTS, PHASES_STEPS),
    *(
        _defect("Phases", phases_constants(2, 2, 2, name), name, by, frozenset(PHASES_INVARIANTS))
        for name, by in PHASES_DEFECTS.items()
    ),
    *(
        _defect(
            "Phases", phases_constants(2, 1, 2, name, may(*ALL_RARE)), name, by, frozenset(PHASES_INVARIANTS)
        )
        for name, by in PHASES_RARE_DEFECTS.items()
    ),
)  # fmt: skip


MESSAGES_INVARIANTS = (
    "ValidPhase", "ValidInnerPhase", "RecoverCountBound", "RetriesBound", "PhaseConsistency",
    "NoFinishDoubleProcessed", "StaleFinishRejected", "WorkerSeqNumBound", "ExactlyOnce",
    "NoFailureForgotten", "Aligned", "FailedHasReason",
)  # fmt: skip
MESSAGES_STEPS = ("MasterSeqNumMonotonic", "CountsDurable")
MESSAGES_LIVENESS = ("JobEnds", "RecoveryEnds", "NoLostFailure")
# Several defects in one set only where each alone is harmless: then two guards stand behind each other.
MESSAGES_DEFECTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("byLabel",), "ExactlyOnce"),
    (("byLabel",), "StaleFinishRejected"),
    (("staleCounts",), "StaleFinishRejected"),
    (("noUid", "noBump"), "StaleFinishRejected"),
    (("noUid", "noBump"), "NoFinishDoubleProcessed"),
    (("noBump",), "MasterSeqNumMonotonic"),
    (("anyPendingFinish",), "StaleFinishRejected"),
    (("noRepeat",), "JobEnds"),
    (("noResend",), "JobEnds"),
)
MESSAGES_WITNESSES = frozenset(
    {
        "Pending", "BootChecking", "RunCommand", "Restarting", "Troubleshooting", "Succeed", "Failed",
        "Succeed with every retry used", "a dead agent's message", "a doubled Finish",
        "an Error that comes too late", "two crashed", "an old order is followed no more",
    }
)  # fmt: skip


def messages_constants(workers: int, max_retry: int, *defects: str) -> dict[str, str]:
    named = ", ".join(f'"{name}"' for name in defects)
    return {"Workers": _set("w", workers), "MaxRetry": str(max_retry), "Defects": f"{{{named}}}"}


MESSAGES: tuple[Model, ...] = (
    Model(
        "Messages 2/2", "Messages", "safety", messages_constants(2, 2), MESSAGES_INVARIANTS, MESSAGES_STEPS
    ),
    Model(
        "Messages 3/2 up to symmetry",
        "Messages",
        "safety",
        messages_constants(3, 2),
        MESSAGES_INVARIANTS,
        MESSAGES_STEPS,
        symmetry="Symmetric",
    ),
    Model(
        "Messages 3/2",
        "Messages",
        "safety",
        messages_constants(3, 2),
        MESSAGES_INVARIANTS,
        MESSAGES_STEPS,
        slow=True,
    ),
    Model("Messages 2/0", "Messages", "liveness", messages_constants(2, 0), (), MESSAGES_LIVENESS),
    Model("Messages 2/2", "Messages", "liveness", messages_constants(2, 2), (), MESSAGES_LIVENESS, slow=True),
    Model("Messages 2/2", "Messages", "witness", messages_constants(2, 2), ("Reached", "Unreached")),
    *(
        _defect(
            "Messages", messages_constants(2, 2, *names), "+".join(names), by, frozenset(MESSAGES_INVARIANTS)
        )
        for names, by in MESSAGES_DEFECTS
    ),
)


NODES_INVARIANTS = (
    "ValidPhase", "RecoverCountBound", "RetriesBound", "RecoveryBounded", "ExactlyOnce", "NeverRunOnBlack",
    "NeverRunsShort", "OneWorkerPerNode", "FailedHasReason",
)  # fmt: skip
NODES_STEPS = (
    "CountsDurable", "TerminalAbsorbing", "NoEarlyEvict", "NoSuicidalEvict", "EvictionIsFree",
    "MarkIsOfNode", "RefundOnce",
)  # fmt: skip
NODES_LIVENESS = ("RecoveryEnds", "LossIsSeen")
NODES_DEFECTS: tuple[tuple[str, str], ...] = (
    ("twoWrites", "ExactlyOnce"),
    ("noCas", "ExactlyOnce"),
    ("evictionCounts", "ExactlyOnce"),
    ("evictionCounts", "EvictionIsFree"),
    ("forgetsBlack", "CountsDurable"),
    ("noAdmission", "NeverRunOnBlack"),
    ("evictsNow", "NoEarlyEvict"),
    ("suicidal", "NoSuicidalEvict"),
    ("markOfWorker", "MarkIsOfNode"),
    ("refundsTwice", "RefundOnce"),
    ("refundsTheDead", "TerminalAbsorbing"),
    ("noBudget", "RecoveryEnds"),
    ("noGiveUp", "RecoveryEnds"),
)
NODES_WITNESSES = frozenset(
    {
        "RunCommand", "Troubleshooting", "Succeed", "Failed by the limit", "Failed by the budget",
        "Failed for want of a node", "ran on after an isolation", "a placement on a black node",
        "marked, and the checkpoint completed", "marked nodes in two places",
        "a master away while somebody is lost", "a late write", "a charge given back",
    }
)  # fmt: skip


def nodes_constants(
    workers: int, nodes: int, max_retry: int, defect: str = "", without: str = ""
) -> dict[str, str]:
    return {
        "Workers": _set("w", workers),
        "Nodes": _set("n", nodes),
        "None": "None",
        "MaxRetry": str(max_retry),
        "Budget": "2",
        "Defects": _with(defect),
        "Without": without or "{}",
    }


# Liveness is asked where nothing but losses, faults and crashes happens: the rest takes no part in it.
_BARE = '{"slow", "refund", "late"}'
NODES: tuple[Model, ...] = (
    Model(
        "Nodes 2x3/1 up to symmetry", "Nodes", "safety", nodes_constants(2, 3, 1), NODES_INVARIANTS,
        NODES_STEPS, symmetry="Symmetric",
    ),
    *(
        Model(
            f"Nodes 2x3/{n}", "Nodes", "safety", nodes_constants(2, 3, n), NODES_INVARIANTS, NODES_STEPS,
            slow=True,
        )
        for n in (1, 2)
    ),
    Model("Nodes 2x2/0", "Nodes", "liveness", nodes_constants(2, 2, 0, without=_BARE), (), NODES_LIVENESS),
    Model(
        "Nodes 2x3/1", "Nodes", "liveness", nodes_constants(2, 3, 1, without=_BARE), (), NODES_LIVENESS,
        slow=True,
    ),
    Model(
        "Nodes 2x3/0 up to symmetry", "Nodes", "witness", nodes_constants(2, 3, 0), ("Reached", "Unreached"),
        symmetry="Symmetric",
    ),
    *(
        _defect(
            "Nodes",
            nodes_constants(2, 3, 1, name, _BARE if by in NODES_LIVENESS else ""),
            name,
            by,
            frozenset(NODES_INVARIANTS),
        )
        for name, by in NODES_DEFECTS
    ),
)  # fmt: skip


WITNESSES: dict[str, frozenset[str]] = {
    "Phases": PHASES_WITNESSES,
    "Messages": MESSAGES_WITNESSES,
    "Nodes": NODES_WITNESSES,
}
# Actions that exist for a defect's sake.
ONLY_DEFECTS = frozenset({"LoseOrder", "LoseReport", "SecondWrite"})
