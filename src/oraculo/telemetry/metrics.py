"""Metrics for Prometheus.

| name | type | labels | meaning |
|---|---|---|---|
| `oraculo_runs_started_total` | counter | | runs accepted |
| `oraculo_runs_finished_total` | counter | status | ends of runs; an amendment or a repeat ends a run again |
| `oraculo_run_seconds` | histogram | | seconds from a run's start to its end |
| `oraculo_answers_total` | counter | verdict | answers: applied, late, duplicate, unknown; no progress reports |
| `oraculo_commands_published_total` | counter | | commands that the broker confirmed; dead letters are not counted |
| `oraculo_publish_seconds` | histogram | | seconds from the publish of a batch of commands to the broker's confirms |
| `oraculo_publish_failures_total` | counter | | sends that the broker did not confirm; each is repeated |
| `oraculo_dead_letters_total` | counter | queue | dead letters written by this engine; the gauge counts all |
| `oraculo_commit_conflicts_total` | counter | | decisions repeated because another engine was faster |
| `oraculo_batch_inputs` | histogram | | inputs decided in one commit |
| `oraculo_commit_seconds` | histogram | | seconds from the first input to the commit |
| `oraculo_deliveries_total` | counter | channel, outcome | attempts to deliver an aggregate |
| `oraculo_loop_failures_total` | counter | duty | errors in a background duty, which goes on |
| `oraculo_pipeline_files_rejected_total` | counter | | files of the pipelines folder that became invalid |
| `oraculo_runs_pruned_total` | counter | | ended runs deleted by retention |
| `oraculo_consumers_rebuilt_total` | counter | broker, queue | deaf consumers replaced |
| `oraculo_broker_losses_total` | counter | broker | losses of a broker |
| `oraculo_runs_sent_again_total` | counter | broker | runs whose commands were sent again after a loss |
| `oraculo_broker_up` | gauge | broker | 1 while the broker can be used |
| `oraculo_broker_deaf_queues` | gauge | broker | queues whose consumer hears nothing now |
| `oraculo_engines` | gauge | | engines alive on this store |
| `oraculo_runs` | gauge | status | runs in the store |
| `oraculo_queue_ready` | gauge | queue | messages waiting |
| `oraculo_queue_unacked` | gauge | queue | messages delivered and not settled, where the broker counts them |
| `oraculo_queue_dead_letters` | gauge | queue | dead letters; missing while one of several brokers is away |
| `oraculo_queue_consumers` | gauge | queue | consumers, where the broker counts them |

prometheus-client adds `process_*`. The label `queue` takes at most 200 values; further queues are `other`. The gauges
name the engine's own queues first, then those of pipelines and routes.

Counts are plain numbers, turned into Prometheus' types only at a scrape. Its own `inc` and `observe` cost 0.8 and
1.8 µs, too much for every answer. Only the event loop's thread counts.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from oraculo.core.machine import Verdict
from oraculo.core.run import RunStatus
from oraculo.ports.broker import BrokerStatus
from oraculo.ports.broker_admin import QueueState
from oraculo.ports.telemetry import (
    AnswerTaken,
    BatchCommitted,
    BrokerChanged,
    CommandsPublished,
    CommandsTakenBack,
    ConsumerRebuilt,
    DeadLettered,
    DeliveryAttempted,
    LoopFailed,
    PipelineFileRejected,
    PublishFailed,
    Record,
    RunFinished,
    RunsPruned,
)
from oraculo.wire.naming import PROGRESS

MAX_QUEUES = 200
OTHER = "other"

_SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
_SIZES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
_VERDICTS = (Verdict.APPLIED, Verdict.LATE, Verdict.DUPLICATE, Verdict.UNKNOWN)


class _Counter:
    """A counter by label values. Known values start at 0, so that rates are right from the first count."""

    def __init__(self, name: str, what: str, labels: tuple[str, ...] = (), known: Iterable[str] = ()) -> None:
        self._name, self._what, self._labels = name, what, labels
        start: Iterable[tuple[str, ...]] = [(value,) for value in known] if labels else [()]
        self._counts: dict[tuple[str, ...], int] = dict.fromkeys(start, 0)

    def add(self, count: int, *values: str) -> None:
        self._counts[values] = self._counts.get(values, 0) + count

    def family(self) -> Metric:
        family = CounterMetricFamily(self._name, self._what, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        return family


class _Histogram:
    def __init__(self, name: str, what: str, bounds: tuple[float, ...]) -> None:
        self._name, self._what, self._bounds = name, what, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        value = max(0.0, value)  # the sum must never go down, though a clock may be set back
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> Metric:
        buckets, seen = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family = HistogramMetricFamily(self._name, self._what)
        family.add_metric((), buckets, self._sum)
        return family


class _BoundedNames:
    """The first `limit` names; others become `other`, so that invented queues cannot fill the memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(name)
        return name


class Metrics(Collector):
    """The metrics. `observe` is a telemetry subscriber; `render` gives the answer of `GET /metrics`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._started = _Counter("oraculo_runs_started", "Runs accepted and committed.")
        self._finished = _Counter("oraculo_runs_finished", "Runs that ended.", ("status",), _end_statuses())
        self._run_seconds = _Histogram("oraculo_run_seconds", "From a run's start to its end.", _LONG_SECONDS)
        self._answers = _Counter("oraculo_answers", "Answers taken.", ("verdict",), _VERDICTS)
        self._published = _Counter("oraculo_commands_published", "Commands that the broker confirmed.")
        self._publish_seconds = _Histogram("oraculo_publish_seconds", "To the broker's confirms.", _SHORT_SECONDS)
        self._unpublished = _Counter("oraculo_publish_failures", "Commands that the broker did not confirm.")
        self._dead_letters = _Counter("oraculo_dead_letters", "Dead letters written by this engine.", ("queue",))
        self._conflicts = _Counter("oraculo_commit_conflicts", "Runs decided again after another engine's commit.")
        self._batch_inputs = _Histogram("oraculo_batch_inputs", "Inputs decided in one commit.", _SIZES)
        self._commit_seconds = _Histogram("oraculo_commit_seconds", "From first input to commit.", _SHORT_SECONDS)
        self._deliveries = _Counter("oraculo_deliveries", "Attempts to deliver.", ("channel", "outcome"))
        self._loop_failures = _Counter("oraculo_loop_failures", "Errors of background duties.", ("duty",))
        self._rebuilt = _Counter("oraculo_consumers_rebuilt", "Consumers that were deaf.", ("broker", "queue"))
        self._broker_losses = _Counter("oraculo_broker_losses", "Times that a broker was lost.", ("broker",))
        self._sent_again = _Counter("oraculo_runs_sent_again", "Runs taken back from a lost broker.", ("broker",))
        self._pruned = _Counter("oraculo_runs_pruned", "Ended runs deleted by retention.")
        self._bad_files = _Counter("oraculo_pipeline_files_rejected", "Pipeline files that became bad.")
        self._engines: int | None = None
        self._queue_names = _BoundedNames(MAX_QUEUES)
        self._census: dict[str, int] = {}
        self._brokers: list[BrokerStatus] = []
        self._queues: dict[str, QueueState] = {}
        self._knows_dead_letters = True
        self._handlers = self._handlers_by_record()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def observe(self, record: Record) -> None:
        handler = self._handlers.get(type(record))
        if handler is not None:
            handler(record)

    def set_census(self, counts: Mapping[RunStatus, int] | None) -> None:
        """Set the number of runs in each status. None: it is unknown."""
        self._census = {} if counts is None else {str(status): counts.get(status, 0) for status in RunStatus}

    def set_engines(self, count: int | None) -> None:
        """Set the number of engines that are alive. None: it is unknown."""
        self._engines = count

    def set_queues(
        self, states: Iterable[QueueState], own: Collection[str] = (), *, knows_dead_letters: bool = True
    ) -> None:
        """Set the state of all queues. Labels go to the queues of `own` first, then to those that had one before."""
        self._knows_dead_letters = knows_dead_letters
        before, self._queues = self._queues, {}
        ranked = sorted(states, key=lambda state: (state.queue not in own, state.queue not in before))
        for rank, state in enumerate(ranked):
            label = state.queue if rank < MAX_QUEUES else OTHER
            self._queues[label] = _joined(self._queues.get(label), state)

    def set_brokers(self, brokers: Iterable[BrokerStatus]) -> None:
        self._brokers = list(brokers)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield everything as Prometheus' types, for the registry."""
        for part in vars(self).values():
            if isinstance(part, _Counter | _Histogram):
                yield part.family()
        yield GaugeMetricFamily("oraculo_engines", "Engines that are alive.", value=self._engines)
        yield _gauge("oraculo_runs", "Runs in the store.", "status", self._census.items())
        up = [(broker.name, int(broker.trouble is None)) for broker in self._brokers]
        yield _gauge("oraculo_broker_up", "1 when it can be used.", "broker", up)
        deaf = [(broker.name, len(broker.deaf)) for broker in self._brokers]
        yield _gauge("oraculo_broker_deaf_queues", "Queues whose consumer hears nothing.", "broker", deaf)
        for field, what in _QUEUE_GAUGES.items():
            if field == "dead_letters" and not self._knows_dead_letters:
                continue
            yield _gauge(f"oraculo_queue_{field}", what, "queue", self._queue_values(field))

    def _queue_values(self, field: str) -> Iterator[tuple[str, int]]:
        for label, state in self._queues.items():
            if (value := getattr(state, field)) is not None:
                yield label, value

    def _handlers_by_record(self) -> dict[type[Record], Callable[[Any], None]]:
        label = self._queue_names.label
        return {
            BatchCommitted: self._batch_committed,
            RunFinished: self._run_finished,
            AnswerTaken: self._answer_taken,
            CommandsPublished: self._commands_published,
            PublishFailed: lambda record: self._unpublished.add(record.count),
            DeadLettered: lambda record: self._dead_letters.add(1, label(record.queue)),
            DeliveryAttempted: lambda record: self._deliveries.add(1, record.channel, record.outcome),
            LoopFailed: lambda record: self._loop_failures.add(1, record.duty),
            RunsPruned: lambda record: self._pruned.add(record.count),
            PipelineFileRejected: lambda _record: self._bad_files.add(1),
            ConsumerRebuilt: lambda record: self._rebuilt.add(1, record.broker, label(record.queue)),
            BrokerChanged: lambda record: self._broker_losses.add(1 if record.trouble else 0, record.broker),
            CommandsTakenBack: lambda record: self._sent_again.add(record.runs, record.broker),
        }

    def _batch_committed(self, record: BatchCommitted) -> None:
        self._started.add(record.created)
        self._conflicts.add(record.conflicts)
        self._batch_inputs.observe(record.inputs)
        self._commit_seconds.observe(record.seconds)

    def _run_finished(self, record: RunFinished) -> None:
        self._finished.add(1, record.status)
        self._run_seconds.observe(record.seconds)

    def _answer_taken(self, record: AnswerTaken) -> None:
        if record.kind != PROGRESS:
            self._answers.add(1, record.verdict)

    def _commands_published(self, record: CommandsPublished) -> None:
        self._published.add(record.count)
        self._publish_seconds.observe(record.seconds)


_QUEUE_GAUGES = {
    "ready": "Messages that wait.",
    "unacked": "Messages delivered and not yet settled, where the broker counts them.",
    "dead_letters": "Dead letters.",
    "consumers": "Consumers, where the broker counts them.",
}


def _end_statuses() -> list[str]:
    return [status for status in RunStatus if status is not RunStatus.RUNNING]


def _gauge(name: str, what: str, label: str, values: Iterable[tuple[str, int]]) -> Metric:
    family = GaugeMetricFamily(name, what, labels=(label,))
    for value, count in values:
        family.add_metric((value,), count)
    return family


def _joined(one: QueueState | None, other: QueueState) -> QueueState:
    """Return the sum of two queues that share a label."""
    if one is None:
        return other
    consumers = [state.consumers for state in (one, other) if state.consumers is not None]
    return QueueState(
        queue=OTHER,
        ready=one.ready + other.ready,
        unacked=None if one.unacked is None or other.unacked is None else one.unacked + other.unacked,
        dead_letters=one.dead_letters + other.dead_letters,
        consumers=sum(consumers) if consumers else None,
    )
