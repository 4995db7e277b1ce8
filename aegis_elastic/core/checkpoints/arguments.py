"""Where does a training save? Read from its command line, as people write them; a guess that costs little."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aegis_elastic.core.checkpoints import AUTO, KINDS

# Options whose value is a folder that checkpoints go to. "-" and "_" are one, and so is "key=value" (hydra).
_FOLDER_OPTIONS = frozenset({
    "save", "output-dir", "default-root-dir", "checkpoint-dir", "checkpoints-dir", "ckpt-dir", "save-dir",
    "checkpoint-path", "ckpt-path", "save-path", "checkpoint", "ckpt", "dirpath", "log-dir", "exp-dir",
    "trainer.default-root-dir", "training-arguments.output-dir", "exp-manager.exp-dir",
    "exp-manager.explicit-log-dir",
})  # fmt: skip
# torchtitan names a folder inside another, both with defaults.
_TITAN_TOP = ("job.dump-folder", "dump-folder")
_TITAN_FOLDER = "checkpoint.folder"
# Where frameworks save when nobody says where, below the working directory.
DEFAULT_FOLDERS = (
    "lightning_logs", "checkpoints", "checkpoint", "ckpt", "trainer_output", "outputs/checkpoint",
    "nemo_experiments",
)  # fmt: skip
_UNFIT = ("", "/", ".", "..")


class WatchedFolder(NamedTuple):
    """A folder to watch for checkpoints of a kind ("auto": of any)."""

    kind: str
    path: str


def places(arguments: Sequence[str], workdir: str) -> tuple[WatchedFolder, ...]:
    """Folders that a training's arguments name (as absolute paths), or where it would save by default.

    What is named is a place whatever option follows the other; a whole disk or the working directory itself
    is none, since looking through it costs more than it is worth.
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
    """What `--aegis-ckpt-watch KIND:PATH` names. ValueError says what is wrong with it."""
    kind, colon, path = text.partition(":")
    if not colon or kind not in KINDS or not path:
        raise ValueError(f"{text!r} is not KIND:PATH with KIND one of {', '.join(KINDS)}")
    if "://" in path:
        raise ValueError(f"{text!r} names no folder: only what is mounted here can be watched")
    return WatchedFolder(kind, posixpath.normpath(posixpath.join(workdir, path)))


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, value) of `--name value`, `--name=value` and `name=value`."""
    for at, word in enumerate(arguments):
        match = re.fullmatch(r"(?:--?|\+{1,2})?([A-Za-z][\w.\-]*)=(.*)", word, re.DOTALL)
        if match:
            yield _name(match.group(1)), match.group(2)
        elif word.startswith("--") and at + 1 < len(arguments) and not arguments[at + 1].startswith("--"):
            yield _name(word[2:]), arguments[at + 1]


def _name(text: str) -> str:
    return text.replace("_", "-").lower()
