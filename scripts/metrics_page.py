"""The page `docs/reference/metrics.md`: the table at the head of `telemetry/metrics.py`, which a test checks."""

from oraculo.telemetry import metrics

_INTRODUCTION = """\
# Metrics

<!-- Made by scripts/generate_docs.py from src/oraculo/telemetry/metrics.py: change that, then run `make docs`. -->

`GET /metrics` of `oraculo serve`, `api`, `dev` and `engine --port` returns these for Prometheus. With
`ORACULO_API_KEYS` the call needs a key.

| kind | covers |
|---|---|
| counters, histograms | one process: add up several |
| gauges of runs and engines | the whole installation; missing while the store does not answer |
| gauges of queues | the whole installation, at the brokers that work; missing while the broker does not answer |

While a broker is away, nobody can count its dead letters, so `oraculo_queue_dead_letters` is missing. An alert should
therefore ask for `last_over_time(oraculo_queue_dead_letters[1h]) > 0`. Counters count every failure. The log reports a
repeated failure once a minute, with its number in `times`.

"""


def metrics_page() -> str:
    _, table, remarks, *_ = (metrics.__doc__ or "").split("\n\n")
    return f"{_INTRODUCTION}{table}\n\n{remarks}\n"
