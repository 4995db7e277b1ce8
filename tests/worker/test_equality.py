# ruff: noqa: E501 - scripts on one line read better than strings in pieces
"""A script sees no difference between a cold start and a warm spare: each behaviour is run both ways.

The known differences are in docs/performance.md; each has a test of its own below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from aegis_elastic.agents.guard.client import GuardClient
from tests.worker.gated import End, Stage

SPAWN = """
import multiprocessing as mp, os, sys
def work(q): q.put((__name__, os.environ["RANK"], sys.argv, "torch" in sys.modules))
if __name__ == "__main__":
    ctx = mp.get_context("{method}")
    q = ctx.Queue()
    p = ctx.Process(target=work, args=(q,)); p.start(); print(q.get(timeout=50)); p.join(); print(p.exitcode)
"""
# scripts by name
SCRIPTS: dict[str, str] = {
    "argv": "import sys; print(sys.argv, sys.orig_argv[1:])",
    "main": "import __main__, sys; print(__name__, sorted(vars(__main__)), __main__.__spec__, __file__, __package__)",
    "sys.path": "import sys; print(sys.path)",
    "sys.flags": "import sys; print(sys.flags, sys._xoptions, sys.warnoptions)",
    "import finders": "import sys; print([getattr(f, '__name__', type(f).__name__) for f in sys.meta_path])",
    "a module beside it": "import beside; print(beside.__file__, beside.VALUE)",
    "environment": "import os; print(sorted((k, v) for k, v in os.environ.items() if 'error' not in v))",
    "environment of the C library": "import ctypes\n"
    "g = ctypes.CDLL(None).getenv; g.restype = ctypes.c_char_p\n"
    "print(g(b'RANK'), g(b'MASTER_PORT'), g(b'AEGIS_WORKER_GATE'), g(b'AEGIS_WORKER_ROOM'))",
    "environment of a child": "import subprocess; print(subprocess.run('env | sort | grep -v -e ^_= -e error.json',"
    " shell=True, capture_output=True, text=True).stdout)",
    "environment in proc": "data = open('/proc/self/environ', 'rb').read().split(b'\\0')\n"
    "print(sorted(d for d in data if d and b'AEGIS_WORKER' not in d and b'error' not in d))",
    "signals": "import signal\n"
    "for s in sorted(signal.valid_signals()): print(s, signal.getsignal(s))\n"
    "print(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    "exit code": "import sys; sys.exit(7)",
    "exit message": "import sys; sys.exit('no more')",
    "os._exit": "import os; print('lost'); os._exit(9)",
    "end by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupt": "import signal; signal.raise_signal(signal.SIGINT)",
    "abort": "import os; os.abort()",
    "exception": "def step(x):\n    raise ValueError(f'bad {x}')\nstep(17)",
    "chained exception": "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('outer') from e",
    "syntax error": "def f(:\n    pass",
    "recursion": "import sys\nprint(sys.getrecursionlimit())\ndef f(): f()\nf()",
    "exception in a thread": "import threading\n"
    "t = threading.Thread(target=lambda: 1/0, name='T'); t.start(); t.join(); print(threading.current_thread().name)",
    "own excepthook": "import sys\nsys.excepthook = lambda *e: print('handled', e[0].__name__)\nraise ValueError('x')",
    "atexit": "import atexit\natexit.register(print, 'bye'); print('hello'); raise OSError(2, 'x')",
    "pickling in atexit": "import atexit, pickle\nclass C: pass\n"
    "atexit.register(lambda: print(pickle.loads(pickle.dumps(C())).__class__)); print('set')",
    "inspect": "import inspect\ndef f():\n    return 1\n"
    "print(inspect.getsource(f)); print([(s.filename, s.lineno, s.function) for s in inspect.stack()])",
    "multiprocessing spawn": SPAWN.format(method="spawn"),
    "multiprocessing fork": SPAWN.format(method="fork"),
    "multiprocessing forkserver": SPAWN.format(method="forkserver"),
    "os.fork": "import os\n"
    "if os.fork() == 0:\n    print('child', flush=True); os._exit(3)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))",
    "process title": "print(open('/proc/self/cmdline').read().split(chr(0)), open('/proc/self/comm').read())",
    "ps": "import os, subprocess\n"
    "print(subprocess.run(['ps', '-o', 'ni,cls,stat,comm,args', '-p', str(os.getpid())], capture_output=True,"
    " text=True).stdout)",
    "session and parent": "import os\n"
    "print(os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), open(f'/proc/{os.getppid()}/comm').read())",
    "priority and oom score": "import os\n"
    "print(os.getpriority(0, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0)))\n"
    "print(open('/proc/self/oom_score_adj').read())",
    "working directory": "import os; print(os.getcwd())",
    "stdin": "import sys; print(repr(sys.stdin.read()), sys.stdin.encoding, sys.stdin.isatty())",
    "streams": "import os, sys\n"
    "for s in (sys.stdin, sys.stdout, sys.stderr):\n"
    "    print(s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), s.fileno(), s.mode)\n"
    "print([os.fstat(n).st_blksize for n in (1, 2)], [os.path.basename(os.readlink(f'/proc/self/fd/{n}')) for n in (1, 2)])\n"
    "import fcntl\nprint([fcntl.fcntl(n, fcntl.F_GETFL) for n in (1, 2)], [os.lseek(n, 0, 1) for n in (2,)])",
    "order of the streams": "import sys\n"
    "print('a'); print('b', file=sys.stderr); sys.stdout.buffer.write(b'c\\n'); print('d')",
    "umask": "import os; print(oct(os.umask(0)))",
    "limits": "import resource\n"
    "print([(n, resource.getrlimit(getattr(resource, n))) for n in dir(resource) if n.startswith('RLIMIT_')])",
    "descriptors": "import os; print(sorted(os.listdir('/proc/self/fd'))); print(open('/dev/null').fileno())",
    "threads": "import os, threading; print(os.listdir('/proc/self/task') == [str(os.getpid())], [t.name for t in threading.enumerate()])",
    "seeds differ": "import os, random, sys\n"
    "path = os.path.join(os.path.dirname(__file__), 'seeds')\n"
    "open(path, 'a').write(f'{random.random()} {hash(\"x\")}\\n')",
    "fixed hash seed": "print(hash('x'))",
    "warnings": "import warnings\n"
    "warnings.warn('first'); warnings.warn('second', DeprecationWarning); print(warnings.filters)",
    "garbage collector": "import gc; print(gc.isenabled(), gc.get_threshold(), gc.get_freeze_count())",
    "locale": "import locale, sys; print(locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding())",
    "hooks": "import sys\n"
    "print(sys.displayhook, sys.breakpointhook, sys.unraisablehook, sys.gettrace(), sys.getprofile())\n"
    "print(sys.getswitchinterval(), sys.dont_write_bytecode, sys.pycache_prefix)",
    "nothing of ours": "import sys\n"
    "print([m for m in sys.modules if 'aegis' in m or 'sitecustomize' in m], [p for p in sys.path if 'aegis' in p])",
}
PATH_ENV = {"PYTHONHASHSEED": "11"}


@pytest.fixture(scope="module")
def guard() -> Iterator[GuardClient]:
    client = GuardClient.start("equality")
    yield client
    client.close()


@pytest.fixture
def stage(tmp_path: Path, guard: GuardClient) -> Stage:
    stage = Stage(tmp_path, guard)
    stage.write("beside.py", "VALUE = 5\n")
    return stage


def same(end: End) -> End:
    """Without what differs between any two runs."""

    def plain(text: str) -> str:
        return re.sub(r"logs-\d+|0x[0-9a-f]+|\"timestamp\": \"\d+\"", "?", text)

    return End(end.how, plain(end.stdout), plain(end.stderr), plain(end.error))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_behaves_the_same_cold_and_warm(stage: Stage, name: str) -> None:
    script = stage.write("train.py", SCRIPTS[name])
    argv = ["-u", script, "--lr", "1 e", "é"]
    cold, warm = same(stage.cold(argv, PATH_ENV)), same(stage.warm(argv, PATH_ENV))
    assert warm == cold
    assert cold.stdout or cold.stderr or cold.how != (0, None) or name == "seeds differ"


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        (["train.py"], {}),
        (["-m", "pkg.mod", "x"], {}),
        (["-u", "-m", "pkg"], {}),
        (["-c", "import sys; print(sys.argv, sys.path[0]); raise KeyError(1)", "x"], {}),
        (["-O", "-B", "-W", "error", "-X", "utf8", "train.py"], {}),
        (["-P", "-s", "train.py"], {}),
        (["no-such-script.py"], {}),
        (["-m", "no_such_module"], {}),
        (["train.py"], {"PYTHONPATH": "/opt:/nowhere"}),
        (["train.py"], {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}),
        (["train.py"], {"STRANGE": "ein=zwei\nthree \udcff", "EMPTY": ""}),
    ],
)
def test_a_command_line_runs_the_same_cold_and_warm(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, argv: list[str], env: dict[str, str]
) -> None:
    show = "import sys, os\nprint(sys.argv, __file__, __spec__, sys.path, sys.flags, sorted(os.environ.items()))\n"
    for name in ("train.py", "pkg/__init__.py", "pkg/__main__.py", "pkg/mod.py"):
        stage.write(name, show)
    monkeypatch.chdir(stage.folder)
    with GuardClientIn(stage) as inside:
        assert same(inside.warm(argv, env)) == same(inside.cold(argv, env))


class GuardClientIn:
    """A stage with a guard of its own, started in the stage's folder: ranks have the launcher's directory."""

    def __init__(self, stage: Stage) -> None:
        self._guard = GuardClient.start("inside")
        self._stage = Stage(stage.folder, self._guard)

    def __enter__(self) -> Stage:
        return self._stage

    def __exit__(self, *_: object) -> None:
        self._guard.close()


def test_two_processes_have_seeds_of_their_own(stage: Stage) -> None:
    script = stage.write("train.py", SCRIPTS["seeds differ"])
    for _ in range(2):
        stage.warm([script])
    lines = (stage.folder / "seeds").read_text().splitlines()
    assert len(set(lines)) == 2


def test_the_users_sitecustomize_runs_at_go_and_sees_the_whole_environment(stage: Stage) -> None:
    stage.write("site/sitecustomize.py", "import os, sys; print('site', os.environ['RANK'], len(sys.path))")
    script = stage.write("train.py", "import sys; print(sys.modules['sitecustomize'].__file__)")
    env = {"PYTHONPATH": str(stage.folder / "site")}
    assert same(stage.warm([script], env)) == same(stage.cold([script], env))
