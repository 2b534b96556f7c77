"""`oraculo check-worker`: conformance cases for a running worker in any language."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from oraculo.cli import output
from oraculo.cli.json_objects import read_payload
from oraculo.cli.options import AsJson
from oraculo.cli.shared_broker import expect_shared_broker
from oraculo.cli.table import Column, print_table
from oraculo.errors import BrokerError, Fault, InvalidInput

if TYPE_CHECKING:
    from oraculo.ports.broker_admin import FullBroker
    from oraculo.settings import Settings
    from oraculo.testing.worker_cases import CaseReport, WorkerCheck

Queue = Annotated[str, typer.Option(metavar="NAME", help="The worker's queue, without the prefix.")]
Timeout = Annotated[float, typer.Option(min=0.1, max=3600, help="Longest wait for an answer, in seconds.")]
Payload = Annotated[
    str | None,
    typer.Option(
        metavar="JSON|@FILE|-",
        help="Payload of a normal command: as text, from a file, or from stdin. Unless given: {}, with fonte and "
        "parametros for an escavador.",
    ),
]


def check_worker(queue: Queue, timeout: Timeout = 10.0, payload: Payload = None, as_json: AsJson = False) -> None:
    """Play conformance cases against a running worker, in any language, over ORACULO_BROKER_URL.

    The cases send it commands and garbage. Use an ORACULO_PREFIX of its own, or stop the engines: they
    would take the answers of a worker that ignores `responder_em`. Exit status 1 when a case failed.
    """
    from oraculo.settings import load_settings
    from oraculo.telemetry.logs import configure_logging

    settings = load_settings()
    wanted = _checked(settings, queue, payload)
    configure_logging(settings.log)
    check, report = asyncio.run(_play(settings, queue, timeout, wanted))
    if as_json:
        output.print_json(_document(settings, queue, check, report))
    else:
        print_report(queue, report)
    raise typer.Exit(output.SUCCEEDED if report.has_passed else output.NOT_SUCCEEDED)


def print_report(queue: str, report: "CaseReport") -> None:
    """Print each case that was played, and the totals. Print one line when no worker answered."""
    for warning in report.warnings:
        output.note(f"oraculo: {warning}")
    words = [output.state_word(verdict.state) for verdict in report.verdicts]
    if words[0] == "error" and set(words[1:]) == {"skipped"}:
        output.complain(f"{queue}: {report.verdicts[0].detail}")
        return
    rows = [
        (verdict.name, word, verdict.detail)
        for verdict, word in zip(report.verdicts, words, strict=True)
        if word != "skipped"
    ]
    print_table((Column("case"), Column("state"), Column("detail", prose=True)), rows, empty="no cases")
    counts = [f"{words.count('ok')} ok", *_counts(words)]
    output.print_line(f"{queue}: {', '.join(counts)}, of {output.counted(len(words), 'case')}")


def _counts(words: list[str]) -> list[str]:
    counted = [output.counted(number, noun) for noun in ("warning", "error") if (number := words.count(noun))]
    return [*counted, f"{skipped} skipped (no worker was left)"] if (skipped := words.count("skipped")) else counted


def _checked(settings: "Settings", queue: str, payload: str | None) -> dict[str, msgspec.Raw] | None:
    """Return the payload that was given. Raises InvalidInput and InvalidSettings."""
    from oraculo.wire.naming import queue_fault

    if fault := queue_fault(queue):
        raise InvalidInput(Fault("--queue", fault))
    expect_shared_broker(settings)
    # The values stay raw: one may be a number that Python cannot hold.
    return None if payload is None else msgspec.json.decode(read_payload(payload), type=dict[str, msgspec.Raw])


async def _play(
    settings: "Settings", queue: str, timeout: float, payload: dict[str, msgspec.Raw] | None
) -> "tuple[WorkerCheck, CaseReport]":
    from oraculo.bootstrap import make_broker
    from oraculo.ports.clock import SystemClock, SystemEntropy
    from oraculo.ports.telemetry import Silent
    from oraculo.testing.worker_cases import WorkerCheck
    from oraculo.wire.naming import QueueNames

    clock = SystemClock()
    broker = make_broker(settings, clock, Silent())
    names = QueueNames(settings.broker.prefix)
    check = WorkerCheck(broker, names, queue, clock=clock, entropy=SystemEntropy(), timeout=timeout, payload=payload)
    try:
        await _reach(broker)
        return check, await check.play()
    finally:
        await broker.close()


async def _reach(broker: "FullBroker") -> None:
    try:
        await broker.start()
        await broker.check()
    except BrokerError as error:
        raise BrokerError(f"{error}; start the broker, or mend ORACULO_BROKER_URL") from None


def _document(settings: "Settings", queue: str, check: "WorkerCheck", report: "CaseReport") -> dict[str, Any]:
    return {
        "fila": queue,
        "prefixo": settings.broker.prefix,
        "responder_em": check.reply_queue,
        "passou": report.has_passed,
        "avisos": list(report.warnings),
        "casos": msgspec.to_builtins(report.verdicts),
    }
