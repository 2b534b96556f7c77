"""Large results: put into the object store, read back from it."""
