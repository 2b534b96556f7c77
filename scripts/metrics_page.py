"""The page `docs/metrics.md`: the table at the head of `telemetry/metrics.py`, which a test holds to the metrics."""

from oraculo.telemetry import metrics

_INTRODUCTION = """\
# Metrics

<!-- Made by scripts/generate_docs.py from src/oraculo/telemetry/metrics.py: change that, then run `make docs`. -->

`GET /metrics` of `oraculo serve`, `api` and `dev`, and of `engine` with `--port`, tells these to Prometheus. Where
`ORACULO_API_KEYS` is set it needs a key. The counters and histograms are of that one process: of several, add them up.
The gauges of the runs, the engines and the queues are of the whole installation; those of the queues are missing while
the broker does not answer. Each failure is counted; the log tells the same once a minute, with its `times`.

"""


def metrics_page() -> str:
    _, table, remarks, *_ = (metrics.__doc__ or "").split("\n\n")
    return f"{_INTRODUCTION}{table}\n\n{remarks[0].upper()}{remarks[1:]}\n"
