"""Large results in a worker: it reads references in commands, and writes its own large answers as references.

Both need the engine and the worker to name the same object store.
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
REST = 5.0  # seconds without a further try after a failure
_FIELD = "oraculo_referencia"
_MARK = _FIELD.encode()

_log = WorkerLog()
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def may_refer(payload: bytes | msgspec.Raw) -> bool:
    """Return whether a payload may hold references, by a quick look. `find` is faster than `in` on bytes."""
    return bytes(payload).find(_MARK) >= 0


class LargeAnswers:
    def __init__(self, objects: Objects | None, threshold: int) -> None:
        self._objects = objects
        self.threshold = threshold if objects is not None and threshold else sys.maxsize
        self._rests_until = 0.0

    async def resolved(self, command: Message) -> bytes | msgspec.Raw:
        """Return the command's payload with results in the place of references. Raises ObjectsError."""
        try:
            payload = _object.decode(command.payload)
            results = _object.decode(payload.get("resultados", b"{}"))
        except msgspec.DecodeError:  # a payload of another shape has no results of steps
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
            reason = f"the result of '{name}' cannot be read; is ORACULO_OBJECTS_URL the orchestrator's? {error}"
            raise ObjectsUnavailable(reason) from error

    async def shortened(self, body: bytes) -> bytes:
        """Return the answer with a reference for a large payload, or unchanged when it could not be put aside."""
        if self._objects is None or _now() < self._rests_until:
            return body
        answer = decode_message(body)
        payload = bytes(answer.payload)
        # The engine reads failures, and the names in an answer without `tarefa`.
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
    """Return an aggregate with results in the place of references. An unreadable one stays a reference."""
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
