"""Every error that ORÁCULO raises on purpose.

OraculoError
├── InvalidInput            the caller's input is wrong; carries one Fault for each field
│   ├── InvalidJson         not JSON, or JSON that is refused (too deep, NUL, not UTF-8)
│   ├── InvalidMessage      a message that breaks the schema
│   ├── InvalidRequest      a request for a run that breaks its rules
│   │   └── UnknownPipeline it names a pipeline that is not known here
│   ├── InvalidPipeline     a pipeline definition that breaks its rules
│   └── InvalidSettings     oraculo.toml or the environment
├── PayloadTooLarge         over the configured limit
├── NotFound                no such run, pipeline, queue or dead letter
├── Conflict                it clashes with what is there (an id in use, a run that has not ended)
│   └── IdempotencyKeyReused  the same key with another body
├── TooManyNewQueues        a minute brought as many new queues as the settings allow; worth a retry
├── BrokerError             the broker refused or did not confirm
│   ├── BrokerUnavailable   it cannot be reached now; worth a retry
│   │   ├── QueueUnavailable  one queue takes nothing now, while the broker works
│   │   │   ├── QueueFull   it has no room, by a limit of its owner's
│   │   │   └── QueueDown   it does not work; another broker may take its messages
│   │   ├── NotMoved        one of several could not put a dead letter away (there, too)
│   │   └── ConsumerDoubted a consumer may not hear, and is made again to be sure (there, too)
│   ├── MessageTooLarge     the broker will never take a message of that size
│   └── NotAnId             no dead letter there can have that id (in ports/broker.py)
├── StoreError              the store refused
│   ├── WrittenByNewer      it holds what only a newer version understands; no other run is held up by it
│   └── StoreUnavailable    it cannot be reached now; worth a retry
│       └── StoreRefuses    it answers, and takes nothing from anybody until it is mended
├── ObjectsError            the object store refused
│   ├── ObjectsUnavailable  it cannot be reached now; worth a retry
│   └── ObjectLost          an object is not there, or is not what was put
├── Unreachable             no server answers the command line (in cli/client.py)
├── Refused                 the server answered the command line that it will not (there, too)
└── InvariantBroken         a programmer's error: the state machine was asked for the impossible

Adapters have a few more, under BrokerError and StoreUnavailable, which do not leave their room by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NO_THREAD = "can't start new thread"  # Python's words, in a RuntimeError, where the system has no room for another


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with an input: where it is, and what would be right."""

    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}" if self.field else self.problem


class OraculoError(Exception):
    """The root of the tree."""


class InvalidInput(OraculoError):
    def __init__(self, faults: Sequence[Fault] | Fault) -> None:
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        super().__init__("; ".join(map(str, self.faults)))

    @classmethod
    def at(cls, field: str, problem: str) -> "InvalidInput":
        return cls(Fault(field, problem))

    def within(self, field: str) -> "InvalidInput":
        """The same of an input that stands in that field of another."""
        return type(self)([Fault(f"{field}.{one.field}" if one.field else field, one.problem) for one in self.faults])


class InvalidJson(InvalidInput):
    pass


class InvalidMessage(InvalidInput):
    pass


class InvalidRequest(InvalidInput):
    pass


class UnknownPipeline(InvalidRequest):
    """The request names a pipeline that this process does not know; another may have put it a moment ago."""


class InvalidPipeline(InvalidInput):
    """A definition with faults. `name` is what it calls itself, as far as that could be read."""

    name = ""


class InvalidSettings(InvalidInput):
    pass


class PayloadTooLarge(OraculoError):
    def __init__(self, field: str, size: int, limit: int) -> None:
        self.field, self.size, self.limit = field, size, limit
        self.faults = (Fault(field, f"{size} bytes or more, over the limit of {limit} bytes"),)
        super().__init__(f"{field}: {size} bytes, over the limit of {limit} bytes")

    def within(self, field: str) -> "PayloadTooLarge":
        """The same of a request that stands in that field of a message."""
        place = field if self.field == "request" else f"{field}.{self.field}"
        return PayloadTooLarge(place, self.size, self.limit)


class NotFound(OraculoError):
    pass


class Conflict(OraculoError):
    pass


class IdempotencyKeyReused(Conflict):
    pass


class TooManyNewQueues(OraculoError):
    """`wait`: seconds after which there is room for those that were asked for."""

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
    """One queue takes nothing now, while the broker works. Worth a retry, and no reason to leave the broker."""


class QueueFull(QueueUnavailable):
    """A queue has no room, by a limit of its owner's: another broker is no way round it."""


class QueueDown(QueueUnavailable):
    """A queue does not work, while its broker does: another broker may take its messages."""


class MessageTooLarge(BrokerError):
    """`limit`: None where the broker does not tell it; then nobody knows the `excess`."""

    def __init__(self, told: str, size: int, limit: int | None) -> None:
        self.excess = None if limit is None else size - limit
        super().__init__(f"{told}; raise that limit or, if it is a command, lower ORACULO_LIMITS_PAYLOAD_BYTES")


class StoreError(OraculoError):
    pass


class WrittenByNewer(StoreError):
    """`told`: what the store has, as it stands there. It is not waited for as a store that is away is: one run has it,
    and holds up no other."""

    def __init__(self, told: str) -> None:
        super().__init__(f"the store has {told}, as a newer ORÁCULO writes it: run that version")


class StoreUnavailable(StoreError):
    pass


class StoreRefuses(StoreUnavailable):
    """It answered that it cannot, for a reason of its own or its owner's (a full disk, a right that is missing), never
    for what was asked of it: to ask for less, or for something else, helps nobody."""


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
