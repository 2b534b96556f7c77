"""Delivers the aggregates of ended runs to webhooks and reply queues."""
