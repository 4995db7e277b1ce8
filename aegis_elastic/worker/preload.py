"""What a spare may import ahead of its script: found by parsing the script, never by running it.

The script and the user's own modules that it imports are parsed in the order in which they would run. Imports
that are certain (at module level, not in a branch that may not be taken) and lead to an *installed* package
are wanted; the user's own files are never imported ahead, since they may change until they run.

Imports after a line that changes what an import means are not used: after a write to the environment
(libraries read it when they are imported) or to ``sys.path``. For torch only a write to a variable that its
import could read counts, and only before torch itself is imported.

Standard library only and old syntax: it is loaded by path into whatever Python the user runs.
"""

import ast
import os
import sys
from importlib.machinery import PathFinder

FILES_MAX = 400
FILE_BYTES_MAX = 1 << 20
# Importing these has effects outside the process (MPI_Init would count it as a second process).
NEVER = frozenset({"mpi4py", "horovod", "torch_xla", "habana_frameworks", "ray", "dotenv"})
# Prefixes of variables that are read while torch (with numpy and math libraries) is imported, in any version.
READ_BY_TORCH = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_", "BLIS_", "NPY_", "KINETO_"),
    *("TORCH", "PYTORCH", "ATEN_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "XLA_", "TRITON_"),
    *("PYTHON", "LD_", "MALLOC_"),
)
ENVIRONMENT_CALLS = frozenset({"putenv", "unsetenv", "load_dotenv"})
ENVIRONMENT_METHODS = frozenset({"setdefault", "update", "pop", "popitem", "clear"})
PATH_METHODS = frozenset({"insert", "append", "extend", "remove", "pop", "clear"})
# Imported by torch itself, seconds later, where one of the names is used.
IMPLIED = {
    "torch._dynamo": ("DistributedDataParallel", "DDP", "optim", "compile", "fully_shard"),
}
LIBRARIES_THAT_OPTIMISE = frozenset(
    {"transformers", "accelerate", "lightning", "pytorch_lightning", "deepspeed", "megatron", "torchtitan"}
)


class Wanted:
    """Modules in the order of their import: (name, names imported from it). ``why``: what ended it."""

    def __init__(self) -> None:
        self.modules = []  # type: list[tuple[str, tuple[str, ...]]]
        self.why = ""

    def add(self, name: str, names: "tuple[str, ...]" = ()) -> None:
        """Append a module, unless it is there with the same names."""
        if (name, names) not in self.modules:
            self.modules.append((name, names))

    def has(self, package: str) -> bool:
        """Whether a module of that package is wanted."""
        return any(name.partition(".")[0] == package for name, _ in self.modules)


def wanted(argv: "list[str]", path: "list[str]", cwd: str, uses_torch: bool) -> Wanted:
    """Read the command ``argv`` (``[python, options, script | -m module, arguments]``).

    ``path`` is ``sys.path`` without the script's folder. ``uses_torch``: the last incarnation had torch
    loaded, wherever it is imported.
    """
    kind, target = command(argv)
    if kind == "script":
        folder, file = os.path.dirname(os.path.realpath(target)), target
    elif kind == "module":
        folder, file = cwd, _module_file(target, [cwd, *path])
    else:
        folder, file = cwd, ""
    reader = _Reader([folder, *path])
    if kind == "code":
        reader.read(target, "")
    elif file:
        reader.file(file, target.rpartition(".")[0] if kind == "module" else "")
    reader.finish(uses_torch)
    return reader.found


def command(argv: "list[str]") -> "tuple[str, str]":
    """("script", path), ("module", name), ("code", text) or ("", "") for an interpreter's command line."""
    arguments = list(argv[1:])
    while arguments:
        argument = arguments.pop(0)
        if argument in ("-m", "-c") and arguments:
            return ("module" if argument == "-m" else "code"), arguments[0]
        if argument in ("-W", "-X", "--check-hash-based-pycs") and arguments:
            arguments.pop(0)
        elif not argument.startswith("-"):
            if os.path.isdir(argument):
                return "", ""
            return "script", argument
        elif argument == "-":
            return "", ""
    return "", ""


def own_names(folder: str) -> "frozenset[str]":
    """Top-level modules in the script's folder, which hide installed ones of the same name."""
    names = set()
    try:
        entries = os.listdir(folder or ".")
    except OSError:
        return frozenset()
    for entry in entries:
        stem, dot, _ = entry.partition(".")
        if entry.endswith((".py", ".so")):
            names.add(stem)
        elif not dot and os.path.exists(os.path.join(folder, entry, "__init__.py")):
            names.add(entry)
    return frozenset(names)


def _module_file(name: str, path: "list[str]") -> str:
    """The file that ``-m name`` runs, without importing anything; "" if there is none."""
    folders = path  # type: list[str] | None
    spec = None
    for part in _prefixes(name):
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            return ""
        folders = list(spec.submodule_search_locations or [])
    if spec is not None and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec(name + ".__main__", folders)
    return (spec.origin or "") if spec is not None else ""


def _prefixes(name: str) -> "list[str]":
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


class _Reader:
    """One walk over the script and the user's modules behind it."""

    def __init__(self, path: "list[str]") -> None:
        self.found = Wanted()
        self._path = path
        self._seen = set()  # type: set[str]
        self._names = set()  # type: set[str]
        self._trusted = True
        self._torch_trusted = True

    def file(self, file: str, package: str) -> None:
        """Parse one file of the user's, unless it was parsed before."""
        if file in self._seen or len(self._seen) >= FILES_MAX or not file.endswith(".py"):
            return
        self._seen.add(file)
        try:
            with open(file, "rb") as opened:
                source = opened.read(FILE_BYTES_MAX)
        except OSError:
            return
        self.read(source, package)

    def read(self, source: "bytes | str", package: str) -> None:
        """Parse one module's source. A source that doesn't parse, or nests too deep, is skipped."""
        try:
            tree = ast.parse(source)
            nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
        except (SyntaxError, ValueError, RecursionError):
            return
        for node in nodes:
            if isinstance(node, ast.Attribute):
                self._names.add(node.attr)
            elif isinstance(node, ast.Name):
                self._names.add(node.id)
            elif isinstance(node, ast.alias):
                self._names.add(node.name.rpartition(".")[2])
        # a function may be called before the lines below it run: a write anywhere counts from its line on
        written = [(node.lineno, _write(node)) for node in nodes]
        writes = sorted((line, key) for line, key in written if key is not None)
        self._body(tree.body, package, writes)
        if not self.found.has("torch"):
            self._apply_writes(
                writes, min((node.lineno for node in nodes if _imports_torch(node)), default=1 << 30)
            )

    def finish(self, uses_torch: bool) -> None:
        """Add what is imported without an import that we see: torch itself, and what torch imports late."""
        found = self.found
        if not self._torch_trusted:
            found.modules[:] = []
            return
        if uses_torch and not found.has("torch"):
            found.modules.insert(0, ("torch", ()))
        if found.has("torch"):
            optimises = any(found.has(library) for library in LIBRARIES_THAT_OPTIMISE)
            for module, names in IMPLIED.items():
                if optimises or not self._names.isdisjoint(names):
                    found.add(module)

    def _body(self, body: "list[ast.stmt]", package: str, writes: "list[tuple[int, str]]") -> None:
        for statement in body:
            self._apply_writes(writes, statement.lineno)
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    self._import(alias.name, ())
            elif isinstance(statement, ast.ImportFrom):
                name = _absolute(statement, package)
                self._import(name, tuple(alias.name for alias in statement.names if alias.name != "*"))
            elif _runs_its_body(statement):
                self._body(statement.body, package, writes)  # type: ignore[attr-defined]

    def _apply_writes(self, writes: "list[tuple[int, str]]", line: int) -> None:
        """Apply the writes above ``line``: from there on imports may mean something else."""
        for where, key in writes:
            if where >= line:
                continue
            if self._trusted:
                self._trusted = False
                self.found.why = f"line {where} changes {key or 'the environment'}"
            for_torch = not key or key.startswith(READ_BY_TORCH)
            if for_torch and not self.found.has("torch"):
                self._torch_trusted = False

    def _import(self, name: str, names: "tuple[str, ...]") -> None:
        top = name.partition(".")[0]
        if not top or top in sys.builtin_module_names:
            return
        spec = PathFinder.find_spec(top, self._path)
        if spec is None:
            return
        if _installed(spec.origin or ""):
            if top == "torch" and (self._torch_trusted or self.found.has("torch")):
                self.found.add("torch", ())
            if self._trusted and top not in NEVER:
                self.found.add(name, names)
            return
        if _standard(spec.origin or "") or top in NEVER:
            return
        folders = self._path
        for part in _prefixes(name):  # the parent packages run, too
            spec = PathFinder.find_spec(part, folders)
            if spec is None:
                return
            folders = list(spec.submodule_search_locations or [])
            self.file(spec.origin or "", part if spec.submodule_search_locations else part.rpartition(".")[0])
        for each in names:  # "from package import module"
            inner = PathFinder.find_spec(name + "." + each, folders) if folders else None
            if inner is not None:
                self.file(inner.origin or "", name)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _runs_its_body(statement: ast.stmt) -> bool:
    """``try:``, ``with:``, and ``if __name__ == "__main__":``, which is true where the script runs."""
    if isinstance(statement, (ast.Try, ast.With)):
        return True
    test = statement.test if isinstance(statement, ast.If) else None
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and test.left.id == "__name__"
        and isinstance(test.ops[0], ast.Eq)
    )


def _imports_torch(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "torch" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch"


def _write(node: ast.AST) -> "str | None":
    """The variable that this node changes ("" if that can't be read), "sys.path", or None."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return _key(node.slice) if _ends(node.value, "environ") else None
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return "sys.path" if _is_path(node) else ("" if node.attr == "environ" else None)
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in ENVIRONMENT_CALLS:
        return _key(node.args[0]) if node.args and name != "load_dotenv" else ""
    if isinstance(function, ast.Attribute):
        if name in ENVIRONMENT_METHODS and _ends(function.value, "environ"):
            return _key(node.args[0]) if node.args and name in ("setdefault", "pop") else ""
        if name in PATH_METHODS and _is_path(function.value):
            return "sys.path"
        if name == "addsitedir":
            return "sys.path"
    return None


def _ends(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == name) or (
        isinstance(node, ast.Name) and node.id == name
    )


def _is_path(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("path", "meta_path", "path_hooks")
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    )


def _key(node: ast.AST) -> str:
    inner = getattr(node, "value", None)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return inner.value if isinstance(inner, ast.Constant) and isinstance(inner.value, str) else ""


def _installed(origin: str) -> bool:
    parts = origin.split(os.sep)
    return "site-packages" in parts or "dist-packages" in parts


def _standard(origin: str) -> bool:
    return origin in ("built-in", "frozen") or origin.startswith(os.path.dirname(os.__file__) + os.sep)
