"""Decides: from a batch of inputs to one commit."""
