"""Retention: deletes old runs, and large results without a run."""
