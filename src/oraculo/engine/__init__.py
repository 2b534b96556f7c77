"""The engine: batch, decide, commit, ack, publish. `operations` is the door for the API and the command line."""
