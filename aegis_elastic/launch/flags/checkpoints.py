"""The flags of `aegis-run` about checkpoints: where they are watched for, and the saver."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Callable

from aegis_elastic.core.checkpoints import KINDS
from aegis_elastic.core.checkpoints.arguments import WatchedFolder, parse_watched_folder

# Switches the watching off.
OFF = WatchedFolder("off", "")


def add_checkpoint_flags(add: Callable[..., None], collect: type[argparse.Action]) -> None:
    """Declare them. `add` and `collect` as in `launch.flags.group`."""
    add(
        "ckpt-watch",
        "A folder in which checkpoints appear, as KIND:PATH; KIND is one of "
        f"{', '.join(KINDS)}. Can be given several times. By default the folders that the script's arguments "
        "name (--save, --output_dir, --checkpoint-dir ...) are watched; `off` watches none.",
        type=_watched_folder,
        action=collect,
        metavar="KIND:PATH",
    )
    add(
        "strict-success",
        "Exit with 1 when all ranks ended with code 0 but something says that this is no success: a rank "
        "that ended while others went on, or Megatron's tracker file that can't be read, over which it exits "
        "with 0. Without this flag the report and the last line say so.",
        False,
        action="store_true",
    )
    add(
        "saver",
        "A command that runs beside the ranks of every node and is kept running: started again 3 s after an "
        "end, later when it ends often, with a run id that begins with `fault-`. It is split as a shell "
        "would, and no shell runs it. Its output goes to saver.log in the run's directory under --log-dir, "
        "or to ours.",
        type=_command,
        metavar="COMMAND",
    )


def _command(text: str) -> str:
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no command: {error}") from None
    if not arguments or shutil.which(arguments[0]) is None:
        what = f"no program called {arguments[0]!r}" if arguments else "no command"
        raise argparse.ArgumentTypeError(f"{text!r} names {what} that could be run here")
    return text


def _watched_folder(text: str) -> WatchedFolder:
    if text == OFF.kind:
        return OFF
    try:
        return parse_watched_folder(text, os.getcwd())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
