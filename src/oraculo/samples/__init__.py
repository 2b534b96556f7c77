"""What `oraculo dev` shows: workers for the seeds' queues, and a few runs for them to do."""
