"""The oracle of workers: each command is handled once, answered with its outcome, and acked only after that.

It sees what each process took, what its handlers did, what it published, and what the broker confirmed.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import Any

import msgspec

from oraculo.testing.simulation.expected_run import WorkerMessage
from oraculo.testing.simulation.timeline import Timeline

Identity = tuple[str, str, int | None]  # run, task, attempt; None from a worker without the SDK

_EVENTS = {"iniciar_coleta": "resultado_coleta", "iniciar_execucao": "resultado_execucao"}
_SLACK = 0.0011


@dataclass
class _Command:
    """A command that a process took."""

    message: WorkerMessage
    taken_at: float  # the moment when this process first took it
    servers: set[str] = field(default_factory=set)  # brokers that delivered it


@dataclass
class _Process:
    """The events of one life of a process."""

    commands: dict[Identity, _Command] = field(default_factory=dict)
    begun: set[Identity] = field(default_factory=set)
    outcomes: dict[Identity, dict[str, Any]] = field(default_factory=dict)  # the payload that must be answered
    confirmed: set[Identity] = field(default_factory=set)
    last: Identity | None = None  # the command whose outcome came last


class WorkerOracle:
    """The oracle of workers. `life` identifies one life of a process."""

    def __init__(self, timeline: Timeline, report: Callable[[str], None]) -> None:
        self._timeline = timeline
        self._report = report
        self._processes: dict[object, _Process] = {}

    def _of(self, life: object) -> _Process:
        return self._processes.setdefault(life, _Process())

    def took(self, life: object, server: str, body: bytes, moment: float) -> None:
        message = _read(body)
        if message is not None and message.tipo_evento in _EVENTS:
            command = self._of(life).commands.setdefault(_identity(message), _Command(message, moment))
            command.servers.add(server)

    def brought_by(self, life: object, body: bytes) -> Collection[str]:
        """Return the brokers that delivered the command which this message answers; none if it is no answer."""
        message = _read(body)
        if message is None or message.tipo_evento not in _EVENTS.values():
            return ()
        command = self._of(life).commands.get(self._identity_of(life, message))
        return () if command is None else command.servers

    def begins(self, life: object, identity: Identity, moment: float) -> None:
        """Record that a handler gets a command."""
        process = self._of(life)
        command = process.commands.get(identity)
        if command is None or self._timeline.time(moment) >= _deadline(command) + _SLACK:
            self._report(f"the command {identity} was begun after its deadline, or never came")
        if identity in process.begun:
            self._report(f"the command {identity} came again and was worked on again by the same worker")
        process.begun.add(identity)

    def ends(self, life: object, identity: Identity, payload: dict[str, Any]) -> None:
        """Record that a handler returned or raised, which makes this payload the right answer."""
        process = self._of(life)
        process.outcomes[identity], process.last = payload, identity

    def publishes(self, life: object, queue: str, body: bytes, moment: float) -> None:
        message = _read(body)
        if message is None:
            self._report(f"a worker published what is no message: {body!r}")
            return
        identity = self._identity_of(life, message)
        command = self._of(life).commands.get(identity)
        if command is None:
            self._report(f"a worker published {message.tipo_evento} of {identity}, a command that it never had")
        elif queue != (command.message.responder_em or "resultados"):
            self._report(f"an answer of {identity} went to {queue}, and is awaited on {command.message.responder_em}")
        elif message.tipo_evento != "progresso":
            fault = self._answer_fault(self._of(life), identity, command, message, moment)
            if fault is not None:
                self._report(f"the answer of {identity} {fault}")

    def confirmed(self, life: object, body: bytes) -> None:
        """Record that the broker confirmed a message."""
        message = _read(body)
        if message is not None and message.tipo_evento in _EVENTS.values():
            self._of(life).confirmed.add(self._identity_of(life, message))

    def acked(self, life: object, body: bytes) -> None:
        message = _read(body)
        if message is None or message.tipo_evento not in _EVENTS:
            self._report(f"a worker acked what is no command: {body!r}")
        elif _identity(message) not in self._of(life).confirmed:
            self._report(f"the command {_identity(message)} was acked, and no broker has confirmed its answer")

    def _answer_fault(
        self, process: _Process, identity: Identity, command: _Command, message: WorkerMessage, moment: float
    ) -> str | None:
        event = _EVENTS[command.message.tipo_evento]
        if message.tipo_evento != event:
            return f"is {message.tipo_evento}, and must be {event}"
        payload, outcome = msgspec.json.decode(message.payload), process.outcomes.get(identity)
        if payload == outcome or (outcome is not None and _is_failure_with(payload, outcome)):
            return None
        if self._is_too_late(command, moment) and payload.get("erros", [""])[0].startswith("deadline passed"):
            return None
        return f"says {payload}, and its handler made it {outcome}"

    def _is_too_late(self, command: _Command, moment: float) -> bool:
        """Return True when the deadline had passed by any setting of the clock since the command was taken."""
        return self._timeline.latest_time(command.taken_at, moment) >= _deadline(command) - _SLACK

    def _identity_of(self, life: object, message: WorkerMessage) -> Identity:
        """Return the identity that a message answers.

        A worker without the SDK handles one command at a time, without attempt.
        """
        last = self._of(life).last
        return _identity(message) if message.tarefa is not None or last is None else last


def _deadline(command: _Command) -> float:
    return inf if command.message.prazo is None else datetime.fromisoformat(command.message.prazo).timestamp()


def _is_failure_with(payload: dict[str, Any], outcome: dict[str, Any]) -> bool:
    """Return True for the same failure. The payload may say more."""
    said = {key: payload.get(key) for key in ("status", "erros", "repetir")}
    return outcome["status"] == "erro" and said == {"repetir": None} | outcome


def _read(body: bytes) -> WorkerMessage | None:
    try:
        return msgspec.json.decode(body, type=WorkerMessage)
    except msgspec.DecodeError:
        return None


def _identity(message: WorkerMessage) -> Identity:
    return message.correlation_id, message.tarefa or "", message.tentativa
