"""Every fault of one request: all faults of type in its JSON, and the refusals of several checks as one error."""

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import ParamSpec, TypeVar

import msgspec

from oraculo.errors import Fault, InvalidInput, InvalidRequest, PayloadTooLarge, UnknownPipeline
from oraculo.pipeline.definition import MAX_FAULTS
from oraculo.wire.message import fault_of

P = ParamSpec("P")
T = TypeVar("T")
Refusal = InvalidInput | PayloadTooLarge
Decode = Callable[[bytes], object]

_LONG_LIST = 1024 * 1024  # bytes; only the first fault of a longer list is reported
_INSIDE = re.compile(r"[.\[].*", re.DOTALL)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


class Refusals:
    """The refusals of one request. A single one is raised as it is, several as one InvalidRequest."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        """Begin with faults that were found before, in another place of the request."""
        self._found: list[Refusal] = [InvalidRequest(faults)] if faults else []

    def add(self, refusal: Refusal) -> None:
        self._found.append(refusal)

    def check(self, check: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """Return what a check returns, or None when it refuses."""
        try:
            return check(*args, **named)
        except (InvalidInput, PayloadTooLarge) as refusal:
            self.add(refusal)
            return None

    def raise_any(self) -> None:
        """Raise what was found. An unknown pipeline keeps its type, because another process may store that pipeline."""
        if not self._found:
            return
        if len(self._found) == 1:
            raise self._found[0]
        faults = [fault for refusal in self._found for fault in refusal.faults][:MAX_FAULTS]
        if any(isinstance(refusal, UnknownPipeline) for refusal in self._found):
            raise UnknownPipeline(faults)
        raise InvalidRequest(faults)


async def refuse_with(faults: Sequence[Fault], check: Awaitable[object]) -> None:
    """Raise InvalidRequest with these faults and those that a check of the same request raises."""
    refusals = Refusals(faults)
    try:
        await check
    except (InvalidInput, PayloadTooLarge) as refusal:
        refusals.add(refusal)
    refusals.raise_any()


def type_faults(body: bytes, decode: Decode, error: msgspec.ValidationError) -> list[Fault]:
    """Return every fault of type in an object that `decode` refused with `error`, its first fault.

    Looks into each field, each item of a list and each field of such an item. Raises DecodeError when the text behind
    the first fault is not JSON.
    """
    first = fault_of(error)
    if not first.field:
        return [first]
    fields = _object_decoder.decode(body).items()
    found = (fault for name, value in fields for fault in _faults_in_field(name, value, decode))
    return list(islice(found, MAX_FAULTS)) or [first]  # of a field that is given twice, the second may be right


def field_of(fault: Fault) -> str:
    """Return the name of the top-level field in which a fault is."""
    return _INSIDE.sub("", fault.field)


def without_fields(body: bytes, names: set[str]) -> bytes:
    fields = _object_decoder.decode(body)
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in names})


def _faults_in_field(name: str, value: msgspec.Raw, decode: Decode) -> Iterator[Fault]:
    whole = _first_fault(name, value, decode)
    if whole is None:
        return
    if not whole.field.startswith(f"{name}[") or len(value) > _LONG_LIST:
        yield whole
        return
    for number, item in enumerate(_list_decoder.decode(value)):
        for part in _parts(item):
            if fault := _first_fault(name, [part], decode):
                yield Fault(fault.field.replace("[0]", f"[{number}]", 1), fault.problem)


def _parts(item: msgspec.Raw) -> Iterator[object]:
    """Yield each field of an object as an object of its own, and anything else unchanged."""
    if not bytes(item).startswith(b"{"):
        yield item
        return
    for name, value in _object_decoder.decode(item).items():
        yield {name: value}


def _first_fault(name: str, value: object, decode: Decode) -> Fault | None:
    try:
        decode(msgspec.json.encode({name: value}))
    except msgspec.ValidationError as error:
        return fault_of(error)
    return None
