"""The sample workers and sample runs of `oraculo dev`."""
