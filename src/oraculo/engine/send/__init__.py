"""Sends committed commands and dead letters, from the store to the brokers."""
