"""A command as a job of BullMQ: its id, its data, and the record that the bridge keeps of it."""

import hashlib
import re

import msgspec

from oraculo.wire import naming
from oraculo.wire.message import Message
from oraculo.wire.timestamps import from_iso

_READABLE = 80  # characters of a job's id that people can read
_UNREADABLE = re.compile(r"[^A-Za-z0-9_.-]+")
_NO_PAYLOAD = msgspec.Raw(b"{}")


class Record(msgspec.Struct, gc=False, rename={"queue": "fila", "command": "comando"}):
    """The part of a job that its answer needs: BullMQ's queue, and the command without its payload."""

    queue: str
    command: Message
    via: str | None = None  # of several brokers, the one that brought the command

    @property
    def kind(self) -> str:
        """A queue name of the same kind, which decides the form of the answer."""
        return naming.kind_of(self.command.tipo_evento)

    def is_late(self, now: float) -> bool:
        deadline = None if self.command.prazo is None else from_iso(self.command.prazo)
        return deadline is not None and deadline <= now


class NewJob(msgspec.Struct):
    """A job that is to be added."""

    id: str
    name: str
    attempts: int
    data: str  # the step's payload, as it came
    record: Record
    priority: int = 0  # the run's, from 0 to 9


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def decode_record(text: str) -> Record:
    return _decoder.decode(text)


def record_of(queue: str, command: Message, via: str | None = None) -> Record:
    return Record(queue, msgspec.structs.replace(command, payload=_NO_PAYLOAD, ponte=None), via)


def job_id_of(prefix: str, command: Message, body: bytes) -> str:
    """Return the id of the command's job: the same for each repeat of the command, and for no other command.

    A plain publisher's command names no task or attempt: its whole body identifies it. BullMQ refuses ids that hold a
    ':' or are a mere number.
    """
    if command.tarefa is None or command.tentativa is None:
        readable, identity = command.correlation_id, body
    else:
        parts = (command.correlation_id, command.tarefa, str(command.tentativa))
        readable, identity = ".".join(parts), "\0".join(parts).encode()
    digest = hashlib.sha256(prefix.encode() + b"\0" + identity).hexdigest()[:20]
    return f"{_UNREADABLE.sub('_', readable)[:_READABLE]}-{digest}"
