"""Which watchers this node has, chosen by the options: checkpoints, monitoring, progress, a saver."""

from __future__ import annotations

import os

from aegis_elastic.agents.checkpoints.boundary import CheckpointWatcher
from aegis_elastic.agents.checkpoints.saver import Saver
from aegis_elastic.agents.monitoring.monitor import Monitor
from aegis_elastic.agents.plane.link import PlaneLink
from aegis_elastic.agents.ranks.torch_seam import run_log_dir
from aegis_elastic.agents.watch.contract import WatcherFactory
from aegis_elastic.agents.watch.progress import ProgressWatcher
from aegis_elastic.core.checkpoints.arguments import WatchedFolder, folders_to_watch
from aegis_elastic.launch.flags.checkpoints import OFF
from aegis_elastic.launch.flags.options import Options


def makers(options: Options, link: PlaneLink) -> tuple[WatcherFactory, ...]:
    """The factories from which the agent makes its watchers. Anomalies are sent to the master over `link`."""
    aegis, watched = options.aegis, checkpoint_places(options)
    made: list[WatcherFactory] = [lambda wake: CheckpointWatcher(wake, watched)]
    if aegis.monitor == "on":
        made.append(lambda wake: Monitor(wake, link.note, aegis.monitor_interval_s))
    if aegis.progress == "on":
        node_name = link.identity.node_name
        made.append(lambda wake: ProgressWatcher(wake, aegis.hang_after_s, node_name))
    if aegis.saver is not None:
        made.append(_saver(options, aegis.saver))
    return tuple(made)


def _saver(options: Options, command: str) -> WatcherFactory:
    specs, run_id = options.config.logs_specs, options.config.run_id
    folder = run_log_dir(specs, run_id) if options.torch_args.log_dir and specs is not None else None
    log = str(folder.absolute() / "saver.log") if folder is not None else ""
    return lambda wake: Saver(wake, command, run_id, log)


def checkpoint_places(options: Options) -> tuple[WatchedFolder, ...]:
    """The folders in which checkpoints are watched for: those of --aegis-ckpt-watch, or of the script's
    arguments.
    """
    if options.aegis.ckpt_watch is not None:
        return tuple(place for place in options.aegis.ckpt_watch if place != OFF)
    return folders_to_watch(options.cmd_args, os.getcwd())
