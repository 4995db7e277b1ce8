"""What people see of a node's checks: progress bars on a terminal, and a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import TracebackType

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from aegis_elastic.core.model import CheckResult
from aegis_elastic.launch.screens import formatting


class Bars:
    """One progress bar for each name, on stderr, so that stdout has only the results."""

    def __init__(self, quiet: bool) -> None:
        self.visible = not quiet and sys.stderr.isatty()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f} of {task.total:.0f} s {task.fields[text]}"),
            console=Console(file=sys.stderr, markup=False, highlight=False, emoji=False),
            transient=True,
            disable=not self.visible,
        )
        self._bars: dict[str, TaskID] = {}
        self._running: set[str] = set()

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def add(self, name: str, total_s: float) -> None:
        """A bar that is full after `total_s`."""
        self._bars[name] = self._progress.add_task(f"{name:<22}", total=total_s, text="")
        self._running.add(name)

    def advance(self, elapsed_s: float) -> None:
        """Move all bars that still run."""
        for name in self._running:
            self._progress.update(self._bars[name], completed=elapsed_s)

    def show(self, name: str, total_s: float, elapsed_s: float, text: str) -> None:
        """Move this bar, which is added when it is first shown, and show `text` beside it."""
        if name not in self._bars:
            self.add(name, total_s)
        self._progress.update(self._bars[name], completed=elapsed_s, text=text)

    def end(self, name: str, passed: bool) -> None:
        """Stop this bar and show whether the check has passed."""
        self._running.discard(name)
        self._progress.update(self._bars[name], text="ok" if passed else "FOUND")


def table(node: str, results: Iterable[CheckResult]) -> Table:
    """What was found, for people."""
    grid = Table(title=node, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for heading in ("check", "", "took", "result"):
        grid.add_column(heading, no_wrap=heading != "result", overflow="fold")
    for result in results:
        verdict = Text("ok", "green") if result.passed else Text("FOUND", "bold red")
        prefix = f"{result.check_type.split()[0]}: "  # "burn" of "burn cuda:0"
        detail = formatting.clean(result.result.removeprefix(prefix), limit=2000)
        shown = Text(detail) if result.passed else Text.assemble((f"{result.finding}  ", "red"), detail)
        grid.add_row(result.check_type, verdict, formatting.duration(result.duration_s), shown)
    return grid


def as_json(node: str, results: Iterable[CheckResult]) -> str:
    """The same for programs: {"node", "pass", "results"}."""
    found = list(results)
    document = {"node": node, "pass": all(result.passed for result in found), "results": found}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
