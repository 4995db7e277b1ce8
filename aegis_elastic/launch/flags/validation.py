"""Validates the user's input before anything is started, with one line for each bad value.

A job that fails over a typo after the machines were checked and the nodes have met has cost minutes. Every
function raises `UsageError` that names the flag, its value and what would be right, or returns what it read.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shutil
import signal
import stat
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.run import determine_local_world_size

from aegis_elastic.control.host.errors import UsageError

# A file name has at most 255 bytes, and torch adds an underline and eight characters of its own.
RUN_ID_BYTES_MAX = 246
# One message of 1 MiB holds the rank assignments of all nodes.
NODES_MAX = 4096


def node_range(nnodes: str) -> tuple[int, int]:
    """`MIN:MAX` or `N` as two numbers, 1 <= min <= max <= NODES_MAX; who comes beyond waits as a spare."""
    try:
        least, most = (int(part) for part in (nnodes if ":" in nnodes else f"{nnodes}:{nnodes}").split(":"))
    except ValueError:
        raise UsageError(
            f"cannot use --nnodes {nnodes!r}: want a number of nodes, or MIN:MAX such as 2:4"
        ) from None
    if least < 1:
        raise UsageError(f"cannot use --nnodes {nnodes!r}: want at least 1 node")
    if least > most:
        raise UsageError(f"cannot use --nnodes {nnodes!r}: MIN is above MAX; did you mean {most}:{least}?")
    if least > NODES_MAX:
        raise UsageError(f"cannot use --nnodes {nnodes!r}: a job has at most {NODES_MAX} nodes")
    return least, min(most, NODES_MAX)


def process_count(nproc_per_node: str) -> int:
    """How many training processes this node runs; `auto`, `cpu`, `gpu` ... as torch counts them."""
    try:
        count = determine_local_world_size(nproc_per_node)
    except ValueError as error:
        why = str(error) if "available" in str(error) else "want a number, or one of auto, cpu, gpu, xpu"
        raise UsageError(f"cannot use --nproc-per-node {nproc_per_node!r}: {why}") from error
    if count < 1:
        raise UsageError(f"cannot use --nproc-per-node {nproc_per_node!r}: want at least 1 process")
    return int(count)


def rendezvous_conf(text: str) -> dict[str, str]:
    """`KEY=VALUE,KEY=VALUE` as a dict."""
    pairs = {}
    for part in text.strip().split(",") if text.strip() else ():
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise UsageError(
                f"cannot use --rdzv-conf {text!r}: {part!r} is not KEY=VALUE; want such as join_timeout=600"
            )
        pairs[key] = value
    return pairs


def conf_seconds(conf: dict[str, str], key: str, default_s: float, *, zero: bool = False) -> float:
    """The seconds that a key of --rdzv-conf gives."""
    text = conf.get(key, str(default_s))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0 or (seconds == 0 and not zero):
        wanted = "seconds, 0 or more" if zero else "seconds above 0"
        raise UsageError(f"cannot use --rdzv-conf {key}={text}: want {wanted}")
    return seconds


def run_id(named: str, log_dir: str | None) -> None:
    """What --rdzv-id takes: torch names the directory of the ranks' logs after it."""
    if log_dir == os.devnull:
        return
    if "/" in named:
        raise UsageError(
            f"cannot use --rdzv-id {named!r}: the log directory is called after it; want a name without /"
        )
    if len(named.encode(errors="surrogateescape")) > RUN_ID_BYTES_MAX:
        raise UsageError(
            f"cannot use --rdzv-id {named[:40]!r}...: the log directory is called after it; want at most "
            f"{RUN_ID_BYTES_MAX} bytes"
        )


def std_streams(flag: str, text: str) -> None:
    """What --tee and --redirects take."""
    try:
        Std.from_str(text)
    except ValueError as error:
        raise UsageError(
            f"cannot use {flag} {text!r}: want 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or one for "
            "each local rank such as 0:3,1:2"
        ) from error


def local_ranks(text: str) -> None:
    """What --local-ranks-filter takes."""
    if text and not all(part.strip().isdecimal() for part in text.split(",")):
        raise UsageError(f"cannot use --local-ranks-filter {text!r}: want local ranks such as 0,1,2")


def signal_names(text: str) -> None:
    """What --signals-to-handle takes."""
    for name in (part.strip() for part in text.split(",")):
        if name not in signal.Signals.__members__:
            raise UsageError(
                f"cannot use --signals-to-handle {text!r}: no signal is called {name!r}; want such as "
                "SIGTERM,SIGINT,SIGUSR1"
            )
        if name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"cannot use --signals-to-handle {text!r}: no process can handle {name}")


def program(args: argparse.Namespace) -> None:
    """The training program: a script, a module (-m) or any executable (--no-python)."""
    named = args.training_script
    if args.no_python and args.module:
        raise UsageError("cannot use --no-python together with -m: a module needs Python to run it")
    if args.run_path or not args.no_python:
        _interpreter()
    if args.no_python and not args.run_path:
        _executable(named)
    elif args.module and not args.run_path:
        _module(named)
    else:
        _script(named)


def _interpreter() -> None:
    chosen = os.environ.get("PYTHON_EXEC", sys.executable)
    if shutil.which(chosen) is None:
        raise UsageError(f"cannot run Python: PYTHON_EXEC={chosen!r} is no executable program")


def _script(named: str) -> None:
    if "${" in named:  # torchelastic fills in ${local_rank} and its like for each rank
        return
    path = Path(named)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise UsageError(f"cannot run {named!r}: it is a directory without a __main__.py")
    elif not path.exists():
        hint = "; to run a module, put -m before it" if _is_importable(named) else ""
        raise UsageError(f"cannot run {named!r}: no such file (looked in {os.getcwd()}){hint}")
    elif not os.access(path, os.R_OK):
        raise UsageError(f"cannot run {named!r}: permission to read it is missing")


def _module(named: str) -> None:
    if "PYTHON_EXEC" in os.environ:  # another interpreter may have other modules
        return
    if not all(part.isidentifier() for part in named.split(".")):
        raise UsageError(f"cannot run -m {named!r}: want the name of a module such as package.train")
    if not _is_importable(named):
        top = named.partition(".")[0]
        raise UsageError(
            f"cannot run -m {named!r}: no module {top!r} in {os.getcwd()} nor on the Python path"
        )


def _is_importable(named: str) -> bool:
    """Whether the top package is there. Resolving submodules would import it, which only ranks should do."""
    top = named.partition(".")[0]
    if not top.isidentifier():
        return False
    # Ranks run `python -m` in our directory, which Python then searches first; the launcher itself may not.
    here = PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    return here is not None or top in sys.modules or importlib.util.find_spec(top) is not None


def _executable(named: str) -> None:
    if shutil.which(named) is not None:
        return
    if os.sep in named and os.path.exists(named):
        why = "it is a directory" if os.path.isdir(named) else "it is not executable; try chmod +x"
    else:
        why = "no such file" if os.sep in named else "it is not on the PATH"
    raise UsageError(f"cannot run {named!r}: {why}")


def output_file(flag: str, path: Path | None) -> None:
    """A file that will be written at the end of the job."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"cannot write {flag} {path}: it is a directory; want a file")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {flag} {path}: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"cannot write {flag} {path}: permission is missing")


def output_directory(flag: str, path: Path | None) -> None:
    """A directory that is written to, and created if it doesn't exist."""
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise UsageError(f"cannot use {flag} {path}: it is a file; want a directory")
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if not nearest.is_dir():
        raise UsageError(f"cannot use {flag} {path}: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"cannot use {flag} {path}: permission to write in {nearest} is missing")


def secret_file(path: Path | None) -> None:
    """A file that holds the join secret and must not be readable by everybody."""
    if path is None:
        return
    flag = f"--aegis-join-secret-file {path}"
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {flag}: {error.strerror or error}") from error
    if not content.strip():
        raise UsageError(f"cannot use {flag}: it is empty; want a secret of at least a few random bytes")
    if mode & 0o007:
        raise UsageError(
            f"cannot use {flag}: everybody may read it (mode {stat.S_IMODE(mode):04o}); try chmod 600"
        )
