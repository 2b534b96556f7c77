"""What `oraculo dev` shows: workers for the queues of what is built in, and a few runs for them to do."""
