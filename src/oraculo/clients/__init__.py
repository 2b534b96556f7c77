"""Clients that brokers and stores share: addresses, dialing, Redis connections and subscriptions."""
