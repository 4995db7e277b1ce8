"""Which watchers look at the ranks of this node: one line for each, made from what the user asked for."""

from __future__ import annotations

import os

from aegis_elastic.agents.checkpoints.boundary import CheckpointWatcher
from aegis_elastic.agents.checkpoints.saver import Saver
from aegis_elastic.agents.monitoring.monitor import Monitor
from aegis_elastic.agents.plane.link import PlaneLink
from aegis_elastic.agents.ranks.torch_seam import run_log_dir
from aegis_elastic.agents.watch.contract import MakeWatcher
from aegis_elastic.agents.watch.progress import ProgressWatcher
from aegis_elastic.core.checkpoints.arguments import Place, places
from aegis_elastic.launch.flags.checkpoints import NOWHERE
from aegis_elastic.launch.flags.options import Options


def makers(options: Options, link: PlaneLink) -> tuple[MakeWatcher, ...]:
    """What the agent makes its watchers of. `link` brings to the master what is odd."""
    aegis, watched = options.aegis, checkpoint_places(options)
    made: list[MakeWatcher] = [lambda wake: CheckpointWatcher(wake, watched)]
    if aegis.monitor == "on":
        made.append(lambda wake: Monitor(wake, link.note, aegis.monitor_interval_s))
    if aegis.progress == "on":
        node_name = link.identity.node_name
        made.append(lambda wake: ProgressWatcher(wake, aegis.hang_after_s, node_name))
    if aegis.saver is not None:
        made.append(_saver(options, aegis.saver))
    return tuple(made)


def _saver(options: Options, command: str) -> MakeWatcher:
    specs, run_id = options.config.logs_specs, options.config.run_id
    folder = run_log_dir(specs, run_id) if options.torch_args.log_dir and specs is not None else None
    log = str(folder.absolute() / "saver.log") if folder is not None else ""
    return lambda wake: Saver(wake, command, run_id, log)


def checkpoint_places(options: Options) -> tuple[Place, ...]:
    """The folders in which checkpoints are watched for: those that were named, or that the script's are."""
    if options.aegis.ckpt_watch is not None:
        return tuple(place for place in options.aegis.ckpt_watch if place != NOWHERE)
    return places(options.cmd_args, os.getcwd())
