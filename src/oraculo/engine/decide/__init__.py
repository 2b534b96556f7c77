"""Decides batches of inputs, with one commit each."""
