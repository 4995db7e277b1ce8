"""Wrong versions of the production machine, made by a fixed list of operators over every line that decides.

A mutant differs from production in one place. Each operator is a small, typical mistake: a comparison off by
one, `and` for `or`, a forgotten reset, a rule too many or too early. Texts are not mutated: no decision
depends on them. `build` makes a mutant a machine of its own beside the production one.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aegis_elastic.core
from aegis_elastic.core.machine import RULES
from proof.explore import Machine

_CORE = Path(aegis_elastic.core.__file__).parent
# In the order in which they can be loaded: each imports only those before it.
SOURCES: dict[str, Path] = {
    "retry_accounts": _CORE / "retry_accounts.py",
    "machine.change": _CORE / "machine" / "change.py",
    "machine.conditions": _CORE / "machine" / "conditions.py",
    "machine.requeue": _CORE / "machine" / "requeue.py",
    "machine.platform": _CORE / "machine" / "platform.py",
    "machine.node_facts": _CORE / "machine" / "node_facts.py",
    "machine.facts": _CORE / "machine" / "facts.py",
    "machine.decisions": _CORE / "machine" / "decisions.py",
    "machine.remedies": _CORE / "machine" / "remedies.py",
    "machine": _CORE / "machine" / "__init__.py",
}
# Loaded with the others, but not changed: the worlds have no scheduler and no platform (docs/proof.md).
WHOLE = {"machine.requeue", "machine.platform"}
_PACKAGE = "aegis_mutant"
# Texts for people, and the shape of values: nothing is decided there.
_UNCHANGED = {"names_of", "Transition", "Rule"}
_TEXT_CALLS = {"names_of", "join"}

Change = Callable[[Any], None]
Variant = tuple[str, Change]


def _put(field: str, value: object) -> Change:
    def change(node: Any) -> None:
        setattr(node, field, value)

    return change


def _pop(field: str, index: int) -> Change:
    def change(node: Any) -> None:
        getattr(node, field).pop(index)

    return change


class Mutant(NamedTuple):
    """One wrong version: which source, the line and its text, what was changed there, and how to do it again.

    `place` counts the nodes of the source's tree in `ast.walk` order, `variant` the changes at that node.
    """

    source: str
    line: int
    text: str
    change: str
    place: int
    variant: int

    @property
    def name(self) -> str:
        """The name in outputs and in the list of accepted survivors; without the line number, since lines
        move.
        """
        return f"{self.source}: {self.change}: {self.text}"


_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_CALLS = {"any": "all", "all": "any", "min": "max", "max": "min"}
_PHASES = (
    "PENDING", "BOOT_CHECKING", "RUN_COMMAND", "RESTARTING", "TROUBLESHOOTING", "SUCCEED", "FAILED",
)  # fmt: skip
_SETS = {"BOOTING": "RECOVERING", "RECOVERING": "BOOTING"}


def _compare(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            other = _COMPARE[type(op)]

            def change(n: Any, i: int = i, other: type[ast.cmpop] = other) -> None:
                n.ops[i] = other()

            yield f"{type(op).__name__} -> {other.__name__}", change


def _boolean(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} -> {other.__name__}", _put("op", other())
        for i in range(len(node.values)):
            yield f"operand {i + 1} dropped", _pop("values", i)


def _negation(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not dropped", lambda n: setattr(n, "operand", ast.UnaryOp(ast.Not(), n.operand))
    if isinstance(node, (ast.If, ast.IfExp)):
        yield "condition negated", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))


def _call(node: ast.AST) -> Iterator[Variant]:
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        other = _CALLS[node.func.id]
        yield f"{node.func.id} -> {other}", lambda n: setattr(n.func, "id", other)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            yield f"{keyword.arg}= dropped", _pop("keywords", i)


def _arithmetic(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, (ast.Add, ast.Sub)):
            other = ast.Sub if isinstance(node.op, ast.Add) else ast.Add
            yield f"{type(node.op).__name__} -> {other.__name__}", _put("op", other())
        if isinstance(node.op, ast.BitOr):
            yield "right of | dropped", lambda n: setattr(n, "right", n.left)
            yield "left of | dropped", lambda n: setattr(n, "left", n.right)


def _constant(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        flipped = not node.value
        yield f"{node.value} -> {flipped}", _put("value", flipped)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        more = node.value + 1
        yield f"{node.value} -> {more}", _put("value", more)


def _phase(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.Attribute) and node.attr in _PHASES:
        other = _PHASES[(_PHASES.index(node.attr) + 1) % len(_PHASES)]
        yield f"{node.attr} -> {other}", _put("attr", other)
    if isinstance(node, ast.Name) and node.id in _SETS:
        swapped = _SETS[node.id]
        yield f"{node.id} -> {swapped}", _put("id", swapped)


def _filter(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.comprehension):
        for i in range(len(node.ifs)):
            yield "filter dropped", _pop("ifs", i)


def _statement(node: ast.AST) -> Iterator[Variant]:
    """A statement forgotten; a `return` only where another follows, else the mutant isn't even a function."""
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    for i, inner in enumerate(body):
        skipped = bool(_undeciding(inner)) or getattr(getattr(inner, "value", None), "id", "") in _UNCHANGED
        stated = isinstance(inner, (ast.Assign, ast.AugAssign)) and not skipped
        if stated or (isinstance(inner, ast.If) and not inner.orelse):
            yield f"dropped: {ast.unparse(inner).splitlines()[0]}", _forget(i)


def _forget(index: int) -> Change:
    def change(node: Any) -> None:
        node.body[index] = ast.Pass()

    return change


def _drop_rule(index: int) -> Change:
    def change(node: Any) -> None:
        node.value.elts.pop(index)

    return change


def _advance_rule(index: int, before: int) -> Change:
    def change(node: Any) -> None:
        node.value.elts.insert(before, node.value.elts.pop(index))

    return change


def _rival(index: int) -> int | None:
    """The nearest rule before that one which may hold in the same phase: only there does the order matter."""
    earlier = (i for i in reversed(range(index)) if RULES[i].phases & RULES[index].phases)
    return next(earlier, None)


def _rules(node: ast.AST) -> Iterator[Variant]:
    if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "RULES":
        rules = node.value
        assert isinstance(rules, ast.Tuple)
        for i in range(len(rules.elts)):
            rule = " ".join(ast.unparse(rules.elts[i]).split()[:2])
            yield f"without {rule}", _drop_rule(i)
            rival = _rival(i)
            if rival is not None:
                yield f"{rule} earlier", _advance_rule(i, rival)


OPERATORS = (
    _compare, _boolean, _negation, _call, _arithmetic, _constant, _phase, _filter, _statement, _rules,
)  # fmt: skip


def mutants() -> Iterator[Mutant]:
    """Every mutant, in the order of the sources."""
    for source, path in SOURCES.items():
        if source in WHOLE:
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        tree = ast.parse(text)
        skipped = _skipped(tree)
        for place, node in enumerate(ast.walk(tree)):
            if id(node) in skipped:
                continue
            for variant, (change, _) in enumerate(_variants(node)):
                line = getattr(node, "lineno", 0) or _line(node)
                yield Mutant(source, line, lines[line - 1].strip(), change, place, variant)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _variants(node: ast.AST) -> Iterator[Variant]:
    for operator in OPERATORS:
        yield from operator(node)


def _line(node: ast.AST) -> int:
    return next((inner.lineno for inner in ast.walk(node) if isinstance(inner, ast.expr)), 0)


def _skipped(tree: ast.Module) -> set[int]:
    """Nodes that decide nothing: texts, annotations, imports, names for the diagram."""
    return {id(inner) for node in ast.walk(tree) for root in _undeciding(node) for inner in ast.walk(root)}


def _undeciding(node: ast.AST) -> list[ast.AST]:
    """The parts of this node that decide nothing."""
    if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return [node]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in _UNCHANGED:
        return [node]
    if isinstance(node, ast.FunctionDef):
        return [node.args, *([node.returns] if node.returns else [])]
    if isinstance(node, ast.AnnAssign):
        return [node.annotation]
    if (
        isinstance(node, ast.Call)
        and (getattr(node.func, "id", "") or getattr(node.func, "attr", "")) in _TEXT_CALLS
    ):
        return [node]
    text_choice = isinstance(node, ast.IfExp) and _is_text(node.body)
    text_assigned = isinstance(node, ast.Assign) and (
        _is_text(node.value) or getattr(node.targets[0], "id", "") == "__all__"
    )
    return [node] if text_choice or text_assigned else []


def build(mutant: Mutant | None) -> Machine:
    """The machine with that one change (None: production over again, through the same way)."""
    for name in [name for name in sys.modules if name.split(".")[0] == _PACKAGE]:
        del sys.modules[name]
    sys.modules[_PACKAGE] = package = types.ModuleType(_PACKAGE)
    package.__path__ = []
    for source in SOURCES:
        code = _code(source)
        if mutant is not None and mutant.source == source:
            tree = ast.parse(SOURCES[source].read_text(encoding="utf-8"))
            node = next(node for place, node in enumerate(ast.walk(tree)) if place == mutant.place)
            list(_variants(node))[mutant.variant][1](node)
            code = _compiled(source, tree)
        _load(source, code)
    machine = sys.modules[f"{_PACKAGE}.machine"]
    return Machine(machine.step, machine.create, machine.RULES)


@functools.cache
def _code(source: str) -> types.CodeType:
    """The source as it is, compiled once."""
    return _compiled(source, ast.parse(SOURCES[source].read_text(encoding="utf-8")))


def _compiled(source: str, tree: ast.Module) -> types.CodeType:
    return compile(_redirected(tree), str(SOURCES[source]), "exec")


def _redirected(tree: ast.Module) -> ast.Module:
    """The same module, importing its mutated neighbours."""
    body: list[ast.stmt] = []
    for node in tree.body:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("aegis_elastic.core.machine")
        ):
            node.module = node.module.replace("aegis_elastic.core", _PACKAGE)
        elif isinstance(node, ast.ImportFrom) and node.module == "aegis_elastic.core":
            ours = [alias for alias in node.names if alias.name in SOURCES]
            if ours:
                body.append(ast.ImportFrom(_PACKAGE, ours, 0))
            node.names = [alias for alias in node.names if alias.name not in SOURCES]
            if not node.names:
                continue
        body.append(node)
    tree.body = body
    return ast.fix_missing_locations(tree)


def _load(source: str, code: types.CodeType) -> None:
    name = f"{_PACKAGE}.{source}"
    module = types.ModuleType(name)
    module.__dict__["__package__"] = name
    if source == "machine":
        # Its parts were loaded first, as its submodules.
        module.__path__ = []
        for part in (source.partition(".")[2] for source in SOURCES if "." in source):
            setattr(module, part, sys.modules[f"{name}.{part}"])
    elif "." in source and f"{_PACKAGE}.machine" not in sys.modules:
        parent = types.ModuleType(f"{_PACKAGE}.machine")
        parent.__path__ = []
        sys.modules[parent.__name__] = parent
    sys.modules[name] = module
    exec(code, module.__dict__)  # noqa: S102 - our own source, changed in one place
    if source == "retry_accounts":
        sys.modules[_PACKAGE].__dict__["retry_accounts"] = module
    importlib.invalidate_caches()
