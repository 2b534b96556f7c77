"""The subscribers to telemetry records, metrics and logs, and the hub before them."""
