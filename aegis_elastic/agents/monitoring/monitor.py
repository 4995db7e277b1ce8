"""The watcher "monitor": samples what the ranks of this node use, reads their logs, and reports anomalies.

One thread, which changes nothing of the training. It takes a sample, applies the rules of
`core.detection.anomalies`, and sleeps. Sampling takes a few thousandths of a CPU at most: where there is more
to read (hundreds of processes, thousands of connections), it samples less often.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aegis_elastic.agents.monitoring.gpus import GpuReader
from aegis_elastic.agents.monitoring.log_reader import LogReader
from aegis_elastic.agents.monitoring.samples import Sampler
from aegis_elastic.agents.watch.contract import WatchedRanks
from aegis_elastic.core.detection.anomalies import DETAIL_CHARS_MAX, SIGNATURE, Anomaly, Rules
from aegis_elastic.core.detection.samples import RankRules
from aegis_elastic.core.diagnosis import signatures

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
INTERVAL_S_MIN = 0.01
COST_S_MAX = 0.004  # CPU time of a sample at one per second; costlier samples are taken less often
REPORT_SAMPLES = 10
REPEAT_S = 60.0  # before the same kind of line of the same rank is reported again, with the number of lines
REPORTED_MAX = 30  # of one node in REPEAT_S
CLOSE_S = 2.0

OnAnomalies = Callable[[Sequence[Anomaly]], None]


class Monitor:
    """The watcher `monitor` (see `agents.watch.contract`). `on_anomalies` is called from its thread."""

    name = "monitor"

    def __init__(
        self,
        wake: Callable[[], None],
        on_anomalies: OnAnomalies,
        interval_s: float = INTERVAL_S,
        rules: Rules | None = None,
    ) -> None:
        self._wake = wake
        self._on_anomalies = on_anomalies
        self._interval_s = max(interval_s, INTERVAL_S_MIN)
        self._rules = RankRules(rules or Rules())
        self._commands: queue.SimpleQueue[tuple[WatchedRanks, LogReader] | None] = queue.SimpleQueue()
        self._commands_ready = threading.Event()
        self._closing = False
        self._facts: Mapping[str, Any] | None = None
        # `_newest_logs`: of the newest incarnation, for the agent's loop; `_logs`: those that the thread
        # reads.
        self._newest_logs: LogReader | None = None
        self._logs: LogReader | None = None
        self._sampler: Sampler | None = None
        self._cost_s = 0.0
        self._limit = _RateLimit()
        self._thread = threading.Thread(target=self._run, name="aegis-monitor", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called from the agent's loop

    def environment(self) -> Mapping[str, str]:
        """None."""
        return {}

    def on_started(self, ranks: WatchedRanks) -> None:
        """Sample these from now on."""
        self._newest_logs = LogReader(ranks.logs)
        self._commands.put((ranks, self._newest_logs))
        self._commands_ready.set()

    def on_ended(self) -> None:
        """Read the end of their logs, and stop sampling."""
        self._commands.put(None)
        self._commands_ready.set()

    def facts(self) -> Mapping[str, Any] | None:
        """What the ranks used at the last report: see `core.detection.samples.Usage`."""
        return self._facts

    def log_lines(self, rank: int) -> Sequence[str]:
        """Lines of the last minutes that may say why this rank failed."""
        return self._newest_logs.log_lines(rank) if self._newest_logs is not None else ()

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._commands_ready.set()
        self._thread.join(CLOSE_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            # Loaded now: after a failure a recovery would wait for it.
            signatures.load()
            gpu_reader = GpuReader(self._interval_s)
            try:
                self._watch(gpu_reader)
            finally:
                gpu_reader.close()
                self._stop_sampling()
        except Exception:  # the thread's last resort: monitoring ends, training doesn't
            logger.exception("monitoring broke: training goes on without it")
            self._facts = None

    def _watch(self, gpu_reader: GpuReader) -> None:
        due_s: float | None = None
        while True:
            self._commands_ready.wait(None if due_s is None else max(due_s - time.monotonic(), 0.0))
            self._commands_ready.clear()
            while not self._commands.empty():
                self._run_command(self._commands.get(), gpu_reader)
                due_s = time.monotonic() + self._interval_s if self._sampler is not None else None
            if self._closing:
                return
            if due_s is not None and time.monotonic() >= due_s:
                self._sample()
                due_s = max(due_s + self._pace_s(), time.monotonic())

    def _run_command(self, command: tuple[WatchedRanks, LogReader] | None, gpu_reader: GpuReader) -> None:
        if self._logs is not None:
            self._read_logs(self._logs)
            self._logs = None  # what is written from now on is caused by the stop
        self._stop_sampling()
        if command is not None:
            ranks, self._logs = command
            self._sampler = Sampler(ranks, gpu_reader)
            self._rules.begin()

    def _stop_sampling(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def _sample(self) -> None:
        assert self._sampler is not None
        began_s = time.thread_time()
        sample = self._sampler.take()
        found = self._rules.observe(sample)
        if self._logs is not None:
            self._read_logs(self._logs)
        if found:
            self._on_anomalies(self._limit.limited(found))
        self._cost_s += (time.thread_time() - began_s - self._cost_s) / REPORT_SAMPLES
        if self._sampler.number % REPORT_SAMPLES == 0:
            skipped = self._logs.skipped_bytes if self._logs is not None else 0
            self._facts = sample.usage(self._cost_s, skipped)
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
        new = self._limit.without_repeats(anomalies)
        if new:
            self._on_anomalies(self._limit.limited(new))


class _RateLimit:
    """Limits reports of the same kind of line of a rank, and of the whole node."""

    def __init__(self) -> None:
        self._reported_s: dict[tuple[int, str], float] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._since_s = time.monotonic()
        self._count = 0

    def without_repeats(self, anomalies: Sequence[Anomaly]) -> list[Anomaly]:
        """Those not reported within REPEAT_S; `lines` in their numbers counts all since the last report."""
        now_s, new = time.monotonic(), dict[tuple[int, str], Anomaly]()
        for anomaly in anomalies:
            kind = anomaly.rank, anomaly.code
            self._counts[kind] = self._counts.get(kind, 0) + 1
            if now_s - self._reported_s.get(kind, -REPEAT_S) >= REPEAT_S:
                new.setdefault(kind, anomaly)
        for kind in new:
            self._reported_s[kind] = now_s
        return [
            Anomaly(each.code, each.rank, each.time, each.detail, {"lines": float(self._counts.pop(kind))})
            for kind, each in new.items()
        ]

    def limited(self, anomalies: Sequence[Anomaly]) -> list[Anomaly]:
        """As many of these as this node may report now."""
        now_s = time.monotonic()
        if now_s - self._since_s >= REPEAT_S:
            if self._count > REPORTED_MAX:
                logger.warning(
                    "%d anomalies in %g s: only %d were reported", self._count, REPEAT_S, REPORTED_MAX
                )
            self._since_s, self._count = now_s, 0
        left = max(REPORTED_MAX - self._count, 0)
        self._count += len(anomalies)
        return [
            Anomaly(each.code, each.rank, each.time, each.detail[:DETAIL_CHARS_MAX], each.numbers)
            for each in anomalies[:left]
        ]
