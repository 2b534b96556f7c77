"""Finds every fault of type in a JSON object, where msgspec's decoder stops at the first one."""

import re
from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from oraculo.errors import Fault
from oraculo.pipeline.definition import MAX_FAULTS
from oraculo.wire.message import fault_of

_LONG_LIST = 1024 * 1024  # bytes; of a longer list only the first fault is reported
_INSIDE = re.compile(r"[.\[].*", re.DOTALL)

Decode = Callable[[bytes], object]
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def type_faults(body: bytes, decode: Decode, error: msgspec.ValidationError) -> list[Fault]:
    """Return the faults of an object that `decode` refused with `error`: of each field, of each item of a list, and of
    each field of such an item. Raises DecodeError where what stands behind the first fault is no JSON."""
    first = fault_of(error)
    if not first.field:
        return [first]
    found = (fault for name, value in _object_decoder.decode(body).items() for fault in _of_field(name, value, decode))
    return list(islice(found, MAX_FAULTS)) or [first]  # a field that is given twice may be right the second time


def field_of(fault: Fault) -> str:
    """Return the field of the object that has a fault, or holds what has it."""
    return _INSIDE.sub("", fault.field)


def without_fields(body: bytes, names: set[str]) -> bytes:
    fields = _object_decoder.decode(body)
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in names})


def _of_field(name: str, value: msgspec.Raw, decode: Decode) -> Iterator[Fault]:
    whole = _fault_of(name, value, decode)
    if whole is None:
        return
    if not whole.field.startswith(f"{name}[") or len(value) > _LONG_LIST:
        yield whole
        return
    for number, item in enumerate(_list_decoder.decode(value)):
        for part in _parts(item):
            if fault := _fault_of(name, [part], decode):
                yield Fault(fault.field.replace("[0]", f"[{number}]", 1), fault.problem)


def _parts(item: msgspec.Raw) -> Iterator[object]:
    """Yield an object's fields, each as an object of its own, and anything else as it is."""
    if not bytes(item).startswith(b"{"):
        yield item
        return
    for name, value in _object_decoder.decode(item).items():
        yield {name: value}


def _fault_of(name: str, value: object, decode: Decode) -> Fault | None:
    try:
        decode(msgspec.json.encode({name: value}))
    except msgspec.ValidationError as error:
        return fault_of(error)
    return None
