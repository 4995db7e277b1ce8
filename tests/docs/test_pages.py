"""Commands on the pages are accepted by our programs, and quoted output is what they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from aegis_elastic.launch.ctl import main
from aegis_elastic.launch.flags.command_line import split
from aegis_elastic.launch.flags.parser import make_parser

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
# ```bash blocks of these pages are run as they stand, ```sh and indented ones only read.
RUN = ("from-torchrun",)
_OURS = {"aegis-run", "aegis-master", "aegisctl"}
# Where a page leaves open what is given.
_PLACEHOLDERS = re.compile(r"\.\.\.|…|\[(?!@)|<")


def lines(page: Path) -> list[str]:
    """Every command line of ours in a page's blocks, continuation lines joined."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```(?:sh|bash|)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    unfenced = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^ {4}(\S.*)$", unfenced, flags=re.MULTILINE)
    found = []
    for line in [*"\n".join(blocks).splitlines(), *indented]:
        argv = line.removeprefix("$ ").split("  #")[0].split("    #")[0]
        first = re.sub(r"^(\w+=\S* )*", "", argv).partition(" ")[0]
        if first in _OURS and not _PLACEHOLDERS.search(argv):
            found.append(re.split(r";| > | &| \| ", argv)[0])
    return found


def commands() -> list[tuple[str, str]]:
    return [(page.stem, line) for page in PAGES for line in lines(page)]


@pytest.mark.parametrize(("page", "line"), commands())
def test_our_programs_take_what_the_page_says(page: str, line: str) -> None:
    argv = [
        argument
        for argument in shlex.split(line)
        if not re.fullmatch(r"\w+=.*", argument) or argument[0] == "-"
    ]
    program, rest = argv[0], argv[1:]
    if program == "aegisctl":
        main._parser().parse_args(rest)
        return
    numbers = [re.sub(r"\$\{?\w+(\[@\])?\}?", "1", argument) for argument in rest]
    parser = make_parser()
    assert all(one.action is not None for one in split(numbers, parser)[0]), line
    parser.parse_args([*numbers, *(["true"] if program == "aegis-master" else [])])


def test_there_is_something_to_look_at() -> None:
    assert len(commands()) > 9
    assert {"from-torchrun", "slurm", "megatron"} <= {page for page, _ in commands()}


def test_what_the_guide_quotes_is_what_we_say() -> None:
    source = "\n".join(path.read_text() for path in sorted((ROOT / "aegis_elastic").rglob("*.py")))
    # A message may be written in several pieces, with values in between.
    source = re.sub(r"\"\s*\n\s*f?\"", "", source)
    source += "unrecognized arguments"  # argparse's own text
    guide = (ROOT / "docs" / "troubleshooting.md").read_text()
    cells = re.findall(r"^\| ([^|]+) \|", guide, flags=re.MULTILINE)
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 12
    for text in quoted:
        for piece in text.split("…"):
            assert piece.strip() in source, text


@pytest.mark.full
@pytest.mark.parametrize("page", RUN)
def test_the_pages_own_example_runs(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    script = "set -e\n" + "\n".join(block for block in blocks if "pip install" not in block)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=110,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
             "XDG_STATE_HOME": str(tmp_path / "state")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 1 start 1" in done.stdout
    assert "root cause: rank 1" in done.stderr and "exit code 3" in done.stderr
