"""The bridge to BullMQ: steps run as jobs of BullMQ queues, and jobs of `orchestrator-queue` start pipelines.

    commands ── dispatcher ──► BullMQ queue ──► Node worker ── events, sweep ──► results ──► answers
    application ──► orchestrator-queue ── entry ──► run ── its aggregate ──► the job's return value

- `bridge`: the service that starts the parts below, restarts them and stops them
- `server`: the connection to BullMQ's Redis, and what is wrong with it
- `layout`: BullMQ's keys and scripts; `paused_queues` corrects them for BullMQ up to version 5
- `job`: a command as a job, and the record that the bridge keeps of it
- `ledger`: the records in Redis: which jobs are ours, and which still owe an answer
- `dispatcher`: adds a job for each command
- `events`: reads the events of BullMQ's queues
- `sweep`: looks at the open jobs themselves, for what no event said
- `results`: writes the answers, publishes them, and closes the jobs in the ledger
- `queue_state`: counts the jobs that wait in a queue, for explanations
- `entry`: follows the runs that jobs start; `bullmq_worker` takes these jobs
- `bull_v4`, `bull_v4_worker`: the same for the npm package `bull` 3 and 4
"""

from oraculo.bridges.bullmq.bridge import BullmqBridge
from oraculo.bridges.bullmq.queue_state import BullmqQueues

__all__ = ["BullmqBridge", "BullmqQueues"]
