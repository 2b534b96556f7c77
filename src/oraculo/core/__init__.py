"""The rules of a run, pure: no I/O, no clock, no chance, no log. Time, ids and jitter are handed in."""
