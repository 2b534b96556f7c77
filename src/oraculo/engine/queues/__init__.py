"""Queues: which exist, which are served, what is in them, and when they are removed."""
