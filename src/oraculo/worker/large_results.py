"""Large results in a worker: those it is given as references are read, those it gives are put aside.

Only where the orchestrator and the worker name the same object store do references reach a worker, and leave one.
"""

import asyncio
import sys
from typing import Any

import msgspec

from oraculo.core.answers import is_failure
from oraculo.core.result_reference import ResultReference, encode_reference, read_reference
from oraculo.errors import ObjectsError, ObjectsUnavailable
from oraculo.ports.objects import Objects, get_result, put_result
from oraculo.wire.json_guard import UNREADABLE
from oraculo.wire.message import Message, decode_message, encode_message
from oraculo.worker.logs import WorkerLog

PATIENCE = 10.0  # seconds to put a result
READ_PATIENCE = 60.0  # seconds to read what a command needs; its own deadline may be sooner
REST = 5.0  # seconds after a failure in which no result is put aside
_FIELD = "oraculo_referencia"
_MARK = _FIELD.encode()

_log = WorkerLog()
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def may_refer(payload: bytes | msgspec.Raw) -> bool:
    """Cheap: most commands need no closer look. So is `find`, where `in` first tries the mark as a number."""
    return bytes(payload).find(_MARK) >= 0


class LargeAnswers:
    def __init__(self, objects: Objects | None, threshold: int) -> None:
        self._objects = objects
        self.threshold = threshold if objects is not None and threshold else sys.maxsize
        self._rests_until = 0.0

    async def resolved(self, command: Message) -> bytes | msgspec.Raw:
        """The command's payload with the results of earlier steps in the place of the references to them. Raises
        ObjectsError, which says what to set."""
        try:
            payload = _object.decode(command.payload)
            results = _object.decode(payload.get("resultados", b"{}"))
        except msgspec.DecodeError:  # of another shape: there are no results of steps in it
            return command.payload
        references = _references(command.correlation_id, results)
        if not references:
            return command.payload
        for name, reference in references.items():
            results[name] = msgspec.Raw(await self._read(name, reference))
        payload["resultados"] = msgspec.Raw(msgspec.json.encode(results))
        return msgspec.json.encode(payload)

    async def _read(self, name: str, reference: ResultReference) -> bytes:
        if self._objects is None:
            raise ObjectsUnavailable(
                f"the result of '{name}' is in an object store that this worker does not know; set ORACULO_OBJECTS_URL "
                "as it is set for the orchestrator"
            )
        try:
            async with asyncio.timeout(READ_PATIENCE):
                return await get_result(self._objects, reference)
        except TimeoutError:
            raise ObjectsUnavailable(f"the result of '{name}' was not read in {READ_PATIENCE:g} s") from None
        except ObjectsError as error:
            told = f"the result of '{name}' cannot be read; is ORACULO_OBJECTS_URL the orchestrator's? {error}"
            raise ObjectsUnavailable(told) from error

    async def shortened(self, body: bytes) -> bytes:
        """The answer with a reference for its payload, when that is large and could be put aside; else as it is."""
        if self._objects is None or _now() < self._rests_until:
            return body
        answer = decode_message(body)
        payload = bytes(answer.payload)
        # A failure is read by the orchestrator; so are the names in an answer that does not echo its task.
        if len(payload) <= self.threshold or answer.tarefa is None or is_failure(payload):
            return body
        try:
            async with asyncio.timeout(PATIENCE):
                reference = await put_result(self._objects, answer.correlation_id, answer.tarefa, payload)
        except (ObjectsError, TimeoutError) as error:
            self._rests_until = _now() + REST
            _log.warning("a large result travels whole", reason=str(error) or f"not put in {PATIENCE:g} s")
            return body
        answer.payload = msgspec.Raw(encode_reference(reference))
        return encode_message(answer)


async def completed(objects: Objects, aggregate: dict[str, Any]) -> dict[str, Any]:
    """An aggregate with what was too much for it to bring along. What cannot be read stays a reference."""
    results = aggregate.get("resultados", {})
    for name, value in results.items():
        if isinstance(value, dict) and _FIELD in value:
            reference = read_reference(aggregate["correlation_id"], msgspec.json.encode(value))
            if reference is not None:
                try:
                    results[name] = msgspec.json.decode(await get_result(objects, reference))
                except (ObjectsError, *UNREADABLE) as error:
                    _log.warning("a large result of an aggregate cannot be read", tarefa=name, reason=str(error))
    return aggregate


def _references(run_id: str, results: dict[str, msgspec.Raw]) -> dict[str, ResultReference]:
    found = {name: read_reference(run_id, bytes(raw)) for name, raw in results.items()}
    return {name: reference for name, reference in found.items() if reference is not None}


def _now() -> float:
    return asyncio.get_running_loop().time()
