"""How queues lie on JetStream; a plain client in any language relies on this.

- The subject of a queue is its name. One file-backed stream holds it, with work-queue retention: a message is in the
  stream until it is acked, and no longer. The quarantine `<queue>.dlq` is such a stream too.
- Names of streams and durable consumers may not have dots. There `=`, which no queue's name has, stands for each:
  `resultados.dlq` lies in stream `resultados=dlq`, and no two queues share a stream.
- Everyone takes from one durable pull consumer named like the stream, with explicit acks. It never gives up on a
  message by itself: past `max_deliver` JetStream would keep it and tell nobody. Its `max_ack_pending` is unlimited: a
  message that waits for a delay counts there too, and a thousand of them would stop the queue.
- A dead letter carries `Oraculo-Reason` (percent-encoded) and `Oraculo-Redeliveries`. Both may be missing.
- What has a key carries it as `Nats-Msg-Id`, and so does what moves between queues: sent again, it is stored once.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, unquote_to_bytes

from oraculo.ports.broker import NO_REASON
from oraculo.wire.naming import dlq_of, shortened, shown
from oraculo.wire.timestamps import from_iso, to_iso

REASON_HEADER = "Oraculo-Reason"
REDELIVERIES_HEADER = "Oraculo-Redeliveries"
ID_HEADER = "Nats-Msg-Id"  # JetStream drops a second message with the same id, within two minutes

NANOSECONDS = 1_000_000_000
CLOSED = {"discard": "new", "max_bytes": 1}  # of a stream that takes nothing more
_DOT = "="
_MAX_WAITING = 4096  # pulls that may wait at one queue; JetStream's default of 512 is the number of workers it allows
_PLAIN = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"  # what a reason may have unencoded; quote() lets letters and digits pass

_TRAPS = frozenset({"backoff", "max_bytes"})  # deliver again before the lease ends; never deliver what is larger
_LONGEST_STREAM = 255  # characters of a stream's name
_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:~-]+")
_ELLIPSIS = quote("…")
_CUT_ESCAPE = re.compile(r"%[0-9A-F]?$")


def stream_of(queue: str) -> str:
    return queue.replace(".", _DOT)


def queue_of(stream: str) -> str:
    return stream.replace(_DOT, ".")


def name_fault(queue: str) -> str | None:
    """Why NATS cannot have a queue of that name."""
    if _NAME.fullmatch(queue) and len(stream_of(dlq_of(queue))) <= _LONGEST_STREAM:
        return None
    rule = f"letters, digits, '_' and '-', and dots between them, and has about {_LONGEST_STREAM} characters at most"
    return f"NATS cannot have the queue {shown(queue)}: a name is made of {rule}"


def pause_told(consumer: Mapping[str, Any]) -> str | None:
    """Say that somebody paused a consumer (NATS 2.11 and later), and until when; None: it is not paused."""
    if not consumer.get("paused"):
        return None
    until = from_iso(str(consumer["config"].get("pause_until")))
    return "its consumer is paused at the server" + ("" if until is None else f" until {to_iso(until)}")


def stream_config(queue: str, replicas: int) -> dict[str, Any]:
    return {
        "name": stream_of(queue),
        "subjects": [queue],
        "retention": "workqueue",
        "storage": "file",
        "discard": "old",  # there is no limit that would make it discard anything
        "num_replicas": replicas,
    }


def is_closed(config: Mapping[str, Any]) -> bool:
    """Return whether somebody closed the stream to remove it. Nobody has a use for a queue of one byte."""
    return {**config, **CLOSED} == config


def opened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a closed stream that takes messages again. Without a limit it discards none."""
    return {**config, "max_bytes": -1}


def stream_fault(queue: str, config: Mapping[str, Any]) -> str | None:
    """Why a stream that is there already, made by others, cannot be the queue."""
    if list(config.get("subjects") or ()) != [queue]:
        return f"has the subjects {config.get('subjects')}, not {queue}"
    if config.get("retention") != "workqueue":
        return f"has retention '{config.get('retention')}', so that acked messages would stay; it must be 'workqueue'"
    if config.get("no_ack"):
        return "has no_ack, so that nobody is told whether a message was stored"
    if config.get("max_msgs_per_subject", -1) > 0 and not config.get("discard_new_per_subject"):
        return (
            "has max_msgs_per_subject and not discard_new_per_subject, so that a new message would push out an old one"
        )
    return None


def loss_in(config: Mapping[str, Any]) -> str | None:
    """How a stream that others made loses messages in silence. Its owner may want that, so it is used all the same."""
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
    """Whether a stream is one of these queues; an account may have others."""
    return stream_fault(queue_of(config["name"]), config) is None


def consumer_config(queue: str, lease: float) -> dict[str, Any]:
    return {
        "durable_name": stream_of(queue),
        "name": stream_of(queue),
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "replay_policy": "instant",
        "max_waiting": _MAX_WAITING,
        **consumer_terms(lease),
    }


def consumer_terms(lease: float) -> dict[str, Any]:
    """What can be changed in a consumer that is there already, and must be so."""
    return {"ack_wait": int(lease * NANOSECONDS), "max_deliver": -1, "max_ack_pending": -1}


def mended_consumer(config: Mapping[str, Any], lease: float) -> dict[str, Any]:
    """A consumer that others made, without its traps. Its lease may be longer: a plain worker may need that."""
    mended = {name: value for name, value in config.items() if name not in _TRAPS} | consumer_terms(lease)
    if "backoff" not in config:  # it stands for the lease, where there is one
        mended["ack_wait"] = max(mended["ack_wait"], config.get("ack_wait", 0))
    return mended


def agreed_terms(config: Mapping[str, Any]) -> dict[str, Any]:
    """What whoever pulls must keep to, for its owner may have set it."""
    return {
        "lease": config["ack_wait"] / NANOSECONDS,
        "pull_batch": config.get("max_batch", 0),
        "pull_expires": config.get("max_expires", 0) / NANOSECONDS,
    }


def consumer_fault(queue: str, config: Mapping[str, Any]) -> str | None:
    """Why a durable consumer that is there already, made by others, cannot serve."""
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


# -- deliveries -----------------------------------------------------------------------------------------------------


class Origin(NamedTuple):
    """What the subject on which a delivery is acked tells about it."""

    stream: str
    delivered: int  # how often, this time included
    sequence: int
    stored_at: str  # nanoseconds

    @property
    def id(self) -> str:
        """The same at each delivery, and no other message's, not even after the stream was deleted and made again."""
        return f"{self.stream}:{self.sequence}:{self.stored_at}"


def origin_of(ack_subject: str) -> Origin:
    """`$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.…`, or with `<domain>.<account>` before the stream."""
    parts = ack_subject.split(".")
    first = 2 if len(parts) == 9 else 4
    return Origin(parts[first], int(parts[first + 2]), int(parts[first + 3]), parts[first + 5])


# -- headers --------------------------------------------------------------------------------------------------------


def id_headers(message_id: str, room: int) -> dict[str, str] | None:
    """None when they do not fit into `room` bytes: a message that may come twice is better than one that is refused."""
    headers = {ID_HEADER: message_id}
    return headers if headers_size(headers) <= room else None


def as_header(text: str) -> str:
    """A header has no line breaks, no blanks at its ends, and is not UTF-8 to every client."""
    return text if _PLAIN_ID.fullmatch(text) else quote(text, safe="", errors="backslashreplace")


# -- dead letters ---------------------------------------------------------------------------------------------------


def letter_headers(reason: str, redeliveries: int, room: int, letter_id: str = "") -> dict[str, str] | None:
    """What a dead letter is told by. They must fit into `room` bytes, for otherwise the server would refuse the letter:
    then the reason is shortened, and if need be left out."""
    headers = {REDELIVERIES_HEADER: str(redeliveries), REASON_HEADER: ""}
    if letter_id:
        headers[ID_HEADER] = letter_id
    left = room - headers_size(headers)
    if left < 0:
        return None
    # By its characters: encoded it then has 48 kB at most, and JetStream takes headers of 64.
    headers[REASON_HEADER] = _quoted(shortened(reason), left)
    return headers


def header_block(headers: Mapping[str, str]) -> bytes:
    """As it is written; whoever makes headers makes them of ASCII without line breaks."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    return f"NATS/1.0\r\n{''.join(lines)}\r\n".encode()


def headers_size(headers: Mapping[str, str]) -> int:
    return len(header_block(headers))


def _quoted(reason: str, limit: int) -> str:
    """Percent-encoded, as a header has no line breaks, no blanks at its ends, and is not UTF-8 to every client."""
    safe = _PLAIN if reason == reason.strip() else _PLAIN.strip()
    text = quote(reason, safe=safe, errors="replace")  # it quotes what was wrong, which may be half a character
    if len(text) <= limit:
        return text
    if limit < len(_ELLIPSIS):
        return ""
    whole = _CUT_ESCAPE.sub("", text[: limit - len(_ELLIPSIS)])
    return quote(unquote_to_bytes(whole).decode("utf-8", "ignore"), safe=safe) + _ELLIPSIS


def reason_in(headers: Mapping[str, str]) -> str:
    return unquote(headers.get(REASON_HEADER, "")) or NO_REASON


def redeliveries_in(headers: Mapping[str, str]) -> int:
    text = headers.get(REDELIVERIES_HEADER, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def parse_headers(block: bytes) -> dict[str, str]:
    """The headers of a stored message, whoever wrote them."""
    lines = block.decode("utf-8", "replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_status(block: bytes) -> tuple[str, str]:
    """Of what the server says itself: `NATS/1.0 409 Consumer Deleted` gives `409` and the words."""
    _, _, line = block.partition(b"\r\n")[0].decode("utf-8", "replace").partition(" ")
    code, _, words = line.partition(" ")
    return code, words


def seconds_of(timestamp: str) -> float:
    """`2026-11-15T05:06:55.049878023Z` in seconds since the epoch."""
    return datetime.fromisoformat(timestamp).timestamp()
