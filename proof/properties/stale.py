"""Messages and facts that must change nothing, whatever the status: they are offered in every one."""

from __future__ import annotations

from collections.abc import Iterator

from aegis_elastic.core.events import (
    Act,
    Error,
    Event,
    Evict,
    Finish,
    Fit,
    Hold,
    Independent,
    Join,
    Lost,
    Mark,
    Noted,
    Offer,
    Progress,
    Started,
    Unmark,
    Untaint,
)
from aegis_elastic.core.model import Status, Verdict
from proof.worlds import HARDWARE, NOW, error, finish


def not_current(s: Status) -> Iterator[Event]:
    """Messages that must change nothing: of another life, another incarnation, an older or a later order."""
    for pod in s.pods:
        for uid, incarnation, seq in (
            (f"{pod.name}.0", s.incarnation, s.seq_num),
            (pod.uid, s.incarnation - 1, s.seq_num),
            (pod.uid, s.incarnation + 1, s.seq_num),
            (pod.uid, s.incarnation, s.seq_num - 1),
            (pod.uid, s.incarnation, s.seq_num + 1),
        ):
            yield Finish(pod.name, uid, incarnation, seq, HARDWARE, "stale:1")
            yield Error(pod.name, uid, incarnation, seq, "stale", store="stale:1")
        yield Lost(((pod.name, f"{pod.name}.0"),), "an earlier life")
        yield Offer(pod.name, f"{pod.name}.0", "stale:1")
        yield Independent(pod.name, s.incarnation - 1, "stale")
        yield Started(pod.name, pod.uid, s.incarnation)
        if pod.finished or pod.gone:
            yield finish(s, pod, findings=HARDWARE)
        if pod.gone:
            yield error(s, pod)
        if pod.store:
            yield Offer(pod.name, pod.uid, pod.store)
        if not pod.gone:
            yield Join(pod.name, pod.uid, pod.node_name, "", 1)
    for spare in s.spares:
        yield Join(spare.name, spare.uid, spare.node_name, "", 1)
    yield from _of_nobody()
    yield Offer("nobody", "nobody.1", "stale:1")
    yield Independent("nobody", s.incarnation, "stale")
    yield Finish("nobody", "nobody.1", s.incarnation, s.seq_num)
    yield Error("nobody", "nobody.1", s.incarnation, s.seq_num, "stale")


def _of_nobody() -> Iterator[Event]:
    """What is only told, and what concerns nodes and workers that don't take part."""
    yield Noted("nobody", "no-node", "memory.leak", "12 MB a minute", NOW)
    yield Mark("no-node", "nobody", Verdict.SLOW, "behind")
    yield Unmark("no-node", Verdict.SLOW, "caught up")
    yield Act("nobody", "manual", "asked")
    yield Evict("no-node", "persisted")
    yield Fit("nobody", "nobody.1", True)
    yield Untaint("no-node", "repaired")
    yield Progress(-1)
    yield Hold("over already", NOW)
