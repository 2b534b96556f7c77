"""Every error that ORÁCULO raises on purpose.

OraculoError
├── InvalidInput            the caller's input is wrong; carries one Fault for each field
│   ├── InvalidJson         not JSON, or JSON that is refused (too deep, NUL, not UTF-8)
│   ├── InvalidMessage      a message that breaks the schema
│   ├── InvalidRequest      a request for a run that breaks its rules
│   │   └── UnknownPipeline it names a pipeline that is not known here
│   ├── InvalidPipeline     a pipeline definition that breaks its rules
│   └── InvalidSettings     oraculo.toml or the environment
├── PayloadTooLarge         a payload or request over the configured limit
├── NotFound                no such run, pipeline, queue or dead letter
├── Conflict                a clash with what exists (an id in use, a run that has not ended)
│   └── IdempotencyKeyReused  the same key with another body
├── TooManyNewQueues        more new queues in a minute than the settings allow; worth a retry
├── BrokerError             the broker refused or did not confirm
│   ├── BrokerUnavailable   the broker cannot be reached now; worth a retry
│   │   ├── QueueUnavailable  one queue takes nothing now, while the broker works
│   │   │   ├── QueueFull   the queue has no room, by a limit of its owner
│   │   │   └── QueueDown   the queue does not work; another broker may take its messages
│   │   ├── NotMoved        a dead letter could not be put away (in the adapters)
│   │   └── ConsumerDoubted a consumer may be deaf, and is made again (in the adapters)
│   ├── MessageTooLarge     the broker never takes a message of that size
│   └── NotAnId             no dead letter of the broker can have that id (in ports)
├── StoreError              the store refused
│   ├── WrittenByNewer      one run needs a newer version; the others go on
│   └── StoreUnavailable    the store cannot be reached now; worth a retry
│       └── StoreRefuses    the store answers, but takes nothing until it is mended
├── ObjectsError            the object store refused
│   ├── ObjectsUnavailable  the object store cannot be reached now; worth a retry
│   └── ObjectLost          an object is missing, or differs from what was put
├── Unreachable             no server answers the command line (in cli/client.py)
├── Refused                 the server refused a call of the command line (in cli/client.py)
└── InvariantBroken         a programmer's error: the state machine was asked for the impossible

Adapters have a few more under BrokerError and StoreUnavailable. Nobody outside an adapter names those.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NO_THREAD = "can't start new thread"  # the text of Python's RuntimeError when the system has no room for another thread


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of an input: its field, and what would be right."""

    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}" if self.field else self.problem


class OraculoError(Exception):
    """The base of every error that ORÁCULO raises on purpose."""


class InvalidInput(OraculoError):
    def __init__(self, faults: Sequence[Fault] | Fault) -> None:
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        super().__init__("; ".join(map(str, self.faults)))

    @classmethod
    def at(cls, field: str, problem: str) -> "InvalidInput":
        return cls(Fault(field, problem))

    def within(self, field: str) -> "InvalidInput":
        """Return the same error for an input that is in that field of another."""
        return type(self)([Fault(f"{field}.{one.field}" if one.field else field, one.problem) for one in self.faults])


class InvalidJson(InvalidInput):
    pass


class InvalidMessage(InvalidInput):
    pass


class InvalidRequest(InvalidInput):
    pass


class UnknownPipeline(InvalidRequest):
    """The request names a pipeline that this process does not know. Another process may just have stored it."""


class InvalidPipeline(InvalidInput):
    """A pipeline definition has faults. `name` is its own name, as far as that could be read."""

    name = ""


class InvalidSettings(InvalidInput):
    pass


class PayloadTooLarge(OraculoError):
    def __init__(self, field: str, size: int, limit: int) -> None:
        self.field, self.size, self.limit = field, size, limit
        self.faults = (Fault(field, f"{size} bytes or more, over the limit of {limit} bytes"),)
        super().__init__(f"{field}: {size} bytes, over the limit of {limit} bytes")

    def within(self, field: str) -> "PayloadTooLarge":
        """Return the same error for a request that is in that field of a message."""
        place = field if self.field == "request" else f"{field}.{self.field}"
        return PayloadTooLarge(place, self.size, self.limit)


class NotFound(OraculoError):
    pass


class Conflict(OraculoError):
    pass


class IdempotencyKeyReused(Conflict):
    pass


class TooManyNewQueues(OraculoError):
    """A minute brought more new queues than the settings allow. There is room again after `wait` seconds."""

    def __init__(self, limit: int, wait: int) -> None:
        self.wait = wait
        super().__init__(
            f"too many new queues within a minute: ORACULO_QUEUES_NEW_PER_MINUTE allows {limit}; try again in {wait} s"
        )


class BrokerError(OraculoError):
    pass


class BrokerUnavailable(BrokerError):
    pass


class QueueUnavailable(BrokerUnavailable):
    """One queue takes nothing now, while its broker works. Worth a retry, and no reason to leave the broker."""


class QueueFull(QueueUnavailable):
    """A queue has no room, by a limit of its owner. Another broker must not be used to get around it."""


class QueueDown(QueueUnavailable):
    """A queue does not work, while its broker does. Another broker may take its messages."""


class MessageTooLarge(BrokerError):
    """The broker never takes a message of this size. `excess` is None when the broker does not name its limit."""

    def __init__(self, reason: str, size: int, limit: int | None) -> None:
        self.excess = None if limit is None else size - limit
        super().__init__(f"{reason}; raise that limit or, if it is a command, lower ORACULO_LIMITS_PAYLOAD_BYTES")


class StoreError(OraculoError):
    pass


class WrittenByNewer(StoreError):
    """The store holds a value of a newer version (`found`). Only its own run is held up."""

    def __init__(self, found: str) -> None:
        super().__init__(f"the store has {found}, as a newer ORÁCULO writes it: run that version")


class StoreUnavailable(StoreError):
    pass


class StoreRefuses(StoreUnavailable):
    """The store answers that it cannot work, because of a full disk or a missing right, say.

    The request is not the reason, so a smaller or another one would be refused, too.
    """


class ObjectsError(OraculoError):
    pass


class ObjectsUnavailable(ObjectsError):
    pass


class ObjectLost(ObjectsError):
    pass


class InvariantBroken(OraculoError, AssertionError):
    pass


def how_to_add(extra: str) -> str:
    """Return the command that installs a missing extra."""
    return f"pip install 'oraculo-core[{extra}]'"
