"""`aegisctl signatures`: which lines of a log match a failure signature."""

from __future__ import annotations

import sys

import msgspec
from rich.console import Console
from rich.text import Text

from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.core.diagnosis.signatures import UNKNOWN, Signature, load
from aegis_elastic.launch.screens import formatting

_STDIN = 0
# Actions that are highlighted; the rest stays plain.
_STYLES = {
    "isolate_node": "bold red",
    "restart_container": "yellow",
    "restart_in_place": "yellow",
    "fallback_checkpoint": "yellow",
    "fail_fast": "magenta",
    "ignore": "dim",
}


class LineResult(msgspec.Struct, frozen=True):
    """The result for one line, counted from 1; where nothing matches: nulls, and the action `unknown`."""

    line: int
    fault_class: str | None
    component: str | None
    role: str | None
    action: str


def line_result(number: int, signature: Signature | None) -> LineResult:
    """The result for the line of that number."""
    if signature is None:
        return LineResult(number, None, None, None, UNKNOWN)
    return LineResult(number, signature.fault_class, signature.component, signature.role, signature.action)


def show(named: str, as_json: bool, console: Console) -> int:
    """Classifies every line of a file (`-`: standard input) and returns the exit code.

    As JSON every line has a result, else only lines that match are shown. Raises UsageError.
    """
    classify, encode = load().classify, msgspec.json.Encoder().encode
    from_stdin = named == "-"
    try:
        # A log holds whatever bytes, and progress bars hold carriage returns: only \n ends a line.
        file = open(  # noqa: SIM115 - closed below; here only its opening may fail
            _STDIN if from_stdin else named,
            encoding="utf-8",
            errors="replace",
            newline="\n",
            closefd=not from_stdin,
        )
    except OSError as error:
        raise UsageError(f"cannot read {named}: {error.strerror}; want a log file, or - for stdin") from error
    with file:
        for number, line in enumerate(file, start=1):
            signature = classify(line)
            if as_json:
                print(encode(line_result(number, signature)).decode())
            elif signature is not None:
                console.print(_row(number, signature, line), soft_wrap=True)
    sys.stdout.flush()
    return 0


def _row(number: int, signature: Signature, line: str) -> Text:
    return Text.assemble(
        f"{number:>7}  ",
        (f"{signature.action:<19}", _STYLES.get(signature.action, "cyan")),
        f"  {signature.fault_class} ({signature.component}, {signature.role})  ",
        (formatting.clean(line), "dim"),
    )
