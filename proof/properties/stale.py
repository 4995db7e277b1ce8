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
    for worker in s.workers:
        for uid, incarnation, seq in (
            (f"{worker.name}.0", s.incarnation, s.seq_num),
            (worker.uid, s.incarnation - 1, s.seq_num),
            (worker.uid, s.incarnation + 1, s.seq_num),
            (worker.uid, s.incarnation, s.seq_num - 1),
            (worker.uid, s.incarnation, s.seq_num + 1),
        ):
            yield Finish(worker.name, uid, incarnation, seq, HARDWARE, "stale:1")
            yield Error(worker.name, uid, incarnation, seq, "stale", store="stale:1")
        yield Lost(((worker.name, f"{worker.name}.0"),), "an earlier life")
        yield Offer(worker.name, f"{worker.name}.0", "stale:1")
        yield Independent(worker.name, s.incarnation - 1, "stale")
        yield Started(worker.name, worker.uid, s.incarnation)
        if worker.finished or worker.gone:
            yield finish(s, worker, findings=HARDWARE)
        if worker.gone:
            yield error(s, worker)
        if worker.store:
            yield Offer(worker.name, worker.uid, worker.store)
        if not worker.gone:
            yield Join(worker.name, worker.uid, worker.node_name, "", 1)
    for spare in s.spares:
        yield Join(spare.name, spare.uid, spare.node_name, "", 1)
    yield from _of_nobody()
    yield Offer("nobody", "nobody.1", "stale:1")
    yield Independent("nobody", s.incarnation, "stale")
    yield Finish("nobody", "nobody.1", s.incarnation, s.seq_num)
    yield Error("nobody", "nobody.1", s.incarnation, s.seq_num, "stale")


def _of_nobody() -> Iterator[Event]:
    """Notes, and events about nodes and workers that don't take part."""
    yield Noted("nobody", "no-node", "memory.leak", "12 MB a minute", NOW)
    yield Mark("no-node", "nobody", Verdict.SLOW, "behind")
    yield Unmark("no-node", Verdict.SLOW, "caught up")
    yield Act("nobody", "manual", "asked")
    yield Evict("no-node", "persisted")
    yield Fit("nobody", "nobody.1", True)
    yield Untaint("no-node", "repaired")
    yield Progress(-1)
    yield Hold("over already", NOW)
