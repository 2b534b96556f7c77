"""What RabbitMQ sends is read the same in whatever pieces it comes."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from pika import BasicProperties, frame, spec

from oraculo.brokers.rabbitmq.frames import Confirms, Connection, Deliveries
from oraculo.brokers.rabbitmq.properties import encoded

PROPERTIES = BasicProperties(content_type="application/json", delivery_mode=2, headers={"x": 1})
FIRST, SECOND, PUBLISHING, UNKNOWN = 1, 2, 3, 4  # channels


class Line(Connection):
    """A connection that reads what it is given, and keeps what it would leave to pika."""

    def __init__(self) -> None:
        self._frame_buffer = b""
        self.bytes_received = 0
        self.heard: list[tuple[Any, ...]] = []
        self.receivers = {
            channel: Deliveries(lambda *message, channel=channel: self.heard.append((channel, *message)), self.on_got)
            for channel in (FIRST, SECOND)
        }
        self.receivers[PUBLISHING] = Confirms(lambda *confirm: self.heard.append(("confirm", *confirm)))

    def on_got(self, behind: int) -> None:
        self.heard.append(("behind", behind))

    def _process_frame(self, value: Any) -> None:
        self.heard.append(("pika", value.channel_number, type(getattr(value, "method", value)).__name__))

    def hear(self, pieces: Iterable[bytes]) -> Sequence[tuple[Any, ...]]:
        for piece in pieces:
            self._on_data_available(piece)
        return self.heard


def method(channel: int, told: Any) -> bytes:
    return frame.Method(channel, told).marshal()


def content(channel: int, *parts: bytes) -> list[bytes]:
    header = frame.Header(channel, sum(map(len, parts)), PROPERTIES).marshal()
    return [header, *(frame.Body(channel, part).marshal() for part in parts)]


def deliver(channel: int, tag: int, *, again: bool = False, consumer: str = "ctag1.x") -> bytes:
    return method(channel, spec.Basic.Deliver(consumer, tag, redelivered=again, exchange="", routing_key="fila"))


def message(channel: int, tag: int, *parts: bytes, again: bool = False) -> list[bytes]:
    return [deliver(channel, tag, again=again), *content(channel, *parts)]


def heard(channel: int, tag: int, body: bytes, *, again: bool = False) -> tuple[Any, ...]:
    return channel, tag, again, encoded(PROPERTIES), body


FRAMES = [
    *message(FIRST, 1, b"one"),
    *message(FIRST, 2),  # nothing in it, and so no body
    *message(FIRST, 3, b"three", again=True),
    *message(SECOND, 1, b"in ", b"three ", b"parts"),
    frame.Heartbeat().marshal(),
    method(PUBLISHING, spec.Basic.Ack(7, multiple=True)),
    # Another channel's frames between those of one message.
    deliver(FIRST, 2**40, consumer="c" * 255),
    *message(SECOND, 2, b"between"),
    *content(FIRST, b"around"),
    deliver(FIRST, 5),
    method(PUBLISHING, spec.Basic.Nack(8)),
    content(FIRST, b"cut by a nack", b"!")[0],
    *message(SECOND, 3, b"and by a message"),
    *content(FIRST, b"cut by a nack", b"!")[1:],
    method(SECOND, spec.Basic.Cancel("ctag1.x")),
    method(FIRST, spec.Basic.GetOk(6, redelivered=False, exchange="", routing_key="fila", message_count=9)),
    *content(FIRST, b"asked for"),
    *message(UNKNOWN, 1, b"nobody's"),
    # What came back, with a body that begins as a confirm does.
    method(PUBLISHING, spec.Basic.Return(312, "NO_ROUTE", exchange="", routing_key="fila")),
    *content(PUBLISHING, b"\0<\0P" + bytes(9)),
    *message(FIRST, 7, b"the last"),
    frame.Heartbeat().marshal(),
]
HEARD = [
    heard(FIRST, 1, b"one"),
    heard(FIRST, 2, b""),
    heard(FIRST, 3, b"three", again=True),
    heard(SECOND, 1, b"in three parts"),
    ("pika", 0, "Heartbeat"),
    ("confirm", 7, True, True),
    heard(SECOND, 2, b"between"),
    heard(FIRST, 2**40, b"around"),
    ("confirm", 8, False, False),
    heard(SECOND, 3, b"and by a message"),
    heard(FIRST, 5, b"cut by a nack!"),
    ("pika", SECOND, "Cancel"),
    heard(FIRST, 6, b"asked for"),
    ("behind", 9),
    ("pika", UNKNOWN, "Deliver"),
    ("pika", UNKNOWN, "Header"),
    ("pika", UNKNOWN, "Body"),
    ("pika", PUBLISHING, "Return"),
    ("pika", PUBLISHING, "Header"),
    ("pika", PUBLISHING, "Body"),
    heard(FIRST, 7, b"the last"),
    ("pika", 0, "Heartbeat"),
]
STREAM = b"".join(FRAMES)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 19, 100, len(STREAM)])
def test_it_is_read_the_same_in_pieces_of_any_size(size: int) -> None:
    line = Line()
    assert line.hear(STREAM[start : start + size] for start in range(0, len(STREAM), size)) == HEARD
    assert line.bytes_received == len(STREAM)


def test_it_is_read_the_same_wherever_it_is_cut() -> None:
    for place in range(len(STREAM)):
        assert Line().hear([STREAM[:place], STREAM[place:]]) == HEARD, place


def test_it_is_read_the_same_frame_by_frame() -> None:
    assert Line().hear(FRAMES) == HEARD
