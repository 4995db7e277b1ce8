"""Every verdict of every detector has exactly one owner; the detectors' own code says which there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from aegis_elastic.core.diagnosis import evidence, recovery
from aegis_elastic.core.diagnosis.signatures import UNKNOWN
from aegis_elastic.core.diagnosis.signatures import Action as SignatureAction
from aegis_elastic.core.events import Finding
from aegis_elastic.core.model import Verdict
from aegis_elastic.core.policy import correlation, storm_guard, verdicts
from aegis_elastic.core.policy.storm_guard import Action, NodeGuard

PACKAGE = Path(__file__).resolve().parents[3] / "aegis_elastic"
SCOPES = ("hardware", "node", "network", "slow", "software", "unknown")
CHECKS = (*recovery.CHEAP_CHECKS, *recovery.COLLECTIVE_CHECKS, "env", "health")
CODE = re.compile(r"([a-z_]+)\.[a-z_]+")


def one(kind: str, verdict: str, scope: str = "") -> verdicts.Row:
    found = verdicts.rows_for(kind, verdict, scope)
    assert found, f"nobody acts on {kind} {verdict} ({scope}): give it a row in core/policy/verdicts.py"
    assert len(found) == 1, f"several act on {kind} {verdict} ({scope}): {found}"
    return found[0]


def literals(*folders: str) -> Iterator[tuple[str, str]]:
    """(file, text) of all string constants of the code, docstrings left out."""
    for folder in folders:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield path.name, node.value


def names_of_notes() -> Iterator[tuple[str, str]]:
    """(file, code) of all notes whose code stands in the code: directly, or by a constant of that module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            if name not in ("Noted", "note", "_note"):
                continue
            for argument in node.args[:4]:
                for part in ast.walk(argument):
                    value = part.value if isinstance(part, ast.Constant) else None
                    if isinstance(part, ast.Name):
                        value = constants.get(part.id)
                    if isinstance(value, str) and CODE.fullmatch(value):
                        yield path.name, value


def test_marks_are_acted_on_as_the_guard_does() -> None:
    for verdict in Verdict:
        row = one(verdicts.MARK, verdict.value)
        action = storm_guard.remedy(verdict, NodeGuard(), True, 0.0)
        assert (row.owner == verdicts.HUMAN) == (action is Action.ASK_HUMAN), row
        assert (row.action == verdicts.EVICT) == (action is Action.EVICT_SLOW), row


def test_classes_of_failures() -> None:
    for fault_class in evidence.FAULT_CLASSES:
        one(verdicts.CLASS, fault_class)
        one(verdicts.NOTE, f"verdict.{fault_class.replace(' ', '_')}")


def test_findings_are_acted_on_as_the_recovery_judges() -> None:
    codes = {
        text
        for _, text in literals("checks", "core", "agents")
        if (m := CODE.fullmatch(text)) and m[1] in CHECKS
    } - {"gpu.zero"}
    assert len(codes) > 60, "the checks' codes are no longer found: look at `literals`"
    codes |= {f"{check}.{by_us}" for check in CHECKS for by_us in ("crashed", "failed", "timeout")}
    codes |= {"allreduce_connection.link", "allreduce_connection.ambiguous", "allreduce_performance.slow"}
    levels = {1: verdicts.RESTART, 2: verdicts.RENEW, 3: verdicts.ISOLATE}
    for code in codes:
        for scope in SCOPES:
            row = one(verdicts.FINDING, code, scope)
            judged = recovery.judge((Finding(code.partition(".")[0], code, scope),))
            assert row.action == levels[judged.level], (row, code, scope, judged)


def test_signatures() -> None:
    for action in (*get_args(SignatureAction), UNKNOWN):
        one(verdicts.SIGNATURE, action)


def test_what_befalls_many() -> None:
    for kind in (correlation.STORAGE, correlation.NETWORK, correlation.CORRELATED):
        assert one(verdicts.TOGETHER, kind).owner == verdicts.BRAKE


def test_notes() -> None:
    found = set(names_of_notes())
    found |= {
        ("anomalies.py", text)
        for name, text in literals("core")
        if name == "anomalies.py" and CODE.fullmatch(text)
    }
    codes = {code for _, code in found if not code.startswith("aegis_elastic.")}
    assert {
        "rank.slow",
        "checkpoint.late",
        "guard.cancelled",
        "memory.growth",
        "isolation.failed",
    } <= codes, codes
    for code in codes:
        one(verdicts.NOTE, code)
    one(verdicts.NOTE, "signature.whatever_class")


def test_every_row_is_somebodys_verdict() -> None:
    """A row that nothing can match any more is a promise that nobody keeps."""
    kinds = {row.kind for row in verdicts.TABLE}
    assert kinds == {
        verdicts.MARK, verdicts.CLASS, verdicts.FINDING, verdicts.SIGNATURE, verdicts.NOTE, verdicts.TOGETHER
    }  # fmt: skip
    named = {row.verdict for row in verdicts.TABLE if row.kind == verdicts.MARK}
    assert named == {verdict.value for verdict in Verdict}
    assert {row.verdict for row in verdicts.TABLE if row.kind == verdicts.CLASS} == set(
        evidence.FAULT_CLASSES
    )


@pytest.mark.parametrize("code", ["nothing.like_it", "gpu.zero.more", ""])
def test_what_is_no_verdict_has_no_owner(code: str) -> None:
    assert verdicts.rows_for(verdicts.NOTE, code) == []
    assert not verdicts.pages(code)


def test_what_calls_a_human_by_itself() -> None:
    assert verdicts.pages("success.false")
    assert not verdicts.pages("memory.growth")
