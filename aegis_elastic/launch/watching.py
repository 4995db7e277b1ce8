"""Which watchers look at the ranks of this node: one line for each, made from what the user asked for."""

from __future__ import annotations

from aegis_elastic.agents.link import Identity
from aegis_elastic.agents.watchers import MakeWatcher
from aegis_elastic.launch.options import Options


def makers(options: Options, me: Identity) -> tuple[MakeWatcher, ...]:
    """What the agent makes its watchers of."""
    return ()
