"""What must hold where a spare is preferred to one more start on a node that fails too often."""

from __future__ import annotations

import msgspec

from aegis_elastic.core.events import Page
from aegis_elastic.core.model import TERMINAL, Phase
from proof.explore import Edge
from proof.properties.steps import StepProperty, relieved, turn


def _relief_is_noted(e: Edge) -> bool:
    a, b = e.before, e.transition.status
    if e.move.label != "Relieve" or a.phase in TERMINAL:
        return True
    node = getattr(e.move.event, "node_name", "")
    here = [p for p in a.workers if p.node_name == node and not p.gone and not p.relieve]
    if a.phase is not Phase.TROUBLESHOOTING or not here:
        return b is a
    noted = tuple(
        msgspec.structs.replace(p, relieve="failed too often today") if p in here else p for p in a.workers
    )
    return b.workers == noted and b.spares == a.spares


def _relieved_make_way(e: Edge) -> bool:
    """Relieved workers leave as soon as fit spares can replace all workers of the node, and never else. No
    retry is charged, the node isn't recorded, and an operator is called.
    """
    a, b = e.before, e.transition.status
    nodes = relieved(a) if turn(e, Phase.TROUBLESHOOTING) else []
    if not nodes:
        return e.transition.name != "relieve"
    pages = [x for x in e.transition.effects if isinstance(x, Page)]
    kept = [p.retries for p in b.workers] == [
        p.retries for p in a.workers
    ] and b.recover_count == a.recover_count
    moved = {p.name: p for p in a.spares if p.fit}
    filled = all(
        now.name in moved and now.uid == moved[now.name].uid and now.inner_phase is Phase.RESTARTING
        if was.node_name in nodes
        else now == was
        for was, now in zip(a.workers, b.workers, strict=True)
    )
    entered = (b.phase, b.entries, b.charged, b.last_root) == (Phase.RESTARTING, a.entries + 1, a.charged, "")
    return (
        e.transition.name == "relieve"
        and entered
        and kept
        and filled
        and len(pages) == 1
        and b.error_nodes == a.error_nodes
        and not any(p.node_name in nodes for p in (*b.workers, *b.spares))
        and b.reschedules == a.reschedules + sum(p.node_name in nodes for p in a.workers)
    )


RELIEFS: dict[str, StepProperty] = {
    "ReliefIsNoted": _relief_is_noted,
    "RelievedMakeWay": _relieved_make_way,
}
