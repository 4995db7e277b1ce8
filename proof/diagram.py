"""The phase diagram of the documentation, generated from the machine's own table, so that it stays true.

`python -m proof.diagram` writes docs/phases.svg and docs/phases.md; a test compares them with the table.
"""

from __future__ import annotations

import math
from pathlib import Path
from xml.sax.saxutils import escape

from aegis_elastic.core.machine import RULES
from aegis_elastic.core.model import Phase

DOCS = Path(__file__).resolve().parent.parent / "docs"
_WIDTH, _HEIGHT, _BOX = 1060, 500, (150, 46)
_HALO = 'stroke="#fff" stroke-width="4" paint-order="stroke"'
# Positions of the phases: a run without failures along the top, recovery below, the ends at the right.
_AT: dict[Phase, tuple[int, int]] = {
    Phase.PENDING: (110, 90),
    Phase.BOOT_CHECKING: (380, 90),
    Phase.RUN_COMMAND: (650, 90),
    Phase.SUCCEED: (950, 90),
    Phase.RESTARTING: (380, 300),
    Phase.TROUBLESHOOTING: (650, 300),
    Phase.FAILED: (950, 420),
}


def arrows() -> dict[tuple[Phase, Phase], list[str]]:
    """Every change of phase that the table allows, with the rules that make it (and what they count)."""
    found: dict[tuple[Phase, Phase], list[str]] = {}
    for rule in RULES:
        for source in sorted(rule.phases, key=lambda phase: phase.value):
            for target in sorted(rule.to, key=lambda phase: phase.value):
                if source is not target:
                    label = f"{rule.name} ({rule.counts})" if rule.counts else rule.name
                    found.setdefault((source, target), []).append(label)
    return found


def table() -> str:
    """The rules in their order, as Markdown."""
    lines = [
        "# The phase machine's rules",
        "",
        "Generated from `aegis_elastic.core.machine.RULES` by `python -m proof.diagram`: don't edit.",
        "On `Reconcile` the first rule whose phase and guard fit is taken. ![the phases](phases.svg)",
        "",
        "| rule | in | can lead to | accounts |",
        "| --- | --- | --- | --- |",
    ]
    for rule in RULES:
        ins, outs = (", ".join(p.value for p in Phase if p in phases) for phases in (rule.phases, rule.to))
        lines.append(f"| {rule.name} | {ins} | {outs} | {rule.counts or '-'} |")
    return "\n".join(lines) + "\n"


def svg() -> str:
    """The diagram: a box for each phase, an arrow for each change, its rules beside it."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#445"/></marker></defs>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
    ]
    for (source, target), labels in arrows().items():
        if target is not Phase.FAILED:
            parts += _arrow(source, target, sorted({label.split(" (")[0] for label in labels}))
    parts += _into_failed()
    for phase, (x, y) in _AT.items():
        w, h = _BOX
        fill = {"Succeed": "#dff3e0", "Failed": "#f8dddd"}.get(phase.value, "#e8eef8")
        parts.append(
            f'<rect x="{x - w // 2}" y="{y - h // 2}" width="{w}" height="{h}" rx="9" '
            f'fill="{fill}" stroke="#445"/>'
        )
        parts.append(f'<text x="{x}" y="{y + 5}" text-anchor="middle" font-size="15">{phase.value}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _into_failed() -> list[str]:
    """Failed can be reached from everywhere: listed as text, since the arrows would hide the rest."""
    y = _AT[Phase.FAILED][1]
    lines: dict[str, list[str]] = {}
    for (source, target), labels in arrows().items():
        if target is Phase.FAILED:
            for label in labels:
                lines.setdefault(label.split(" (")[0], []).append(source.value)
    out = [f'<text x="60" y="{y - 34}" font-size="12" fill="#445">Into Failed lead:</text>']
    for row, (rule, sources) in enumerate(lines.items()):
        text = f"{rule}: from {', '.join(sources) if len(sources) < 5 else 'every phase that is not an end'}"
        spot = f'x="{60 + 430 * (row // 5)}" y="{y - 16 + 18 * (row % 5)}"'
        out.append(f'<text {spot} font-size="12" fill="#445">{escape(text)}</text>')
    return out


def _edge_point(phase: Phase, towards: tuple[float, float]) -> tuple[float, float]:
    x, y = _AT[phase]
    dx, dy = towards[0] - x, towards[1] - y
    w, h = _BOX[0] / 2, _BOX[1] / 2
    scale = min(w / abs(dx) if dx else math.inf, h / abs(dy) if dy else math.inf)
    return x + dx * scale, y + dy * scale


def _arrow(source: Phase, target: Phase, labels: list[str]) -> list[str]:
    (x1, y1), (x2, y2) = _AT[source], _AT[target]
    length = math.hypot(x2 - x1, y2 - y1)
    # Bent to the left of its direction, so that there and back don't lie on each other.
    bend = 46 if (target, source) in arrows() else 0
    # The one that would run through the boxes between goes over them.
    bend = 120 if (source, target) == (Phase.PENDING, Phase.SUCCEED) else bend
    mx, my = (x1 + x2) / 2 + bend * (y2 - y1) / length, (y1 + y2) / 2 - bend * (x2 - x1) / length
    (sx, sy), (tx, ty) = _edge_point(source, (mx, my)), _edge_point(target, (mx, my))
    lx, ly = (sx + 2 * mx + tx) / 4, (sy + 2 * my + ty) / 4
    curve = f"M{sx:.0f} {sy:.0f}Q{mx:.0f} {my:.0f} {tx:.0f} {ty:.0f}"
    path = f'<path d="{curve}" fill="none" stroke="#445" marker-end="url(#tip)"/>'
    text = escape(", ".join(labels))
    # Under an arrow that runs back along a row, over all others.
    spot = f'x="{lx:.0f}" y="{ly + (15 if y1 == y2 and x2 < x1 else -5):.0f}"'
    label = f'<text {spot} text-anchor="middle" font-size="12" fill="#226" {_HALO}>{text}</text>'
    return [path, label]


def write(docs: Path = DOCS) -> None:
    """Write both files."""
    docs.mkdir(exist_ok=True)
    (docs / "phases.svg").write_text(svg(), encoding="utf-8")
    (docs / "phases.md").write_text(table(), encoding="utf-8")


if __name__ == "__main__":
    write()
