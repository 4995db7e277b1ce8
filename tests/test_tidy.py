"""What keeps the house tidy without anybody having to remember it; CONTRIBUTING.md lists the rules."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "aegis_elastic"
# More than a stranger can take in at one look.
ROOM_MODULES_MAX = 15

# Imports go to the same level or down, never in a circle between folders. `testing` may look at everything.
LEVELS = {
    "launch": 3,
    "agents": 2,
    "control": 2,
    "rendezvous": 2,
    "checks": 1,
    "bus": 1,
    "store": 1,
    "observe": 1,
    "core": 0,
    "worker": 0,
}
# The rooms of a folder, lowest first; imports between them point down, too. "." are the modules beside them.
ROOMS = {
    "agents": (
        "mailbox", "guard", "peers", "ranks", "plane", "checks", "watch", "monitoring", "checkpoints",
        "standalone", ".",
    ),
    "bus": (".", "contact"),
    "checks": ("contract", "host", "gpu", "collective", "."),
    "control": ("host", "isolation", "controllers", "."),
    "core": (".", "checkpoints", "detection", "diagnosis", "policy", "machine", "accounts", "protocol"),
    "launch": ("screens", "slurm", "flags", "ctl", "."),
}  # fmt: skip
WITHOUT_TORCH = ("core", "store", "bus", "control")
# Folders whose code speaks on stdout, because a person or a pipe reads it there.
MAY_PRINT = ("launch",)
# Modules that are started by path or by name, not imported.
# Stores that nothing chooses yet: one contract test suite holds all of them (tests/store), so that the
# contract doesn't fossilise on the one that is used.
BEHIND_THE_CONTRACT = {"aegis_elastic.store.etcd", "aegis_elastic.store.memory"}
ENTRY = {"__init__", "__main__", "sitecustomize"}


class Module:
    """One Python file: its dotted name, its tree, and what it imports."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)

    @property
    def folder(self) -> str:
        """First level below the package ("" for its own modules)."""
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else ""

    @property
    def room(self) -> str:
        """Second level below the package ("." for the folder's own modules)."""
        parts = self.path.relative_to(PACKAGE).parts
        return parts[1] if len(parts) > 2 else "."

    @functools.cached_property
    def imports(self) -> list[tuple[int, str]]:
        """(line, dotted name) of every import, inside functions too; `from a import b` counts as `a.b`."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        own = self.name.split(".")
        up = node.level - 1 if self.path.name == "__init__.py" else node.level
        return ".".join([*own[: len(own) - up], *([node.module] if node.module else [])])

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


def modules_under(*folders: Path) -> list[Module]:
    return [Module(path) for folder in folders for path in sorted(folder.rglob("*.py"))]


@pytest.fixture(scope="module")
def package() -> list[Module]:
    return modules_under(PACKAGE)


@pytest.fixture(scope="module")
def everything(package: list[Module]) -> list[Module]:
    return [*package, *modules_under(*(ROOT / name for name in ("tests", "examples", "benchmarks", "proof")))]


def own_folder(imported: str) -> str | None:
    """The folder of ours that an import leads to; None for other people's modules."""
    parts = imported.split(".")
    if parts[0] != "aegis_elastic":
        return None
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else ""


def calls(module: Module) -> Iterator[tuple[int, str, ast.Call]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func), node


def test_imports_point_down(package: list[Module]) -> None:
    wrong = []
    edges: dict[str, set[str]] = {}
    for module in package:
        if module.folder in ("testing", ""):
            continue
        assert module.folder in LEVELS, f"{module.folder}/ is new: give it a level in LEVELS"
        for line, imported in module.imports:
            target = own_folder(imported)
            if target is None or target == module.folder:
                continue
            edges.setdefault(module.folder, set()).add(target)
            if target == "testing" or LEVELS.get(target, 0) > LEVELS[module.folder]:
                wrong.append(f"{module.at(line)} imports {imported}")
    assert not wrong, "imports that point up:\n" + "\n".join(wrong)
    for start in edges:
        reached, todo = set[str](), [*edges[start]]
        while todo:
            folder = todo.pop()
            if folder not in reached:
                reached.add(folder)
                todo += edges.get(folder, set())
        assert start not in reached, f"imports of {start}/ lead in a circle back to it"


def own_room(imported: str) -> str:
    """The room inside its folder that an import of ours leads to."""
    parts = imported.split(".")
    return parts[2] if len(parts) > 2 and (PACKAGE / parts[1] / parts[2]).is_dir() else "."


def test_imports_between_rooms_point_down(package: list[Module]) -> None:
    wrong = []
    for module in package:
        rooms = ROOMS.get(module.folder)
        if rooms is None or (module.path.name == "__init__.py" and module.room == "."):
            continue
        assert module.room in rooms, f"{module.folder}/{module.room}/ is new: give it a place in ROOMS"
        for line, imported in module.imports:
            if own_folder(imported) == module.folder:
                room = own_room(imported)
                if rooms.index(room) > rooms.index(module.room):
                    wrong.append(f"{module.at(line)} imports {imported}")
    assert not wrong, "imports that point up between rooms:\n" + "\n".join(wrong)


def test_rooms_are_small_and_say_what_they_are_for() -> None:
    wrong = []
    for room in sorted({path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE / "worker" / "site"}):
        modules = len([*room.glob("*.py")])
        if modules > ROOM_MODULES_MAX:
            wrong.append(f"{room.relative_to(ROOT)} has {modules} modules, at most {ROOM_MODULES_MAX}")
        about = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
        inner = room.parent != PACKAGE and room != PACKAGE
        if not about or (inner and len(re.findall(r"[.!?](?:\s|$)", about)) < 3):
            wrong.append(
                f"{room.relative_to(ROOT)}/__init__.py: what for, what it may touch, where to start reading"
            )
    assert not wrong, "\n".join(wrong)


# The user's own sitecustomize is what ours hands on to.
@pytest.mark.parametrize(("folder", "others"), [("core", {"msgspec"}), ("worker", {"sitecustomize"})])
def test_core_and_worker_import_next_to_nothing(package: list[Module], folder: str, others: set[str]) -> None:
    allowed = sys.stdlib_module_names | others
    wrong = [
        f"{module.at(line)} imports {imported}"
        for module in package
        if module.folder == folder
        for line, imported in module.imports
        if own_folder(imported) != folder and imported.partition(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_the_plane_never_loads_torch(package: list[Module]) -> None:
    """Loaded for real, so that a detour through another module is found too."""
    names = [m.name.removesuffix(".__init__") for m in package if m.folder in WITHOUT_TORCH]
    names = [name for name in names if not name.endswith(".__main__")]
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        if (error.name or '').partition('.')[0] == 'aegis_elastic':\n"
        "            raise\n"  # an extra that isn't installed is no matter of this test
        "    assert 'torch' not in sys.modules, f'{name} loads torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_the_seam_touches_torchs_private_names(package: list[Module]) -> None:
    def private(dotted: str) -> bool:
        return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))

    wrong = []
    for module in package:
        if module.name == "aegis_elastic.agents.ranks.torch_seam":
            continue
        roots = {"torch"}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
                roots |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                roots |= {a.asname for a in node.names if a.asname and a.name.partition(".")[0] == "torch"}
        for line, imported in module.imports:
            if imported.partition(".")[0] == "torch" and private(imported):
                wrong.append(f"{module.at(line)} imports {imported}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute):
                dotted = ast.unparse(node)
                if dotted.partition(".")[0] in roots and private(node.attr):
                    wrong.append(f"{module.at(node.lineno)} uses {dotted}")
    assert not wrong, "private names of torch outside agents/ranks/torch_seam.py:\n" + "\n".join(wrong)


def test_only_the_machine_constructs_or_changes_a_status(package: list[Module]) -> None:
    wrong = []
    for module in package:
        if f"{module.name}.".startswith("aegis_elastic.core.machine."):
            continue
        for line, function, call in calls(module):
            name = function.rpartition(".")[2]
            of_status = call.args and "status" in ast.unparse(call.args[0]).lower().rpartition(".")[2]
            if name == "Status" or (name == "replace" and of_status):
                wrong.append(f"{module.at(line)}: {ast.unparse(call)[:80]}")
    assert not wrong, "statuses made outside core/machine:\n" + "\n".join(wrong)


def test_nothing_prints_or_sleeps_where_it_should_not(package: list[Module]) -> None:
    wrong = []
    for module in package:
        speaks = module.folder in MAY_PRINT or module.path.name == "__main__.py"
        for line, function, _ in calls(module):
            if function == "print" and not speaks:
                wrong.append(f"{module.at(line)} prints")
            if function == "time.sleep":
                wrong.append(f"{module.at(line)} sleeps: wait for the event instead")
        wrong += [f"{module.at(line)} imports sleep" for line, name in module.imports if name == "time.sleep"]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_to_do(everything: list[Module]) -> None:
    words = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
    wrong = [
        f"{module.at(number)}: {line.strip()}"
        for module in everything
        for number, line in enumerate(module.text.splitlines(), start=1)
        if words.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_is_used(package: list[Module]) -> None:
    """A module is alive if our code imports it, starts it by name or path, or pyproject names it."""
    users = [*package, *modules_under(ROOT / "examples", ROOT / "benchmarks")]
    imported = {name for user in users for _, name in user.imports}
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dead = []
    for module in package:
        if module.folder == "testing" or module.path.stem in ENTRY or module.name in BEHIND_THE_CONTRACT:
            continue
        by_import = any(name == module.name or name.startswith(f"{module.name}.") for name in imported)
        started = (f'"{module.name}"', f'"{module.path.name}"')
        by_start = any(mark in user.text for user in users if user is not module for mark in started)
        if not (by_import or by_start or f"{module.name}:" in declared):
            dead.append(str(module.path.relative_to(ROOT)))
    assert not dead, "modules that nobody imports:\n" + "\n".join(dead)
