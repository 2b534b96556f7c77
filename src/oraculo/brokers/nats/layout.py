"""The layout of queues on JetStream. Plain clients in any language rely on this.

- The subject of a queue is its name. One file-backed stream holds it, with work-queue retention: a message is in the
  stream until it is acked, and no longer. The dead letters, `<queue>.dlq`, lie in such a stream too.
- Names of streams and durable consumers may not have dots. There `=`, which no queue's name has, stands for each:
  `resultados.dlq` lies in stream `resultados=dlq`, and no two queues share a stream.
- Everyone takes from one durable pull consumer named like the stream, with explicit acks. It never gives up on a
  message by itself: past `max_deliver` JetStream would keep it and report nothing. Its `max_ack_pending` is unlimited:
  a message that waits for a delay counts there too, and a thousand of them would stop the queue.
- A dead letter carries `Oraculo-Reason` (percent-encoded) and `Oraculo-Redeliveries`. Both may be missing.
- A message with a key carries it as `Nats-Msg-Id`, and so does one that moves between queues: sent again, it is stored
  once.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from oraculo.ports.broker import NO_REASON
from oraculo.wire.naming import dlq_of, shortened, shown
from oraculo.wire.timestamps import from_iso, to_iso

REASON_HEADER = "Oraculo-Reason"
REDELIVERIES_HEADER = "Oraculo-Redeliveries"
ID_HEADER = "Nats-Msg-Id"  # JetStream drops a second message with the same id, within two minutes

NANOSECONDS = 1_000_000_000
_DOT = "="
_MAX_WAITING = 4096  # pulls that may wait at one queue; JetStream's default of 512 is the number of workers it allows
_PLAIN = "!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"  # unencoded in a reason; quote() lets letters and digits pass
_SHORT_REASON = 100  # characters, where a whole reason does not fit beside the body

# Settings of a consumer that redeliver before the lease ends, never deliver what is larger, or refuse a pull.
_TRAPS = frozenset({"backoff", "max_bytes", "max_batch", "max_expires"})
_LONGEST_STREAM = 255  # characters of a stream's name
_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:~-]+")


# -- names ----------------------------------------------------------------------------------------------------------


def stream_of(queue: str) -> str:
    return queue.replace(".", _DOT)


def queue_of(stream: str) -> str:
    return stream.replace(_DOT, ".")


def name_fault(queue: str) -> str | None:
    """Return why NATS cannot have a queue of that name."""
    if _NAME.fullmatch(queue) and len(stream_of(dlq_of(queue))) <= _LONGEST_STREAM:
        return None
    rule = f"letters, digits, '_' and '-', and dots between them, and has about {_LONGEST_STREAM} characters at most"
    return f"NATS cannot have the queue {shown(queue)}: a name is made of {rule}"


# -- streams --------------------------------------------------------------------------------------------------------


def stream_config(queue: str, replicas: int) -> dict[str, Any]:
    return {
        "name": stream_of(queue),
        "subjects": [queue],
        "retention": "workqueue",
        "storage": "file",
        "discard": "old",  # there is no limit that would make it discard anything
        "num_replicas": replicas,
    }


def stream_fault(queue: str, config: Mapping[str, Any]) -> str | None:
    """Return why a stream that others made cannot be the queue."""
    if list(config.get("subjects") or ()) != [queue]:
        return f"has the subjects {config.get('subjects')}, not {queue}"
    if config.get("retention") != "workqueue":
        return f"has retention '{config.get('retention')}', so that acked messages would stay; it must be 'workqueue'"
    if config.get("no_ack"):
        return "has no_ack, so that it confirms no message"
    if config.get("max_msgs_per_subject", -1) > 0 and not config.get("discard_new_per_subject"):
        return "has max_msgs_per_subject without discard_new_per_subject: a new message would push out an old one"
    return None


def loss_in(config: Mapping[str, Any]) -> str | None:
    """Return how a stream that others made loses messages. It is used all the same: its owner may want that."""
    ways = []
    if config.get("storage") == "memory":
        ways.append("storage 'memory', so that what waits is gone after a restart")
    if config.get("max_age", 0) > 0:
        ways.append("max_age, so that what waits longer is dropped")
    if config.get("discard") != "new":
        limits = [name for name in ("max_msgs", "max_bytes") if config.get(name, -1) > 0]
        ways += [f"{name} and not discard 'new', so that a new message would push out an old one" for name in limits]
    return f"has {'; and '.join(ways)}" if ways else None


def is_queue(config: Mapping[str, Any]) -> bool:
    """Return whether a stream is one of these queues; an account may have others."""
    return stream_fault(queue_of(config["name"]), config) is None


# -- consumers ------------------------------------------------------------------------------------------------------


def consumer_config(queue: str, lease: float) -> dict[str, Any]:
    return {
        "durable_name": stream_of(queue),
        "name": stream_of(queue),
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "replay_policy": "instant",
        "max_waiting": _MAX_WAITING,
        **_terms(lease),
    }


def _terms(lease: float) -> dict[str, Any]:
    """Return the settings that every consumer must have, and that can be changed in one that is there."""
    return {"ack_wait": int(lease * NANOSECONDS), "max_deliver": -1, "max_ack_pending": -1}


def mended_consumer(config: Mapping[str, Any], lease: float) -> dict[str, Any]:
    """Return the settings of a consumer without its traps. It keeps a longer lease, which a plain worker may need."""
    kept = {name: value for name, value in config.items() if name not in _TRAPS}
    return kept | _terms(max(lease, config.get("ack_wait", 0) / NANOSECONDS))


def consumer_fault(queue: str, config: Mapping[str, Any]) -> str | None:
    """Return why a durable consumer that others made cannot serve."""
    if config.get("deliver_subject"):
        return "pushes its messages to one subject; it must be a pull consumer"
    if config.get("ack_policy") != "explicit":
        return f"has ack policy '{config.get('ack_policy')}'; it must be 'explicit'"
    if config.get("filter_subject", queue) != queue or config.get("filter_subjects", [queue]) != [queue]:
        return "has a filter; it must take every message of its stream"
    if config.get("headers_only"):
        return "delivers headers only, so that no message would have a body"
    if config.get("priority_groups"):
        return "has priority groups; it must deliver to whoever asks"
    return None


def pause_of(consumer: Mapping[str, Any]) -> str | None:
    """Return the words for a consumer that somebody paused (NATS 2.11 and later), and until when."""
    if not consumer.get("paused"):
        return None
    until = from_iso(str(consumer["config"].get("pause_until")))
    return "its consumer is paused at the server" + ("" if until is None else f" until {to_iso(until)}")


# -- deliveries -----------------------------------------------------------------------------------------------------


class Origin(NamedTuple):
    """The facts about a delivery in the subject on which it is acked."""

    stream: str
    delivered: int  # how often, this time included
    sequence: int
    stored_at: str  # nanoseconds

    @property
    def id(self) -> str:
        """The message's own id at each delivery, also after the stream was deleted and made again."""
        return f"{self.stream}:{self.sequence}:{self.stored_at}"


def origin_of(ack_subject: str) -> Origin:
    """Read `$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.…`, or `<domain>.<account>` before the stream."""
    parts = ack_subject.split(".")
    first = 2 if len(parts) == 9 else 4
    return Origin(parts[first], int(parts[first + 2]), int(parts[first + 3]), parts[first + 5])


# -- headers --------------------------------------------------------------------------------------------------------


def id_headers(message_id: str, room: int) -> dict[str, str] | None:
    """Return the header with an id. None when it does not fit: a repeat is better than a refusal."""
    headers = {ID_HEADER: message_id}
    return headers if len(header_block(headers)) <= room else None


def as_header(text: str) -> str:
    """Quote a text: a header has no line breaks, no blanks at its ends, and is not UTF-8 to every client."""
    return text if _PLAIN_ID.fullmatch(text) else quote(text, safe="", errors="backslashreplace")


def letter_headers(reason: str, redeliveries: int, room: int, letter_id: str = "") -> dict[str, str] | None:
    """Return the headers of a dead letter, with as much of the reason as fits into `room` bytes.

    A quoted reason has 48 kB at most, and JetStream takes headers of 64.
    """
    shorter = f"{reason[:_SHORT_REASON]}…"
    for text in (shortened(reason), shorter, ""):
        # A reason may quote half a character of something else.
        headers = {REDELIVERIES_HEADER: str(redeliveries), REASON_HEADER: quote(text, _PLAIN, errors="replace")}
        if letter_id:
            headers[ID_HEADER] = letter_id
        if len(header_block(headers)) <= room:
            return headers
    return None


def header_block(headers: Mapping[str, str]) -> bytes:
    """Return headers as they are sent. They are ASCII without line breaks."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    return f"NATS/1.0\r\n{''.join(lines)}\r\n".encode()


def reason_in(headers: Mapping[str, str]) -> str:
    return unquote(headers.get(REASON_HEADER, "")) or NO_REASON


def redeliveries_in(headers: Mapping[str, str]) -> int:
    text = headers.get(REDELIVERIES_HEADER, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def parse_headers(block: bytes) -> dict[str, str]:
    """Read the headers of a message that anybody may have written."""
    lines = block.decode("utf-8", "replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_status(block: bytes) -> tuple[str, str]:
    """Read a message of the server itself: `NATS/1.0 409 Consumer Deleted` gives `409` and the words."""
    _, _, line = block.partition(b"\r\n")[0].decode("utf-8", "replace").partition(" ")
    code, _, words = line.partition(" ")
    return code, words


def seconds_of(timestamp: str) -> float:
    """Return `2026-11-15T05:06:55.049878023Z` in seconds since the epoch."""
    return datetime.fromisoformat(timestamp).timestamp()
