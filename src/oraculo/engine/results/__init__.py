"""Large results: put into the object store, and read back from it."""
