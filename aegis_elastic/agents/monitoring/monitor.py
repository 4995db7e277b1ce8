"""Constant monitoring: what the ranks of this node use, every second, and what they write; what is odd is
told.

One thread, which touches nothing of the training. It takes a sample, lets the rules of
`core.detection.anomalies` look at it, and sleeps. Sampling takes a few thousandths of a processor at most:
where there is more to read (hundreds of processes, thousands of connections), samples come further apart.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aegis_elastic.agents.monitoring.gpus import Gpus
from aegis_elastic.agents.monitoring.log_reader import LogReader
from aegis_elastic.agents.monitoring.samples import Sampler
from aegis_elastic.agents.watch.contract import WatchedRanks
from aegis_elastic.core.detection.anomalies import DETAIL_CHARS_MAX, SIGNATURE, Anomaly, Rules
from aegis_elastic.core.detection.samples import RankRules
from aegis_elastic.core.diagnosis import signatures

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
INTERVAL_S_MIN = 0.01
COST_S_MAX = 0.004  # of processor time, for each sample at the pace of one a second
NEWS_SAMPLES = 10
REPEAT_S = 60.0  # the same kind of line of the same rank is told again after that, with how many there were
TOLD_MAX = 30  # in REPEAT_S, of one node
CLOSE_S = 2.0

Tell = Callable[[Sequence[Anomaly]], None]


class Monitor:
    """The watcher `monitor` (see `agents.watch.contract`). `tell` is called from its thread."""

    name = "monitor"

    def __init__(
        self,
        wake: Callable[[], None],
        tell: Tell,
        interval_s: float = INTERVAL_S,
        rules: Rules | None = None,
    ) -> None:
        self._wake = wake
        self._tell = tell
        self._interval_s = max(interval_s, INTERVAL_S_MIN)
        self._rules = RankRules(rules or Rules())
        self._orders: queue.SimpleQueue[tuple[WatchedRanks, LogReader] | None] = queue.SimpleQueue()
        self._ordered = threading.Event()
        self._closing = False
        self._news: Mapping[str, Any] | None = None
        # For the agent's loop, of the newest incarnation; the thread reads along in the one that it samples.
        self._heard: LogReader | None = None
        self._logs: LogReader | None = None
        self._sampler: Sampler | None = None
        self._cost_s = 0.0
        self._told = _Told()
        self._thread = threading.Thread(target=self._run, name="aegis-monitor", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for the agent's loop

    def environment(self) -> Mapping[str, str]:
        """Nothing: the ranks don't know that they are looked at."""
        return {}

    def on_started(self, ranks: WatchedRanks) -> None:
        """Look at these from now on."""
        self._heard = LogReader(ranks.logs)
        self._orders.put((ranks, self._heard))
        self._ordered.set()

    def on_ended(self) -> None:
        """Read their last words, and look at them no more."""
        self._orders.put(None)
        self._ordered.set()

    def facts(self) -> Mapping[str, Any] | None:
        """What the ranks used when that was last reported: see `core.detection.samples.Usage`."""
        return self._news

    def log_lines(self, rank: int) -> Sequence[str]:
        """Lines of the last minutes that tell why this rank may have failed."""
        return self._heard.log_lines(rank) if self._heard is not None else ()

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._ordered.set()
        self._thread.join(CLOSE_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            # Before anything fails: then everybody waits for what its lines mean.
            signatures.load()
            gpus = Gpus(self._interval_s)
            try:
                self._watch(gpus)
            finally:
                gpus.close()
                self._stop_sampling()
        except Exception:  # the thread's last resort: monitoring ends, training doesn't
            logger.exception("monitoring broke: training goes on without it")
            self._news = None

    def _watch(self, gpus: Gpus) -> None:
        due_s: float | None = None
        while True:
            self._ordered.wait(None if due_s is None else max(due_s - time.monotonic(), 0.0))
            self._ordered.clear()
            while not self._orders.empty():
                self._follow(self._orders.get(), gpus)
                due_s = time.monotonic() + self._interval_s if self._sampler is not None else None
            if self._closing:
                return
            if due_s is not None and time.monotonic() >= due_s:
                self._look()
                due_s = max(due_s + self._pace_s(), time.monotonic())

    def _follow(self, order: tuple[WatchedRanks, LogReader] | None, gpus: Gpus) -> None:
        if self._logs is not None:
            self._read_logs(self._logs)
            self._logs = None  # what is written from now on is the noise of being stopped
        self._stop_sampling()
        if order is not None:
            ranks, self._logs = order
            self._sampler = Sampler(ranks, gpus)
            self._rules.begin()

    def _stop_sampling(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def _look(self) -> None:
        assert self._sampler is not None
        began_s = time.thread_time()
        sample = self._sampler.take()
        found = self._rules.observe(sample)
        if self._logs is not None:
            self._read_logs(self._logs)
        if found:
            self._tell(self._told.allowed(found))
        self._cost_s += (time.thread_time() - began_s - self._cost_s) / NEWS_SAMPLES
        if self._sampler.number % NEWS_SAMPLES == 0:
            skipped = self._logs.skipped_bytes if self._logs is not None else 0
            self._news = sample.usage(self._cost_s, skipped)
            self._wake()

    def _pace_s(self) -> float:
        return self._interval_s * max(1.0, self._cost_s / COST_S_MAX)

    def _read_logs(self, logs: LogReader) -> None:
        anomalies = [
            Anomaly(
                SIGNATURE + hit.signature.fault_class, hit.rank, time.time(), f"rank {hit.rank}: {hit.line}"
            )
            for hit in logs.read()
        ]
        told = self._told.first_of_their_kind(anomalies)
        if told:
            self._tell(self._told.allowed(told))


class _Told:
    """Keeps a rank that says the same a thousand times from being reported a thousand times."""

    def __init__(self) -> None:
        self._last_s: dict[tuple[int, str], float] = {}
        self._held: dict[tuple[int, str], int] = {}
        self._since_s = time.monotonic()
        self._count = 0

    def first_of_their_kind(self, anomalies: Sequence[Anomaly]) -> list[Anomaly]:
        """Those that haven't been told for a while; `lines` in their numbers counts all since then."""
        now_s, told = time.monotonic(), dict[tuple[int, str], Anomaly]()
        for anomaly in anomalies:
            kind = anomaly.rank, anomaly.code
            self._held[kind] = self._held.get(kind, 0) + 1
            if now_s - self._last_s.get(kind, -REPEAT_S) >= REPEAT_S:
                told.setdefault(kind, anomaly)
        for kind in told:
            self._last_s[kind] = now_s
        return [
            Anomaly(each.code, each.rank, each.time, each.detail, {"lines": float(self._held.pop(kind))})
            for kind, each in told.items()
        ]

    def allowed(self, anomalies: Sequence[Anomaly]) -> list[Anomaly]:
        """As many of these as this node may tell now."""
        now_s = time.monotonic()
        if now_s - self._since_s >= REPEAT_S:
            if self._count > TOLD_MAX:
                logger.warning("%d anomalies in %g s: only %d were told", self._count, REPEAT_S, TOLD_MAX)
            self._since_s, self._count = now_s, 0
        left = max(TOLD_MAX - self._count, 0)
        self._count += len(anomalies)
        return [
            Anomaly(each.code, each.rank, each.time, each.detail[:DETAIL_CHARS_MAX], each.numbers)
            for each in anomalies[:left]
        ]
