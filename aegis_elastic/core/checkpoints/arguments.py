"""The folders that a training saves to, guessed from its command line."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aegis_elastic.core.checkpoints import AUTO, KINDS

# Options whose value is a folder for checkpoints. "-" and "_" are equal; "key=value" (hydra) counts, too.
_FOLDER_OPTIONS = frozenset({
    "save", "output-dir", "default-root-dir", "checkpoint-dir", "checkpoints-dir", "ckpt-dir", "save-dir",
    "checkpoint-path", "ckpt-path", "save-path", "checkpoint", "ckpt", "dirpath", "log-dir", "exp-dir",
    "trainer.default-root-dir", "training-arguments.output-dir", "exp-manager.exp-dir",
    "exp-manager.explicit-log-dir",
})  # fmt: skip
# torchtitan names a folder inside another, both with defaults.
_TITAN_TOP = ("job.dump-folder", "dump-folder")
_TITAN_FOLDER = "checkpoint.folder"
# Where frameworks save by default, below the working directory.
DEFAULT_FOLDERS = (
    "lightning_logs", "checkpoints", "checkpoint", "ckpt", "trainer_output", "outputs/checkpoint",
    "nemo_experiments",
)  # fmt: skip
_UNFIT = ("", "/", ".", "..")


class WatchedFolder(NamedTuple):
    """A folder to watch for checkpoints of a kind ("auto": of any)."""

    kind: str
    path: str


def folders_to_watch(arguments: Sequence[str], workdir: str) -> tuple[WatchedFolder, ...]:
    """The folders that a training's arguments name (as absolute paths), or its framework's default folders.

    The root directory and the working directory itself are left out, since listing them costs too much.
    """
    given = dict(_options(arguments))
    found = [value for name, value in given.items() if name in _FOLDER_OPTIONS]
    top = next((given[name] for name in _TITAN_TOP if name in given), None)
    if top is not None:
        found.append(posixpath.join(top, given.get(_TITAN_FOLDER, "checkpoint")))
    named = [path for path in found if path.rstrip("/") not in _UNFIT and "://" not in path]
    absolute = [posixpath.normpath(posixpath.join(workdir, path)) for path in named or DEFAULT_FOLDERS]
    unfit = (posixpath.normpath(workdir), "/")
    return tuple(WatchedFolder(AUTO, path) for path in dict.fromkeys(absolute) if path not in unfit)


def parse_watched_folder(text: str, workdir: str) -> WatchedFolder:
    """The folder that `--aegis-ckpt-watch KIND:PATH` names. Raises ValueError with what is wrong with it."""
    kind, colon, path = text.partition(":")
    if not colon or kind not in KINDS or not path:
        raise ValueError(f"{text!r} is not KIND:PATH with KIND one of {', '.join(KINDS)}")
    if "://" in path:
        raise ValueError(f"{text!r} names no folder: only what is mounted here can be watched")
    return WatchedFolder(kind, posixpath.normpath(posixpath.join(workdir, path)))


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, value) of `--name value`, `--name=value` and `name=value`."""
    for at, argument in enumerate(arguments):
        match = re.fullmatch(r"(?:--?|\+{1,2})?([A-Za-z][\w.\-]*)=(.*)", argument, re.DOTALL)
        if match:
            yield _name(match.group(1)), match.group(2)
        elif argument.startswith("--") and at + 1 < len(arguments) and not arguments[at + 1].startswith("--"):
            yield _name(argument[2:]), arguments[at + 1]


def _name(text: str) -> str:
    return text.replace("_", "-").lower()
