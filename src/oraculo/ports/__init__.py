"""What the engine needs of the world, in the domain's verbs. Adapters live in `brokers`, `stores` and `telemetry`."""
