"""A rank behaves the same with our site folder as without it; only the error file is new."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aegis_elastic.worker.environment import MARKER, prepare_env

PACKAGE_ROOT = str(Path(__file__).parents[2])
# everything of a starting interpreter that a script could see
SHOW = """
import sys
modules = sorted(sys.modules)
import json, os
print(json.dumps({
    "argv": sys.argv, "file": globals().get("__file__"), "name": __name__, "path": sys.path,
    "env": dict(sorted(os.environ.items())), "modules": [name for name in modules if name != "atexit"],
    "main": sorted(vars(sys.modules["__main__"])), "flags": str(sys.flags), "orig": sys.orig_argv,
    "importers": sorted(sys.path_importer_cache),
    "meta": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
}))
"""


class Rank:
    """Runs a Python command in a folder, as a rank with our environment or plainly."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.error_file = folder / "error.json"

    def run(
        self, *arguments: str, ours: bool = True, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        full = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        full |= {"TORCHELASTIC_ERROR_FILE": str(self.error_file), **(env or {})}
        return subprocess.run(
            [sys.executable, *arguments],
            env=prepare_env(full) if ours else full,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )

    def run_both(
        self, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run with us and without; everything that can be seen from outside must be equal."""
        plain, ours = self.run(*arguments, ours=False, env=env), self.run(*arguments, env=env)
        assert ours.returncode == plain.returncode
        assert ours.stdout == plain.stdout
        assert ours.stderr == plain.stderr
        return ours

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def error(self) -> dict[str, Any]:
        recorded: dict[str, Any] = json.loads(self.error_file.read_text())
        return recorded


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


@pytest.mark.parametrize("pythonpath", [None, "", "/tmp", "/tmp:/usr/lib:", ":"])
def test_a_script_sees_the_interpreter_that_it_would_see_without_us(
    rank: Rank, pythonpath: str | None
) -> None:
    env = {} if pythonpath is None else {"PYTHONPATH": pythonpath}
    script = rank.write("show.py", SHOW)
    rank.write("pkg/mod.py", SHOW)
    for arguments in (
        ["-u", script, "--lr", "1"],
        ["show.py"],
        ["-m", "pkg.mod", "x"],
        ["-c", SHOW],
    ):
        seen = json.loads(rank.run_both(*arguments, env=env).stdout)
        assert seen["env"].get("PYTHONPATH") == pythonpath
        assert MARKER not in seen["env"]


@pytest.mark.parametrize(
    "code",
    [
        "print('fine')",
        "raise ValueError('no')",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('message')",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "def f(:\n  pass",
        "try:\n  1/0\nexcept ZeroDivisionError as e:\n  raise RuntimeError('outer') from e",
        "import os; os._exit(9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import threading; t = threading.Thread(target=lambda: 1/0, name='T'); t.start(); t.join()",
        "import atexit; atexit.register(lambda: print('bye')); raise OSError(2, 'x', 'y')",
        "class E(Exception):\n  def __str__(self): raise RuntimeError\nraise E",
        "class E(Exception):\n  __module__ = 'm'\nraise E('é\\udc80')",
        "def f(): f()\nf()",
    ],
)
def test_output_traceback_and_exit_code_are_unchanged(rank: Rank, code: str) -> None:
    rank.run_both(rank.write("train.py", code))
    rank.run_both("-m", "train")


def test_an_uncaught_exception_is_recorded_in_torchelastics_format(rank: Rank) -> None:
    script = rank.write("train.py", "def step():\n    raise ValueError('bad batch 17')\nstep()\n")
    before_s = int(time.time())
    completed = rank.run(script)
    assert completed.returncode == 1
    message = rank.error()["message"]
    assert message["message"] == "ValueError: bad batch 17"
    assert message["extraInfo"]["py_callstack"] == completed.stderr
    assert before_s <= int(message["extraInfo"]["timestamp"]) <= time.time()


def test_modules_are_recorded_as_scripts_are(rank: Rank) -> None:
    rank.write("pkg/train.py", "raise ValueError('in a module')")
    rank.run("-m", "pkg.train")
    assert rank.error()["message"]["message"] == "ValueError: in a module"


@pytest.mark.parametrize(
    "code",
    [
        "print('fine')",
        "raise SystemExit(4)",
        "raise KeyboardInterrupt",
        "try:\n  raise ValueError\nexcept ValueError:\n  pass",
        # what ends in other processes or threads is not the end of the rank
        "import subprocess, sys; subprocess.run([sys.executable, '-c', '1/0'])",
        "import os\nif os.fork() == 0:\n  raise ValueError('child')\nos.wait()",
        "import threading; t = threading.Thread(target=lambda: 1/0); t.start(); t.join()",
    ],
)
def test_nothing_is_recorded_when_no_exception_ends_the_rank(rank: Rank, code: str) -> None:
    rank.run(rank.write("train.py", code))
    assert not rank.error_file.exists()


def test_the_end_of_a_multiprocessing_child_is_not_the_ranks(rank: Rank) -> None:
    code = (
        "import multiprocessing as mp\n"
        "def work(): raise ValueError('child')\n"
        "if __name__ == '__main__':\n"
        "  for method in ('fork', 'spawn'):\n"
        "    p = mp.get_context(method).Process(target=work); p.start(); p.join(); print(p.exitcode)\n"
    )
    completed = rank.run(rank.write("train.py", code))
    assert completed.stdout == "1\n1\n"
    assert not rank.error_file.exists()


def test_what_record_wrote_is_kept(rank: Rank) -> None:
    """@record writes before it raises on; its record may hold more (an errorCode, a child's failure)."""
    code = (
        "import os\n"
        "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as f: f.write('by record')\n"
        "raise ValueError('x')"
    )
    rank.run(rank.write("train.py", code))
    assert rank.error_file.read_text() == "by record"


def test_a_record_from_before_this_process_gives_way(rank: Rank) -> None:
    """A wrapper's helper Python may have failed and been forgiven: its record isn't this rank's end."""
    rank.error_file.write_text("of an earlier process")
    rank.run(rank.write("train.py", "raise ValueError('mine')"))
    assert rank.error()["message"]["message"] == "ValueError: mine"


def test_a_script_with_its_own_excepthook_is_recorded_too(rank: Rank) -> None:
    code = "import sys\nsys.excepthook = lambda *e: print('handled', e[0].__name__)\nraise ValueError('x')"
    completed = rank.run_both(rank.write("train.py", code))
    assert completed.stdout == "handled ValueError\n"
    assert rank.error()["message"]["message"] == "ValueError: x"


def test_an_unwritable_error_file_changes_nothing_for_the_user(rank: Rank) -> None:
    script = rank.write("train.py", "raise ValueError('x')")
    completed = rank.run_both(script, env={"TORCHELASTIC_ERROR_FILE": "/no/such/folder/error.json"})
    assert completed.stderr.endswith("ValueError: x\n")
    rank.run_both(script, env={"TORCHELASTIC_ERROR_FILE": ""})


def test_the_users_own_sitecustomize_runs_as_if_it_were_first(rank: Rank) -> None:
    rank.write(
        "site-a/sitecustomize.py",
        "import sys\nprint(__name__, __file__, sys.path[0], 'sitecustomize' in sys.modules)",
    )
    rank.write("site-b/sitecustomize.py", "print('never')")
    script = rank.write("show.py", "import sys; print(sys.modules['sitecustomize'].__file__)\n" + SHOW)
    env = {"PYTHONPATH": f"{rank.folder}/site-a:{rank.folder}/site-b"}
    lines = rank.run_both(script, env=env).stdout.splitlines()
    assert lines[0].startswith(f"sitecustomize {rank.folder}/site-a/sitecustomize.py")
    assert "never" not in lines


def test_a_broken_sitecustomize_of_the_user_fails_as_it_would_without_us(rank: Rank) -> None:
    env = {"PYTHONPATH": f"{rank.folder}/site-a"}
    script = rank.write("train.py", "raise ValueError('x')")
    for broken in ("1/0", "import no_such_module_at_all", "raise ImportError('x', name='sitecustomize')"):
        rank.write("site-a/sitecustomize.py", broken)
        rank.error_file.unlink(missing_ok=True)
        rank.run_both(script, env={**env, "PYTHONDONTWRITEBYTECODE": "1"})
        assert rank.error()["message"]["message"] == "ValueError: x"


def test_a_hook_that_the_users_sitecustomize_sets_is_still_called(rank: Rank) -> None:
    rank.write("site-a/sitecustomize.py", "import sys\nsys.excepthook = lambda *e: print('theirs')")
    rank.run_both(rank.write("train.py", "1/0"), env={"PYTHONPATH": f"{rank.folder}/site-a"})
    assert rank.error()["message"]["message"] == "ZeroDivisionError: division by zero"


def test_a_python_that_a_rank_starts_has_nothing_of_ours(rank: Rank) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    child = rank.write("child.py", "import sys; print(sys.excepthook is sys.__excepthook__)\n" + SHOW)
    completed = rank.run_both(rank.write("train.py", code), child)
    assert completed.stdout.startswith("True\n")


def test_a_rank_behind_a_shell_is_still_a_rank(rank: Rank) -> None:
    script = rank.write("train.py", "raise ValueError('wrapped')")
    wrapper = rank.write("wrap.sh", 'export PYTHONPATH=/opt/extra:$PYTHONPATH\n"$@"\n')
    env = prepare_env({**os.environ, "TORCHELASTIC_ERROR_FILE": str(rank.error_file)})
    subprocess.run(["sh", wrapper, sys.executable, script], env=env, capture_output=True)
    assert rank.error()["message"]["message"] == "ValueError: wrapped"


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_an_isolated_python_runs_as_it_is(rank: Rank, flag: str) -> None:
    completed = rank.run_both(flag, rank.write("train.py", "print(__file__); raise ValueError('x')"))
    assert completed.returncode == 1
    assert not rank.error_file.exists()


def test_our_folder_without_the_marker_does_nothing(rank: Rank) -> None:
    env = {k: v for k, v in prepare_env({**os.environ}).items() if k != MARKER}
    completed = subprocess.run(
        [sys.executable, "-c", "import sys; print(sys.excepthook is sys.__excepthook__); 1/0"],
        env={**env, "TORCHELASTIC_ERROR_FILE": str(rank.error_file)},
        capture_output=True,
        text=True,
    )
    assert completed.stdout == "True\n"
    assert not rank.error_file.exists()


def test_an_interrupt_from_outside_ends_the_rank_by_that_signal(rank: Rank) -> None:
    code = "import os, signal; signal.raise_signal(signal.SIGINT)"
    assert rank.run_both(rank.write("train.py", code)).returncode == -signal.SIGINT
    assert not rank.error_file.exists()


def test_a_wrappers_own_file_in_the_place_of_our_channel_is_left_alone(rank: Rank) -> None:
    """`exec 9>log` in a script around the training: the number is all that we know of the descriptor."""
    log = rank.folder / "log"
    script = f'exec 9>{log}; echo begun >&9; exec "$0" -c "import os; os.write(9, b\'trained\')"'
    full = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        ["sh", "-c", script, sys.executable],
        env=prepare_env({**full, "AEGIS_WORKER_GATE": "9 pass"}),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert log.read_text() == "begun\ntrained"
