"""The wire: messages, the names of queues and events, JSON within limits, and timestamps."""
