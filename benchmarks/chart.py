"""Draws the figures of `benchmarks.recovery` as bars.

    python -m benchmarks.chart build/recovery.json docs/recovery.svg

Several files of figures, of rows that were measured one after the other, make one picture. There is one group
for each fault and shape, and one bar for each launcher, divided into its parts; all have one scale, so that a
bar twice as long is twice the time. Rows that could not be measured show why.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, BAR, GAP, HEAD = 960, 130, 190, 16, 30, 64
COLOURS = {
    "detect_s": "#8c564b",
    "stop_s": "#d62728",
    "decide_s": "#ff7f0e",
    "start_s": "#1f77b4",
    "group_s": "#17becf",
    "step_s": "#2ca02c",
}
NAMES = ("detect", "stop", "decide", "start + import", "init_process_group", "first step")
INK, PALE = "#333", "#777"
# Longer bars are cut there: half a minute of one launcher must not shrink all others.
CUT_S = 16.0


def draw(figures: dict[str, Any]) -> str:
    """The picture, as SVG."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in figures["rows"]:
        groups.setdefault((f"{row['nodes']}x{row['ranks']}", row["what"]), []).append(row)
    totals = [row["median"]["total_s"] for row in figures["rows"] if "median" in row]
    scale = (WIDTH - LEFT - RIGHT) / min(max(totals, default=1.0), CUT_S)
    body, y = _legend(), HEAD
    for (shape, what), rows in groups.items():
        y += GAP
        body.append(_text(10, y - 8, f"{shape}: {what}", INK, "bold"))
        ours = next(
            (row["median"]["total_s"] for row in rows if row["launcher"] == "aegis-run" and "median" in row),
            0,
        )
        for row in rows:
            body += _bar(row, y, scale, ours)
            y += BAR + 4
    machine = figures["machine"]
    caption = (
        f"{machine['cpus']} cores, torch {machine['torch']}, gloo; medians, seconds to all ranks' next step"
    )
    body.append(
        _text(10, y + 24, caption + ("" if machine["quiet"] else "; the machine was not quiet"), PALE)
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 40}" font-family="sans-serif" '
    )
    return (
        head
        + 'font-size="12"><rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _legend() -> list[str]:
    found, x = [_text(10, 22, "From a fault to the next training step", INK, "bold")], 10
    for name, colour in zip(NAMES, COLOURS.values(), strict=True):
        found.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/>')
        found.append(_text(x + 17, 44, name, INK))
        x += 40 + 7 * len(name)
    return found


def _bar(row: dict[str, Any], y: int, scale: float, ours: float) -> list[str]:
    found = [_text(LEFT - 8, y + 12, row["launcher"], INK, anchor="end")]
    if "median" not in row:
        return [*found, _text(LEFT, y + 12, row["why"][:120], PALE)]
    median, x = row["median"], float(LEFT)
    for part, colour in COLOURS.items():
        width = min(median[part] * scale, LEFT + CUT_S * scale - x)
        found.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0):.1f}" height="{BAR}" fill="{colour}"/>'
        )
        x += max(width, 0)
    total = median["total_s"]
    label = f"{total:.2f} s" + (f", {total / ours:.0f}x" if ours and row["launcher"] != "aegis-run" else "")
    return [*found, _text(int(x) + 6, y + 12, label + (" (cut)" if total > CUT_S else ""), INK)]


def _text(x: int, y: int, text: str, colour: str, weight: str = "normal", anchor: str = "start") -> str:
    style = f'fill="{colour}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


def main(argv: Sequence[str]) -> int:
    """Reads the figures, writes the picture."""
    if len(argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    *read, written = map(Path, argv)
    written.write_text(draw(together([json.loads(file.read_text()) for file in read])))
    return 0


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rows of all; quiet if all were taken on a quiet machine."""
    quiet = all(part["machine"]["quiet"] for part in parts)
    return {
        "machine": parts[0]["machine"] | {"quiet": quiet},
        "rows": [row for part in parts for row in part["rows"]],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
