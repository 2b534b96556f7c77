"""`oraculo submit`: the start of a run, and the wait for its end."""

import hashlib
import sys
import time
import uuid
from contextlib import nullcontext
from typing import Annotated, Any

import msgspec
import typer

from oraculo.cli import output
from oraculo.cli.client import Refused, ServerClient, Unreachable, header, run_path
from oraculo.cli.interrupts import goes_on, watch_command
from oraculo.cli.json_objects import read_object, read_payload
from oraculo.cli.options import DEFAULT_URL, ApiKey, AsJson, Url
from oraculo.cli.run_table import print_aggregate
from oraculo.cli.watch import live_table
from oraculo.errors import Fault, InvalidRequest, OraculoError

_PATH = "/orquestracoes"
_PAUSE = 0.5
_PATIENCE = 30.0  # seconds for a server that went away before it named the run
_YEAR = 31_536_000  # seconds
_DESTINATION = '{"fila": "escavador_youtube"}'


def submit(
    context: typer.Context,
    destino: Annotated[
        list[str] | None,
        typer.Option(help='A destination: a queue, or {"id", "fila", "payload", "timeout"} as JSON. Repeatable.'),
    ] = None,
    tipo: Annotated[str | None, typer.Option(help="The route to run, as coleta_completa.")] = None,
    pipeline: Annotated[str | None, typer.Option(help="The pipeline to run, as promotional-video-full.")] = None,
    payload: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE|-", help="A JSON object: as text, from a file, or from stdin.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(max=_YEAR, help="Seconds for the whole run.")] = None,
    wait: Annotated[float, typer.Option(min=0, max=_YEAR, help="Seconds to wait for the run's end.")] = 0,
    correlation_id: Annotated[str | None, typer.Option(help="The run's id; one is made unless given.")] = None,
    webhook: Annotated[str | None, typer.Option(help="URL that gets the aggregate.")] = None,
    responder_em: Annotated[str | None, typer.Option(help="Queue that gets the aggregate.")] = None,
    prioridade: Annotated[
        int | None,
        typer.Option(min=0, max=9, help="Priority; the higher goes first."),
    ] = None,
    quorum: Annotated[str | None, typer.Option(help='Successes that end the run: 2, "60%" or all.')] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key and request give the same run.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Start a run of a pipeline, a route or a list of destinations.

    Give --destino, --tipo or --pipeline. With --wait the exit status is 0 when the run succeeded (concluida), else 1.
    """
    _expect_one_subject(destino=destino, tipo=tipo, pipeline=pipeline)
    request = {
        "destinos": [_destination(text) for text in destino] if destino else None,
        "tipo": tipo,
        "pipeline": pipeline,
        "payload": None if payload is None else read_payload(payload),
        "timeout": timeout,
        "correlation_id": correlation_id,
        "webhook": webhook,
        "responder_em": responder_em,
        "prioridade": prioridade,
        # The server refuses any other text, in its own words.
        "quorum": int(quorum) if quorum is not None and quorum.isdecimal() else quorum,
    }
    body = msgspec.json.encode({key: value for key, value in request.items() if value is not None})
    key = _own_key(body, correlation_id) if idempotency_key is None else idempotency_key
    with ServerClient(url, api_key) as server:
        headers = {"Idempotency-Key": header("--idempotency-key", key)}
        deadline = time.monotonic() + wait
        status, answer = _start(server, body, headers, deadline)
        run_id = answer["correlation_id"]
        if wait and status != 200:
            _print_started(answer, as_json)
            is_drawn = sys.stdout.isatty() and not as_json
            with goes_on(run_id, context), live_table(server, run_id) if is_drawn else nullcontext():
                status, answer = _wait_for_end(server, body, headers, deadline, answer)
        has_ended = status == 200 and "resumo" in answer
        if has_ended or as_json or not wait:
            _show(answer, has_ended, as_json)
        if wait and not has_ended:
            output.note(f"run {run_id} has not ended in {wait:g} s; it goes on")
        if not (has_ended or as_json):
            output.note(f"follow it with: {watch_command(run_id, context)}")
        if wait:
            raise typer.Exit(output.exit_status(answer["status"]) if has_ended else output.NOT_SUCCEEDED)


def _expect_one_subject(**subjects: object) -> None:
    given = [f"--{name}" for name, value in subjects.items() if value]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise InvalidRequest(Fault("", f"give exactly one of --destino, --tipo and --pipeline; got {got}"))


def _destination(text: str) -> object:
    return read_object("--destino", text.encode(), _DESTINATION) if text.lstrip().startswith("{") else text


def _wait_for_end(
    server: ServerClient, body: bytes, headers: dict[str, str], deadline: float, answer: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Ask again under the same key until the run ends or the time is up.

    A server waits only up to its own limit, and not while it stops.
    """
    status, has_asked = 202, False
    trouble: OraculoError | None = None
    while status != 200 and (left := deadline - time.monotonic()) > 0:
        asked_at = time.monotonic()
        try:
            if has_asked:  # a server that lost its runs must not start another
                server.get(run_path(answer["correlation_id"]))
            has_asked = True
            headers["Prefer"] = f"wait={left:.0f}" if left >= 1 else "wait=1"
            status, answer = server.post_waiting(_PATH, body, headers, left)
            trouble = None
        except (Unreachable, Refused) as error:
            trouble = _passing(error)
        if status != 200:
            _pause(asked_at, deadline)
    if trouble is not None:
        output.note(str(trouble))
    return status, answer


def _start(server: ServerClient, body: bytes, headers: dict[str, str], deadline: float) -> tuple[int, Any]:
    """Start the run. Ask again only if the connection broke: the server may have taken the run."""
    deadline = min(deadline, time.monotonic() + _PATIENCE)
    may_be_taken = False
    while True:
        asked_at = time.monotonic()
        try:
            return server.post_waiting(_PATH, body, headers, 0)
        except (Unreachable, Refused) as error:
            may_be_taken |= isinstance(error, Unreachable) and error.was_reached
            if not may_be_taken or time.monotonic() >= deadline:
                raise
            _passing(error)
        _pause(asked_at, deadline)


def _passing(error: Unreachable | Refused) -> OraculoError:
    """Return an error that a restart of the server explains. Raises any other."""
    if isinstance(error, Refused) and error.status < 500:
        raise error
    return error


def _pause(asked_at: float, deadline: float) -> None:
    """Pause, so that a server which answers at once is not asked in a tight loop."""
    now = time.monotonic()
    if now - asked_at < _PAUSE:
        time.sleep(max(0.0, min(_PAUSE, deadline - now)))


def _own_key(body: bytes, run_id: str | None) -> str:
    """Return a key for another try after a lost answer. With a `run_id` the same command gives the same key."""
    return str(uuid.uuid4()) if run_id is None else hashlib.sha256(body).hexdigest()


def _print_started(answer: dict[str, Any], as_json: bool) -> None:
    """Print the run's id before the wait, which may be interrupted."""
    line = f"run {answer['correlation_id']} {answer['status']}"
    if as_json:
        output.note(line)
        return
    output.print_line(line)
    sys.stdout.flush()


def _show(answer: dict[str, Any], has_ended: bool, as_json: bool) -> None:
    if as_json:
        output.print_json(answer)
    elif has_ended:
        print_aggregate(answer)
    else:
        output.print_line(f"run {answer['correlation_id']} {answer['status']}")
