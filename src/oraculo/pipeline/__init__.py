"""Pipelines as users write them: definitions, their faults, retries, and steps of other systems."""
