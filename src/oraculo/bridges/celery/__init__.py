"""Celery: its tasks as steps, runs that its clients start, and our handlers in its workers.

Bridge: commands go out as tasks of the user's Celery app, and replies come back as answers.
    bridge           starts and stops these parts
    dispatcher       takes commands from our broker and makes tasks of them
    sender           publishes tasks on Celery's broker, each confirmed
    reply_consumer   takes the replies of tasks from Celery's broker
    replies          reads a reply or an event: the value of a task, or why it failed
    answers          publishes what became of a task on our broker
    events           listens to the workers' task events
    failure_reasons  joins a failed task with the event that says why
    queue_state      counts the messages and workers of a Celery queue
    check            tries what the bridge needs, for `oraculo doctor`
Entry: a Celery app whose tasks start runs.
    app              makes the app `orquestrador_core` (`oraculo.celery_app` holds it)
    entry            its tasks
    failback         returns to the first RabbitMQ of a list
Handlers: Celery workers run the handlers of an `oraculo.worker.App`.
    command_consumer reads plain JSON commands inside a Celery worker
    handlers         runs one command in a pool process
    command_line     names and runs a Celery worker
Shared by these parts:
    connections      reaches Celery's broker and translates its errors
    listener         keeps one connection in a thread
    tls              reads the TLS options of a URL
    tasks            makes tasks: names, ids, arguments, callbacks
    publisher        publishes on our broker from code that cannot await
    recent           forgets the oldest of many entries
"""

from oraculo.bridges.celery.bridge import CeleryBridge
from oraculo.bridges.celery.queue_state import CeleryQueues

__all__ = ["CeleryBridge", "CeleryQueues"]
