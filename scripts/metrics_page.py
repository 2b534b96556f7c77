"""The page `docs/reference/metrics.md`: the table at the head of `telemetry/metrics.py`, which a test checks."""

from oraculo.telemetry import metrics

_INTRODUCTION = """\
# Metrics

<!-- Made by scripts/generate_docs.py from src/oraculo/telemetry/metrics.py: change that, then run `make docs`. -->

`GET /metrics` of `oraculo serve`, `api` and `dev`, and of `engine` with `--port`, tells these to Prometheus. Where
`ORACULO_API_KEYS` is set it needs a key. The counters and histograms are of that one process: of several, add them up.
The gauges of the runs, the engines and the queues are of the whole installation; those of the queues are missing while
the broker does not answer, and those of the runs and the engines while the store does not. Of several brokers they have
what those hold that work: commands of one that is away are sent again by another, but its dead letters wait for it, so
that `oraculo_queue_dead_letters` is missing meanwhile. An alert that is to outlast that asks for
`last_over_time(oraculo_queue_dead_letters[1h]) > 0`. Each failure is counted; the log tells the same once a minute,
with its `times`, but for webhooks, whose failures it tells one by one.

"""


def metrics_page() -> str:
    _, table, remarks, *_ = (metrics.__doc__ or "").split("\n\n")
    return f"{_INTRODUCTION}{table}\n\n{remarks[0].upper()}{remarks[1:]}\n"
