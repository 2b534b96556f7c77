"""The routes of queues and their dead letters."""

import base64
import codecs
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from oraculo.api.bodies import read_body
from oraculo.api.context import Door, NotForWebhooks, Shared
from oraculo.api.openapi import json_body, problems, reply
from oraculo.api.parameters import Cursor, ExactQuery, LetterId, NoQuery, Queue, when_empty
from oraculo.api.paths import DEAD_LETTERS, QUEUES
from oraculo.api.replies import json_reply, page_of
from oraculo.engine.operations import Operations
from oraculo.errors import Fault, InvalidJson, InvalidRequest, NotFound
from oraculo.ports.broker import BrokerStatus
from oraculo.ports.broker_admin import DeadLetter, NotAnId, QueueState
from oraculo.wire import naming
from oraculo.wire.json_guard import HANDED_ON_DEPTH, UNREADABLE, is_too_deep, json_fault
from oraculo.wire.message import correlation_id_at_start, fault_of, with_nearest
from oraculo.wire.timestamps import to_iso

router = APIRouter(tags=["filas"], default_response_class=Response)

_PAGE = 100


@router.get(
    QUEUES,
    summary="Depth and consumers of each queue",
    dependencies=[NoQuery],
    responses={200: reply("The queues.", "Filas"), **problems(502)},
)
async def list_queues(operations: Door) -> Response:
    states = sorted(await operations.queues(), key=operations.queue_name)
    queues = [_queue_view(operations.queue_name(state), state) for state in states]
    return json_reply({"filas": queues, "brokers": [_broker_view(broker) for broker in operations.brokers()]})


def _broker_view(broker: BrokerStatus) -> dict[str, Any]:
    return {"nome": broker.name, "ok": broker.trouble is None, "problema": broker.trouble, "filas_surdas": broker.deaf}


def _queue_view(name: str, state: QueueState) -> dict[str, Any]:
    return {
        "fila": name,
        "mensagens": state.ready,
        "em_processamento": state.unacked,
        "consumidores": state.consumers,
        "dlq": state.dead_letters,
    }


class _LettersQuery(ExactQuery):
    limit: Annotated[int, Field(ge=1, le=500), when_empty(_PAGE)] = _PAGE
    cursor: Cursor = None


@router.get(
    DEAD_LETTERS,
    summary="Dead letters with their reasons, oldest first",
    description="A page has `limit` of them, or fewer that have 8 MiB; `cursor` goes on. A body over 1 MiB is cut.",
    responses={200: reply("A page of them.", "CartasMortas"), **problems(404, 502)},
)
async def list_dead_letters(operations: Door, fila: Queue, asked: Annotated[_LettersQuery, Query()]) -> Response:
    _expect_name(fila)
    letters = await _letters(operations, fila, asked.limit + 1, asked.cursor)
    page = page_of(_letter_view(letter) for letter in letters[: asked.limit])
    following = letters[len(page) - 1].id if len(letters) > len(page) else None
    return json_reply({"fila": fila, "mensagens": page, "cursor": following})


async def _letters(operations: Operations, queue: str, limit: int, cursor: str | None) -> Sequence[DeadLetter]:
    try:
        return await operations.dead_letters(queue, limit=limit, after=cursor)
    except NotAnId:  # each broker has ids of its own form
        raise InvalidRequest(Fault("cursor", "must be the `cursor` of a page before")) from None


def _expect_name(queue: str) -> None:
    """Raise NotFound for a name that no queue can have."""
    if not naming.is_name(queue):
        raise NotFound(f"there is no queue {naming.shown(queue)}")


class _Envelope(msgspec.Struct):
    correlation_id: Any = None
    tarefa: Any = None


_any_decoder = msgspec.json.Decoder()
_utf8_decoder = codecs.getincrementaldecoder("utf-8")
_envelope_decoder = msgspec.json.Decoder(_Envelope)


def _letter_view(letter: DeadLetter) -> dict[str, Any]:
    is_json = letter.cut_from is None and _is_json(letter.body)
    envelope = _envelope(letter)
    return {
        "id": letter.id,
        "motivo": letter.reason,
        "timestamp": _moment(letter.at),
        "entregas": letter.redeliveries + 1,
        "correlation_id": envelope.correlation_id if isinstance(envelope.correlation_id, str) else None,
        "tarefa": envelope.tarefa if isinstance(envelope.tarefa, str) else None,
        "corpo": msgspec.Raw(letter.body) if is_json else None,
        "corpo_texto": None if is_json else _text(letter),
        "corpo_bytes": len(letter.body) if letter.cut_from is None else letter.cut_from,
        "corpo_cortado": letter.cut_from is not None,
    }


def _moment(at: float) -> str | None:
    """Return the moment; None when it is unknown or impossible, as where a client wrote milliseconds for seconds."""
    try:
        return to_iso(at) if at > 0 else None
    except (ValueError, OverflowError):
        return None


def _is_json(body: bytes) -> bool:
    """Return whether the body is JSON that readers of the page can decode."""
    if is_too_deep(body, HANDED_ON_DEPTH):
        return False
    try:
        _any_decoder.decode(body)
    except UNREADABLE:
        return False
    return True


def _envelope(letter: DeadLetter) -> _Envelope:
    if letter.cut_from is not None:
        return _Envelope(correlation_id_at_start(letter.body))
    try:
        return _envelope_decoder.decode(letter.body)
    except UNREADABLE:
        return _Envelope()


def _text(letter: DeadLetter) -> str:
    try:
        return _utf8_decoder().decode(
            letter.body, final=letter.cut_from is None
        )  # a cut body may end inside a character
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(letter.body).decode()


class _RedriveRequest(msgspec.Struct, forbid_unknown_fields=True):
    ids: list[str] | None = None


_redrive_decoder = msgspec.json.Decoder(_RedriveRequest)


@router.post(
    DEAD_LETTERS + "/reenviar",
    summary="Try dead letters again, all or by id",
    description="The command of a failed subtask reopens its run. When an id is unknown, nothing is moved. "
    "A call with the header `webhook-id`, which every webhook has, is refused with `409`.",
    dependencies=[NotForWebhooks, NoQuery],
    responses={200: reply("How many.", "Reenvio"), **problems(400, 404, 408, 409, 413, 502)},
    openapi_extra=json_body("ReenvioPedido", required=False, example={"ids": ["1"]}),
)
async def redrive(request: Request, shared: Shared, fila: Queue) -> Response:
    body = await read_body(request, shared.settings.limits.payload_bytes, shared.room)
    _expect_name(fila)
    done = await shared.operations.redrive(fila, _ids(body))
    return json_reply({"reenviadas": done.moved, "reabertas": done.reopened, "obsoletas": done.obsolete})


def _ids(body: bytes) -> list[str] | None:
    if not body.strip():
        return None
    try:
        return _redrive_decoder.decode(body).ids
    except msgspec.ValidationError as error:
        raise InvalidRequest(with_nearest(fault_of(error), _RedriveRequest.__struct_fields__)) from None
    except UNREADABLE as error:
        raise InvalidJson(json_fault(body, error)) from None


@router.delete(
    DEAD_LETTERS + "/{letter_id:segment}",
    summary="Discard a dead letter",
    dependencies=[NoQuery],
    status_code=204,
    responses={204: reply("Discarded."), **problems(404, 502)},
)
async def discard(operations: Door, fila: Queue, letter_id: LetterId) -> Response:
    _expect_name(fila)
    await operations.discard(fila, letter_id)
    return Response(status_code=204)
