"""A job's metrics: what they are called, and how they follow its events (`docs/metrics.md` explains each).

Names are stable. Everything that counts is learned from events alone, so a master that takes over a job
counts on from its journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aegis_elastic.core.accounts.post_mortem import PostMortem
from aegis_elastic.core.detection.samples import Usage
from aegis_elastic.core.events import Finish, Noted, Saved
from aegis_elastic.core.machine import Transition
from aegis_elastic.core.model import CheckResult, Phase, Status, Verdict
from aegis_elastic.observe.timing import Clock

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
# A job may recover for weeks; a label must not have a value for every time.
ROUND_MAX = 10
VALUES_MAX = 100
LABEL_CHARS_MAX = 80
NO_GPU = "none"
_WORLD = ("gpu_type", "worker_num", "round")
_ROUNDS = {Phase.BOOT_CHECKING: "bootcheck", Phase.TROUBLESHOOTING: "troubleshoot"}


class Metrics:
    """The metrics of one job in a registry of their own."""

    def __init__(self, usage: Callable[[], Mapping[str, Usage]], now: Callable[[], float]) -> None:
        """`usage`: what each worker's node uses, for a scrape. `now`: wall seconds, for the same."""
        # When each series began is of no use to anybody, and doubles their number.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._clock = Clock()
        self._post_mortem = PostMortem()
        self._before: Status | None = None
        self._rounds = dict.fromkeys(_ROUNDS.values(), 0)
        self._gpu_type = NO_GPU
        self._labels: dict[str, set[str]] = {}
        self._make_counters()
        self._make_histograms()
        self.registry.register(_Now(lambda: self._before, self._clock, usage, now))

    def _make_counters(self) -> None:
        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"aegis_{name}", about, labels, registry=self.registry)

        self._created = counter("jobs_created", "Jobs that were begun")
        self._succeeded = counter("jobs_succeeded", "Jobs that ended well")
        self._failed = counter("jobs_failed", "Jobs that ended badly")
        self._recoveries = counter("recoveries", "Recoveries, by what had failed", "class", "level")
        self._anomalies = counter("anomalies", "What was noted in the journal, by code", "code")
        self._saved = counter("checkpoints", "Checkpoints that were completed", "kind")

    def _make_histograms(self) -> None:
        def histogram(name: str, about: str, *labels: str) -> Histogram:
            return Histogram(f"aegis_{name}", about, labels, registry=self.registry, buckets=SECONDS)

        self._check = histogram(
            "check_seconds", "Time of one check on one worker", "check", "phase", "result", *_WORLD
        )
        self._phase = {
            "bootcheck": histogram("bootcheck_seconds", "Time of a whole bootcheck", *_WORLD),
            "troubleshoot": histogram("troubleshoot_seconds", "Time of a whole troubleshooting", *_WORLD),
        }
        self._segments = histogram("recovery_seconds", "Time of a recovery, by segment", "segment")

    def follow(self, event: object, transition: Transition, at: float) -> None:
        """An event and what `step` made of it, at that wall second."""
        before, after = self._before, transition.status
        self._before = after
        if before is None:
            self._created.inc()
        else:
            self._note_event(event, before, transition)
            if before.phase is not after.phase:
                self._change_phase(before, after, at)
        for segment, seconds in self._clock.follow(event, before, transition, at).items():
            self._segments.labels(segment).observe(max(seconds, 0.0))

    def _note_event(self, event: object, before: Status, transition: Transition) -> None:
        concluded = self._post_mortem.follow(event, before, transition)
        if concluded is not None:
            self._recoveries.labels(concluded.fault_class, str(concluded.level)).inc()
        if isinstance(event, Noted):
            self._anomalies.labels(self._label("code", event.code)).inc()
        elif isinstance(event, Saved) and transition.status is not before:
            self._saved.labels(self._label("kind", event.kind)).inc()
        elif isinstance(event, Finish) and before.phase in _ROUNDS:
            for check in event.checks:
                self._note_check(check, before)

    def _note_check(self, check: CheckResult, status: Status) -> None:
        phase = _ROUNDS[status.phase]
        result = "pass" if check.passed else "fail"
        kind = self._label("check", check.check_type)
        self._check.labels(kind, phase, result, *self._world(status, phase)).observe(check.duration_s)
        name = check.details.get("cuda_device_name")
        if check.check_type == "env" and isinstance(name, str) and name:
            self._gpu_type = name[:LABEL_CHARS_MAX]

    def _change_phase(self, before: Status, after: Status, at: float) -> None:
        left = _ROUNDS.get(before.phase)
        if left is not None:
            self._phase[left].labels(*self._world(before, left)).observe(self._clock.in_phase_s(at))
        entered = _ROUNDS.get(after.phase)
        if entered is not None:
            self._rounds[entered] += 1
        if after.phase is Phase.SUCCEED:
            self._succeeded.inc()
        elif after.phase is Phase.FAILED:
            self._failed.inc()

    def _label(self, name: str, value: str) -> str:
        """A value that somebody else chose: only so many of them make series of their own."""
        known = self._labels.setdefault(name, set())
        if value not in known and len(known) >= VALUES_MAX:
            return "other"
        known.add(value)
        return value[:LABEL_CHARS_MAX]

    def _world(self, status: Status, phase: str) -> tuple[str, str, str]:
        number = max(self._rounds[phase], 1)
        shown = str(number) if number < ROUND_MAX else f"{ROUND_MAX}+"
        return self._gpu_type, str(len(status.workers)), shown


class _Now(Collector):
    """What is true at the moment of a scrape."""

    def __init__(
        self,
        status: Callable[[], Status | None],
        clock: Clock,
        usage: Callable[[], Mapping[str, Usage]],
        now: Callable[[], float],
    ) -> None:
        self._status = status
        self._clock = clock
        self._usage = usage
        self._now = now

    def describe(self) -> Iterable[Metric]:
        return ()  # else the registry would ask for everything, before there is anything

    def collect(self) -> Iterable[Metric]:
        status, now = self._status(), self._now()
        if status is None:
            return
        spec = status.spec
        yield _family(
            "job_info",
            "What job this is",
            {(spec.namespace, spec.job_name, str(spec.generation)): 1},
            ("namespace", "job_name", "generation"),
        )
        yield _family("phase", "1 for the phase of the job", _one_of(Phase, status.phase), ("phase",))
        for name, about, value in (
            ("incarnation", "How often training was started", status.incarnation),
            ("retries", "Restarts that count so far", status.recover_count),
            ("retries_max", "Restarts that the job may use", spec.max_retry),
            ("reschedules", "Restarts for hardware, which don't count", status.reschedules),
            ("evictions", "Nodes that were let go because they were slow or hung", status.evictions),
            ("workers", "Workers that have ranks", len(status.workers)),
            ("spares", "Workers that wait for ranks", len(status.spares)),
            ("step_highest", "Highest training step that is known of; -1: none", status.highest_step),
            ("step_saved", "Step of the newest checkpoint that is known of; -1: none", status.saved_step),
            ("held", "1 while the recovery waits for something outside", int(bool(status.held))),
            (
                "training_seconds",
                "Time that training has run and that wasn't lost",
                self._clock.trained_s(now),
            ),
            ("ettr", "Effective training time ratio since the job was created", self._clock.ettr(now)),
        ):
            yield GaugeMetricFamily(f"aegis_{name}", about, value)
        marks: dict[tuple[str, ...], float] = {
            (verdict.value,): sum(mark.verdict is verdict for mark in status.marks) for verdict in Verdict
        }
        yield _family("marks", "Nodes that a detector has marked", marks, ("verdict",))
        yield from _usages(self._usage())


def _usages(usage: Mapping[str, Usage]) -> Iterable[Metric]:
    """One series a worker: a rank's own belong into a profile, not into 16,000 series."""
    for name, about, value in _USAGES:
        values: dict[tuple[str, ...], float] = {
            (worker,): number for worker, each in usage.items() if (number := value(each)) is not None
        }
        yield _family(name, about, values, ("worker",))


_USAGES: tuple[tuple[str, str, Callable[[Usage], float | None]], ...] = (
    ("node_cpu_cores", "Processors in use on the node", lambda each: each.cpu_cores),
    ("node_memory_available_bytes", "Memory that processes can take", lambda each: each.available_bytes),
    ("node_network_bytes_per_second", "Moved by its interfaces", lambda each: each.network_bytes_s),
    ("node_gpu_utilisation", "Mean of its ranks' GPUs, 0 to 1", lambda each: each.gpu_utilisation),
    ("ranks_cpu_cores", "Processors its ranks use", lambda each: sum(r.cpu_cores for r in each.ranks)),
    ("ranks_memory_bytes", "Memory of its ranks", lambda each: sum(r.memory_bytes for r in each.ranks)),
    ("monitor_sample_cpu_seconds", "What one sample of the ranks costs", lambda each: each.cost_s),
)


def _one_of(kinds: type[Phase], now: Phase) -> dict[tuple[str, ...], float]:
    return {(kind.value,): float(kind is now) for kind in kinds}


def _family(
    name: str, about: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"aegis_{name}", about, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family
