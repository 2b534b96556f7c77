"""Large results: put into the result store, read back, and cleaned up."""
