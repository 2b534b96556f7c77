"""How servers are spoken to, where brokers and stores speak to the same kind: addresses, and connections to Redis."""
