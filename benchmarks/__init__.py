"""The four workloads, measured on the embedded setup. Run with `make bench`."""
