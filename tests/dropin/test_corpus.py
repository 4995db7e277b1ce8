"""Launch lines of public repositories, run unchanged by torchrun and by us: ranks see no difference.

Two run always, one that succeeds and one that fails; all of them run in `make full`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.dropin import compare
from tests.dropin.forms import FORMS, Form, renamed
from tests.integration.harness import free_port

ALWAYS = ("distributed.launch", "a rank fails")
RECORDER = Path(__file__).resolve().parent / "recorder.py"
PATIENCE_S = 110.0
_BIN = Path(sys.executable).parent
# One task for each node, all of them here; the variables are those that Slurm's own sets for a task.
_SRUN = r"""#!/bin/bash
while [[ "$1" == -* ]]; do [[ "$1" == --jobid ]] && shift; shift; done
tasks=()
for task in 0 1; do
  SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 "$@" & tasks+=($!)
done
code=0
for task in "${tasks[@]}"; do wait $task || code=$?; done
exit $code
"""


class Run(NamedTuple):
    """How one launcher did: exit code, both streams, each rank's record, the files of its log directory."""

    code: int
    stdout: list[str]
    stderr: list[str]
    ranks: dict[str, dict[str, Any]]
    files: dict[str, list[str]]


class Running:
    """A form's script, started."""

    def __init__(self, form: Form, folder: Path, script: str) -> None:
        self._folder = folder
        self._port = str(free_port())
        _write_programs(folder)
        filled = {"{port}": self._port, "{cwd}": str(folder)}
        self._replaced = {self._port: "{port}", str(folder): "{cwd}"}
        text = compare.plain(script, filled)
        (folder / "launch.sh").write_text(f"#!/bin/bash\n{text}")
        environment = {
            "PATH": f"{folder}/bin:{_BIN}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "CORPUS_OUT": str(folder / "out"),
            "GLOO_SOCKET_IFNAME": "lo",
            "SLURM_JOBID": "7",
            "AEGIS_TEST_SESSION": os.environ["AEGIS_TEST_SESSION"],
            **compare.plain(form.environment, filled),
        }
        with open(folder / "stdout", "w") as stdout, open(folder / "stderr", "w") as stderr:
            self._process = subprocess.Popen(
                ["/bin/bash", str(folder / "launch.sh")],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            )  # fmt: skip

    def end(self) -> Run:
        """Wait for it, and read what it has left."""
        try:
            code = self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
        out, err = ((self._folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        ranks = {file.stem: json.loads(file.read_bytes()) for file in (self._folder / "out").iterdir()}
        logs: dict[str, list[str]] = {}
        for name in ("logs", "output"):
            logs |= compare.files(self._folder / name, self._replaced)
        return Run(
            code,
            compare.rank_lines(out, self._replaced, _of_a_rank),
            compare.rank_lines(err, self._replaced, _of_a_rank),
            compare.plain(ranks, self._replaced),
            logs,
        )

    @property
    def output(self) -> str:
        """The end of its output, to find out why a form failed."""
        return "\n".join(
            (self._folder / name).read_text(errors="replace")[-4000:] for name in ("stdout", "stderr")
        )


def _of_a_rank(line: str) -> bool:
    """Whether a rank wrote this line: our report at the end quotes lines of the first failure, after "| "."""
    return "corpus:" in line and not line.lstrip().startswith("| ")


def _write_programs(folder: Path) -> None:
    """Copy the recorder to every name that the forms use."""
    for name in ("bin", "tmp", "out", "torchtitan", "examples/mimo"):
        (folder / name).mkdir(parents=True)
    for name in ("pretrain_gpt.py", "torchtitan/train.py", "examples/mimo/train.py"):
        shutil.copy(RECORDER, folder / name)
    programs = {
        "bin/srun": _SRUN,
        "numa-set.sh": '#!/bin/bash\nexec python "$@"\n',
        "pretrain_program": '#!/bin/bash\nexec python pretrain_gpt.py "$@"\n',
        "python-in-a-container": '#!/bin/bash\nexec python "$@"\n',
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def cases() -> list[Any]:
    return [
        pytest.param(form, id=form.name, marks=() if form.name in ALWAYS else pytest.mark.full)
        for form in FORMS
    ]


@pytest.mark.parametrize("form", cases())
def test_a_rank_sees_no_difference(form: Form, tmp_path: Path) -> None:
    for name in ("torchrun", "aegis-run"):
        (tmp_path / name).mkdir()
    theirs_running = Running(form, tmp_path / "torchrun", form.script)
    theirs = theirs_running.end() if form.exclusive else None
    ours_running = Running(form, tmp_path / "aegis-run", renamed(form.script))
    ours = ours_running.end()
    theirs = theirs or theirs_running.end()
    output = f"--- torchrun\n{theirs_running.output}\n--- aegis-run\n{ours_running.output}"

    assert (theirs.code, ours.code) == (form.code, form.code), output
    assert len(theirs.ranks) == form.ranks and set(ours.ranks) == set(theirs.ranks), output
    for rank in theirs.ranks:
        wrong = compare.not_allowed(theirs.ranks[rank], ours.ranks[rank])
        assert not wrong, f"rank {rank}: {json.dumps(wrong, indent=1)}"
        _family(ours.ranks[rank]["parents"])
    assert ours.stdout == theirs.stdout, output
    assert ours.stderr == theirs.stderr, output
    assert ours.files == theirs.files, output


def _family(parents: list[list[str]]) -> None:
    """A preemption trap finds the ranks as children of what `pgrep -f "torchrun|distributed.run"` finds."""
    title = " ".join(parents[0])
    assert re.search(r"torchrun|distributed\.run", title), parents


def test_no_form_of_the_table_is_left_out() -> None:
    assert len({form.name for form in FORMS}) == len(FORMS) >= 15
    assert set(ALWAYS) <= {form.name for form in FORMS}
    for form in FORMS:
        assert renamed(form.script) != form.script
