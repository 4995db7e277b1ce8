"""Which watchers look at the ranks of this node: one line for each, made from what the user asked for."""

from __future__ import annotations

import os

from aegis_elastic.agents.boundary import BoundaryWatcher
from aegis_elastic.agents.link import PlaneLink
from aegis_elastic.agents.monitor import Monitor
from aegis_elastic.agents.pace import PaceWatcher
from aegis_elastic.agents.watchers import MakeWatcher
from aegis_elastic.core.checkpoints.arguments import Place, places
from aegis_elastic.launch.checkpoint_flags import NOWHERE
from aegis_elastic.launch.options import Options


def makers(options: Options, link: PlaneLink) -> tuple[MakeWatcher, ...]:
    """What the agent makes its watchers of. `link` brings to the master what is odd."""
    aegis, watched = options.aegis, checkpoint_places(options)
    made: list[MakeWatcher] = [lambda wake: BoundaryWatcher(wake, watched)]
    if aegis.monitor == "on":
        made.append(lambda wake: Monitor(wake, link.note, aegis.monitor_interval_s))
    if aegis.progress == "on":
        node_name = link.identity.node_name
        made.append(lambda wake: PaceWatcher(wake, aegis.hang_after_s, node_name))
    return tuple(made)


def checkpoint_places(options: Options) -> tuple[Place, ...]:
    """The folders in which checkpoints are watched for: those that were named, or that the script's are."""
    if options.aegis.ckpt_watch is not None:
        return tuple(place for place in options.aegis.ckpt_watch if place != NOWHERE)
    return places(options.cmd_args, os.getcwd())
