"""The names on the wire: queues, event types, and how one follows from the other."""

import difflib
import re
from collections.abc import Iterable, Sequence
from itertools import islice

REQUESTS = "orquestrador"
ANSWERS = "resultados"
MEMORY = "oraculo.memoria"  # a queue that nobody reads; a broker without it has lost its memory
DLQ_SUFFIX = ".dlq"
COLLECTOR_PREFIX = "escavador"
PROCESSOR_PREFIX = "executador"
BRIDGE_PREFIX = "ponte-"
RABBITMQ_PREFIX = "amq."  # of queues that only RabbitMQ itself can name
BRIDGE_REPLIES = "oraculo-respostas"  # the queue for answers to the bridge, on Celery's broker
MAX_NAME = 128
AMQP_REASON_HEADER = "x-oraculo-reason"  # on dead letters of RabbitMQ
LONGEST_REASON = 4_000  # characters
MAX_COMPARED = 1_000  # names in which a similar one is looked for

START_RUN = "iniciar_orquestracao"
START_COLLECT = "iniciar_coleta"
START_EXECUTE = "iniciar_execucao"
COLLECTED = "resultado_coleta"
EXECUTED = "resultado_execucao"
PROGRESS = "progresso"
RUN_ENDED = "orquestracao_concluida"

COMMAND_EVENTS = (START_COLLECT, START_EXECUTE)
ANSWER_EVENTS = frozenset({COLLECTED, EXECUTED})

_MAX_ITEMS = 8  # of a list or object in an error message
_MAX_NAMES = 12  # of known names in an error message
_MAX_BITS = 512  # of a number in an error message; Python does not write one of thousands of digits

# The names that NATS, RabbitMQ's plugins for MQTT and STOMP, and ORÁCULO keep for themselves. `resultados.<engine>` is
# the queue for answers to one engine.
_SYSTEM = re.compile(r"(oraculo|resultados|_INBOX)\..*|(mqtt|stomp)-subscription-.*")
# The queues and keys of RabbitMQ, kombu, Celery and the bridge to Celery. A message there breaks the workers behind it.
# On Redis an app may have put a prefix of its own before the name.
_TRANSPORTS_OWN = re.compile(
    r"amq\..*|celeryev(\..*)?"
    r"|.*(_kombu\.|celery_delayed_|celery-task-meta-|celery-taskset-meta-|chord-unlock-).*"
    r"|.*(unacked|unacked_index|unacked_mutex|\.pidbox|oraculo-respostas)",
    re.DOTALL,
)
_CLIENTS_OWN = "amq.gen-"  # of a queue that RabbitMQ named for one client, which may await replies there
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
FOLDERS = (".", "..")
NO_FOLDER = "must not be '.' or '..', which mean folders in a URL"


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and text not in FOLDERS


def is_collector(queue: str) -> bool:
    return queue.startswith(COLLECTOR_PREFIX)


def command_event(queue: str) -> str:
    return START_COLLECT if is_collector(queue) else START_EXECUTE


def answer_event(queue: str) -> str:
    return COLLECTED if is_collector(queue) else EXECUTED


def kind_of(command: str) -> str:
    """Return the prefix of the destinations of a command, for answers where its queue is not known."""
    return COLLECTOR_PREFIX if command == START_COLLECT else PROCESSOR_PREFIX


def dlq_of(queue: str) -> str:
    return queue + DLQ_SUFFIX


def is_dlq(queue: str) -> bool:
    return queue.endswith(DLQ_SUFFIX)


def dlq_name(queue: str) -> str:
    """Return the dead-letter queue of `queue`, or `queue` itself when it is one."""
    return queue if is_dlq(queue) else dlq_of(queue)


def source_name(queue: str) -> str:
    """Return the queue whose dead letters are in `queue`, or `queue` itself."""
    return queue.removesuffix(DLQ_SUFFIX)


def source_of(queue: str) -> str:
    """Return a collector's `fonte`: `youtube` for `escavador_youtube`."""
    return queue.removeprefix(COLLECTOR_PREFIX).lstrip("_-.") or queue


def short_name(queue: str) -> str:
    """Return a queue without its role's prefix: `youtube`, or `relatorio` for `executador_relatorio`."""
    if is_collector(queue):
        return source_of(queue)
    return queue.removeprefix(PROCESSOR_PREFIX).lstrip("_-.") or queue


def with_kind(kind: str, name: str) -> str:
    """Return the name with its role's prefix: `escavador_youtube` for `youtube` and for `escavador_youtube`."""
    return name if not name or name.startswith(kind) else f"{kind}_{name}"


def is_own_queue(queue: str) -> bool:
    """Return whether engines or bridges read the queue, and so show its dead letters."""
    return queue in (REQUESTS, ANSWERS) or queue.startswith(BRIDGE_PREFIX)


def is_system_queue(queue: str) -> bool:
    """Return whether a broker, another system or ORÁCULO keeps this name, so that nobody may target it."""
    is_kept = _SYSTEM.fullmatch(queue) is not None or is_transports_own(queue)
    return is_kept and not queue.startswith(_CLIENTS_OWN)


def is_transports_own(queue: str) -> bool:
    """Return whether RabbitMQ, Celery or its transport keeps this name, perhaps behind a prefix."""
    return _TRANSPORTS_OWN.fullmatch(queue) is not None


def system_queue_fault(queue: str) -> str:
    return f"'{queue}' is a system queue; name one of your own"


def queue_fault(name: object) -> str | None:
    """Return why `name` cannot be the queue of a destination, or None when it can."""
    if not isinstance(name, str):
        return "must be a string"
    if name in FOLDERS:
        return NO_FOLDER
    if not is_name(name):
        return f"must be 1 to {MAX_NAME} letters, digits, '_', '-' or '.'; got {shown(name)}"
    if name in (REQUESTS, ANSWERS):
        return f"'{name}' is the orchestrator's own queue; name the destination's"
    if is_system_queue(name) or name.startswith(_CLIENTS_OWN):
        return system_queue_fault(name)
    if name.startswith(BRIDGE_PREFIX):
        return f"'{name}' is a bridge's own queue; name the destination, as celery://task.name or bullmq://queue"
    if name.endswith(DLQ_SUFFIX):
        return f"'{name}' is a dead-letter queue; name the queue itself"
    return None


def reply_queue_fault(name: str) -> str | None:
    """Return why `name` cannot be the queue for a run's aggregate (`responder_em`), or None when it can."""
    if is_name(name) and (name in (REQUESTS, ANSWERS) or name.startswith(BRIDGE_PREFIX)):
        whose = "a bridge's" if name.startswith(BRIDGE_PREFIX) else "the orchestrator's"
        return f"'{name}' is {whose} own queue; name one on which you await the aggregate, as minhas_respostas"
    return None if is_name(name) and name.startswith(_CLIENTS_OWN) else queue_fault(name)


def shortened(reason: str) -> str:
    """Return a reason that may quote a long message, cut to LONGEST_REASON."""
    return reason if len(reason) <= LONGEST_REASON else f"{reason[: LONGEST_REASON - 1]}…"


def shown(value: object, limit: int = 60) -> str:
    """Return `value` quoted and short, for an error message. Only the beginning of a large value is read."""
    text = _beginning(value, limit)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _beginning(value: object, limit: int, levels: int = 3) -> str:
    if isinstance(value, str | bytes):
        return repr(value[:limit])
    if isinstance(value, int):
        return repr(value) if value.bit_length() < _MAX_BITS else "a very long number"
    if not isinstance(value, list | dict):
        return repr(value)
    opening, closing = "[]" if isinstance(value, list) else "{}"
    if not value:
        return opening + closing
    if not levels:
        return f"{opening}…{closing}"
    items = islice(value.items() if isinstance(value, dict) else ((item,) for item in value), _MAX_ITEMS)
    parts = [": ".join(_beginning(part, limit, levels - 1) for part in item) for item in items]
    more = ", …" if len(value) > _MAX_ITEMS else ""
    return f"{opening}{', '.join(parts)}{more}{closing}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: `; did you mean 'x'?`, or the known names."""
    names = sorted(known)
    if len(names) > MAX_COMPARED:
        return ""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    more = ", …" if len(names) > _MAX_NAMES else ""
    return f"; known: {', '.join(names[:_MAX_NAMES])}{more}" if names else ""


def near_miss(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is very similar to this one, but not the same."""
    others = sorted(set(known) - {name})
    if len(others) > MAX_COMPARED:
        return None
    return next(iter(difflib.get_close_matches(name, others, n=1, cutoff=0.8)), None)


class QueueNames:
    """Names of queues with the configured prefix (physical) and without it (logical)."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.requests = prefix + REQUESTS
        self.answers = prefix + ANSWERS
        self.memory = prefix + MEMORY

    def physical(self, queue: str) -> str:
        return self.prefix + queue

    def logical(self, queue: str) -> str:
        return queue.removeprefix(self.prefix)

    def reply_queue(self, queue: str) -> str:
        """Return the physical name of a client's queue. A name that RabbitMQ gave gets no prefix."""
        return queue if queue.startswith(RABBITMQ_PREFIX) else self.physical(queue)


def numbered(kinds: Sequence[str]) -> list[str]:
    """Return a name for each of these kinds: `rabbitmq`, and `rabbitmq-2` for the second of its kind."""
    counts = [kinds[: number + 1].count(kind) for number, kind in enumerate(kinds)]
    return [kind if count == 1 else f"{kind}-{count}" for kind, count in zip(kinds, counts, strict=True)]
