import re

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from oraculo.core.run import RunStatus
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
    EnginesChanged,
    HistoryAdded,
    LoopFailed,
    PipelineFileMended,
    PublishFailed,
    Record,
    RunFinished,
    RunsPruned,
    StoreBack,
)
from oraculo.telemetry import metrics as module
from oraculo.telemetry.metrics import MAX_QUEUES, OTHER, Metrics


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample as `name{label="value",…}`."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def after(*records: Record) -> dict[str, float]:
    metrics = Metrics()
    for record in records:
        metrics.observe(record)
    return samples(metrics)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            BatchCommitted(inputs=7, runs=3, created=2, conflicts=1, seconds=0.02),
            {
                "oraculo_runs_started_total": 2,
                "oraculo_commit_conflicts_total": 1,
                "oraculo_batch_inputs_sum": 7,
                "oraculo_batch_inputs_count": 1,
                'oraculo_batch_inputs_bucket{le="5.0"}': 0,
                'oraculo_batch_inputs_bucket{le="10.0"}': 1,
                'oraculo_commit_seconds_bucket{le="0.01"}': 0,
                'oraculo_commit_seconds_bucket{le="0.025"}': 1,
            },
        ),
        (
            RunFinished("c", "p", "parcial", 1, 3, 4.0),
            {
                'oraculo_runs_finished_total{status="parcial"}': 1,
                'oraculo_runs_finished_total{status="concluida"}': 0,
                "oraculo_run_seconds_sum": 4.0,
                'oraculo_run_seconds_bucket{le="2.5"}': 0,
                'oraculo_run_seconds_bucket{le="5.0"}': 1,
                'oraculo_run_seconds_bucket{le="+Inf"}': 1,
            },
        ),
        (
            AnswerTaken("c", "late", "x"),
            {'oraculo_answers_total{verdict="late"}': 1, 'oraculo_answers_total{verdict="applied"}': 0},
        ),
        (AnswerTaken("c", "applied", "progresso"), {'oraculo_answers_total{verdict="applied"}': 0}),
        (CommandsPublished(5, 0.3), {"oraculo_commands_published_total": 5, "oraculo_publish_seconds_sum": 0.3}),
        (PublishFailed(4, "refused"), {"oraculo_publish_failures_total": 4}),
        (DeadLettered("q", "bad"), {'oraculo_dead_letters_total{queue="q"}': 1}),
        (
            DeliveryAttempted("c", "webhook", "failed", "503"),
            {'oraculo_deliveries_total{channel="webhook",outcome="failed"}': 1},
        ),
        (LoopFailed("timers", "boom"), {'oraculo_loop_failures_total{duty="timers"}': 1}),
        (RunsPruned(9), {"oraculo_runs_pruned_total": 9}),
        (
            ConsumerRebuilt("nats", "q", "deaf"),
            {'oraculo_consumers_rebuilt_total{broker="nats",queue="q"}': 1},
        ),
        (CommandsTakenBack("redis", 7), {'oraculo_runs_sent_again_total{broker="redis"}': 7}),
        (BrokerChanged("redis", "away"), {'oraculo_broker_losses_total{broker="redis"}': 1}),
        (BrokerChanged("redis", None), {'oraculo_broker_losses_total{broker="redis"}': 0}),
    ],
)
def test_each_record_moves_its_metrics(record: Record, expected: dict[str, float]) -> None:
    found = after(record)
    assert {name: found[name] for name in expected} == expected


def test_every_kind_of_record_is_counted() -> None:
    of_the_store = {
        EnginesChanged,  # it is asked at every scrape, also by who is none of the engines
        StoreBack,  # what failed until then was counted, each time
        PipelineFileMended,  # its fault was counted
        HistoryAdded,  # what of it is counted has a record of its own
    }
    assert set(Metrics()._handlers) == set(Record.__subclasses__()) - of_the_store


def test_counts_add_up_and_a_value_on_a_bound_is_inside_it() -> None:
    found = after(*[RunFinished("c", "p", "erro", 1, 1, seconds) for seconds in (0.5, 1.0, 1.5, 99999.0)])
    assert found['oraculo_runs_finished_total{status="erro"}'] == 4
    assert found['oraculo_run_seconds_bucket{le="1.0"}'] == 2
    assert found['oraculo_run_seconds_bucket{le="3600.0"}'] == 3
    assert found["oraculo_run_seconds_count"] == found['oraculo_run_seconds_bucket{le="+Inf"}'] == 4


def test_what_took_less_than_no_time_for_the_clock_was_set_back_counts_as_none() -> None:
    found = after(CommandsPublished(1, 2.0), CommandsPublished(1, -3600.0), BatchCommitted(1, 1, 1, 0, -3600.0))
    assert (found["oraculo_publish_seconds_sum"], found["oraculo_publish_seconds_count"]) == (2.0, 2)
    assert (found["oraculo_commit_seconds_sum"], found["oraculo_commit_seconds_count"]) == (0.0, 1)


def test_a_record_it_does_not_know_is_no_error() -> None:
    Metrics().observe(Record())


def test_the_table_in_the_docstring_names_exactly_what_is_there() -> None:
    documented = set(re.findall(r"^\| `(oraculo_\w+)` \|", module.__doc__ or "", re.MULTILINE))
    text = Metrics().render().decode()
    assert documented == set(re.findall(r"^# TYPE (oraculo_\w+) ", text, re.MULTILINE))


def test_the_documented_types_are_the_real_ones() -> None:
    documented = set(re.findall(r"^\| `(oraculo_\w+)` \| (\w+) \|", module.__doc__ or "", re.MULTILINE))
    assert documented == set(re.findall(r"^# TYPE (oraculo_\w+) (\w+)", Metrics().render().decode(), re.MULTILINE))


def test_queues_past_the_limit_share_one_label() -> None:
    found = after(*[DeadLettered(f"q{number}", "bad") for number in range(MAX_QUEUES + 50)])
    labels = [name for name in found if name.startswith("oraculo_dead_letters_total")]
    assert len(labels) == MAX_QUEUES + 1
    assert found[f'oraculo_dead_letters_total{{queue="{OTHER}"}}'] == 50


def test_the_state_of_queues() -> None:
    metrics = Metrics()
    metrics.set_queues([QueueState("old", 1, 1, 1, 1)])
    metrics.set_queues([QueueState("a", 3, 2, 1, consumers=4), QueueState("b", 5, None, 0)])
    found = samples(metrics)
    assert found['oraculo_queue_ready{queue="a"}'] == 3
    assert found['oraculo_queue_unacked{queue="a"}'] == 2
    assert found['oraculo_queue_dead_letters{queue="a"}'] == 1
    assert found['oraculo_queue_consumers{queue="a"}'] == 4
    assert found['oraculo_queue_ready{queue="b"}'] == 5
    assert 'oraculo_queue_consumers{queue="b"}' not in found
    assert 'oraculo_queue_unacked{queue="b"}' not in found
    assert not [name for name in found if "old" in name]


def test_queue_states_past_the_limit_are_summed() -> None:
    metrics = Metrics()
    metrics.set_queues(
        [QueueState(f"q{number}", 2, 1, 3, None if number % 2 else 1) for number in range(MAX_QUEUES + 4)]
    )
    found = samples(metrics)
    assert found[f'oraculo_queue_ready{{queue="{OTHER}"}}'] == 8
    assert found[f'oraculo_queue_dead_letters{{queue="{OTHER}"}}'] == 12
    assert found[f'oraculo_queue_unacked{{queue="{OTHER}"}}'] == 4
    assert found[f'oraculo_queue_consumers{{queue="{OTHER}"}}'] == 2


def test_a_sum_with_one_that_is_not_known_is_not_known() -> None:
    metrics = Metrics()
    metrics.set_queues([QueueState(f"q{number}", 2, 1 if number % 2 else None, 3) for number in range(MAX_QUEUES + 4)])
    found = samples(metrics)
    assert found[f'oraculo_queue_ready{{queue="{OTHER}"}}'] == 8
    assert f'oraculo_queue_unacked{{queue="{OTHER}"}}' not in found


def test_queues_of_strangers_take_no_label_from_our_own() -> None:
    metrics = Metrics()
    strangers = [QueueState(f"a{number}", 1, 0, 0) for number in range(MAX_QUEUES + 5)]
    metrics.set_queues(strangers)
    metrics.set_queues([QueueState("a", 0, 0, 0), *strangers[1:], QueueState("z", 7, 0, 0)], own={"z"})
    found = samples(metrics)
    assert found['oraculo_queue_ready{queue="z"}'] == 7
    assert f'oraculo_queue_ready{{queue="a{MAX_QUEUES - 1}"}}' in found, "who has a label keeps it"
    assert found[f'oraculo_queue_ready{{queue="{OTHER}"}}'] == 5
    assert len([name for name in found if name.startswith("oraculo_queue_ready")]) == MAX_QUEUES + 1


def test_the_census_names_every_status() -> None:
    metrics = Metrics()
    metrics.set_census({RunStatus.RUNNING: 2})
    found = samples(metrics)
    assert found['oraculo_runs{status="em_execucao"}'] == 2
    assert found['oraculo_runs{status="parcial"}'] == 0
    assert len([name for name in found if name.startswith("oraculo_runs{")]) == len(RunStatus)


def test_nothing_goes_into_the_global_registry_and_two_do_not_mix() -> None:
    one, two = Metrics(), Metrics()
    one.observe(RunsPruned(1))
    assert samples(two)["oraculo_runs_pruned_total"] == 0
    assert not [family.name for family in REGISTRY.collect() if family.name.startswith("oraculo")]


def test_the_content_type_is_prometheus_text() -> None:
    assert Metrics.content_type.startswith("text/plain")
