"""The ports: Protocols for what the engine needs of the world. `brokers`, `stores` and `telemetry` implement them."""
