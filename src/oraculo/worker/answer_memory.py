"""The memory of answers: a repeated command is answered again, not run again."""

from collections import OrderedDict

from oraculo.wire.message import Message

Identity = tuple[str, str, int]

MAX_BYTES = 64 * 1024 * 1024


def identity_of(command: Message) -> Identity | None:
    """Return the key that every repeat of a command shares. None: a plain publisher sent it, and it has no repeats."""
    if command.tarefa is None or command.tentativa is None:
        return None
    return command.correlation_id, command.tarefa, command.tentativa


class RememberedAnswers:
    """The latest answers as they were sent, bounded in number and bytes. The least recently used go first."""

    def __init__(self, limit: int, max_bytes: int = MAX_BYTES) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._bytes = 0
        self._bodies: OrderedDict[Identity, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bodies)

    def get(self, identity: Identity) -> bytes | None:
        body = self._bodies.get(identity)
        if body is not None:
            self._bodies.move_to_end(identity)
        return body

    def put(self, identity: Identity, body: bytes) -> None:
        self.forget(identity)
        self._bodies[identity] = body
        self._bytes += len(body)
        while self._bodies and (len(self._bodies) > self._limit or self._bytes > self._max_bytes):
            self._bytes -= len(self._bodies.popitem(last=False)[1])

    def forget(self, identity: Identity) -> None:
        self._bytes -= len(self._bodies.pop(identity, b""))
