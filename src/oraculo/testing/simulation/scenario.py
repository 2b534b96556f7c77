"""The requests and circumstances of one simulation, all decided before it begins, so that it can be shortened."""

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

QUEUES = ("escavador_a", "escavador_b", "executador_c", "executador_d")
PLAIN_QUEUE = "executador_plano"  # served by a worker without the SDK
DEAF_QUEUE = "escavador_ninguem"  # served by nobody
LASTS = 30.0  # seconds with requests


class Action(msgspec.Struct, frozen=True):
    """One act of a client or operator. `subject` is the number of an earlier request."""

    at: float
    kind: str  # submit, enqueue, cancel, repeat, redrive, discard, garbage
    body: bytes = b""
    key: str | None = None
    subject: int = 0
    queue: str = ""

    def __str__(self) -> str:
        about = {
            "submit": f"{self.body.decode(errors='replace')} key={self.key}",
            "enqueue": self.body.decode(errors="replace"),
            "garbage": f"{self.body!r} on {self.queue}",
            "redrive": self.queue,
            "discard": self.queue,
        }
        return f"{self.at:7.2f} s  {self.kind} {about.get(self.kind, f'of request {self.subject}')}"


class StandIn(msgspec.Struct, frozen=True):
    """The behaviour of a step's worker: its mean time in seconds, and its rate of failures."""

    latency: float
    failure_rate: float


class Scenario(msgspec.Struct, frozen=True):
    """The requests of one simulation, and its circumstances."""

    pipelines: dict[str, dict[str, Any]]
    actions: tuple[Action, ...]
    queues: tuple[str, ...] = QUEUES  # served by workers with the SDK
    lasts: float = LASTS  # seconds with faults
    longest: float = 40.0  # the longest deadline of a request
    stand_ins: dict[str, StandIn] = {}  # by step; `failure_rate` and `latency` are for the others
    engines: int = 1
    workers: int = 2
    places: int = 16  # commands in work at once in a worker with the SDK
    brokers: int = 1  # with several, processes use any that works
    durable: bool = True  # the broker survives the death of an engine
    drops_repeats: bool = False  # the brokers drop repeated commands
    failure_rate: float = 0.15
    final_rate: float = 0.0  # share of failures that ask for no further attempt
    latency: float = 0.5

    def stand_in(self, step: str | None) -> StandIn:
        return self.stand_ins.get(step or "") or StandIn(self.latency, self.failure_rate)


def random_scenario(dice: random.Random) -> Scenario:
    pipelines = {f"p{number}": _pipeline(dice, f"p{number}") for number in range(dice.randint(1, 2))}
    asked = [_request(dice, number, tuple(pipelines)) for number in range(dice.randint(2, 6))]
    actions = [action for number, body in enumerate(asked) for action in _asking(dice, number, body)]
    actions += [_operator(dice, len(asked)) for _ in range(dice.randint(0, 5))]
    scenario = Scenario(
        pipelines,
        tuple(sorted(actions, key=lambda action: action.at)),
        engines=dice.choice((1, 1, 2, 3)),
        workers=dice.randint(1, 3),
        durable=dice.random() < 0.8,
        failure_rate=dice.choice((0.0, 0.15, 0.4)),
        latency=dice.choice((0.05, 0.5, 3.0)),
    )
    if not scenario.durable:  # a broker inside an engine is the only one
        return scenario
    brokers, drops_repeats = dice.choice((1, 1, 2, 3)), dice.random() < 0.3
    return msgspec.structs.replace(scenario, brokers=brokers, drops_repeats=drops_repeats)


def full_scenario(seed: int, additions: int | None = None) -> Scenario:
    """Return the scenario of a seed, with additions for more of the contract.

    Each addition has dice of its own. So with fewer additions, an old seed is still the same story.
    """
    scenario = random_scenario(random.Random(f"scenario {seed}"))
    for name, add in list(_ADDITIONS.items())[:additions]:
        scenario = add(scenario, random.Random(f"{name} {seed}"))
    return scenario


def _with_richer(scenario: Scenario, change: Callable[[dict[str, Any]], None]) -> list[Action]:
    """Return the actions with each request changed. Repeated requests change alike."""
    bodies: dict[bytes, bytes] = {}
    actions = []
    for action in scenario.actions:
        if action.kind in ("submit", "enqueue"):
            if action.body not in bodies:
                body = json.loads(action.body)
                change(body if action.kind == "submit" else body["payload"])
                bodies[action.body] = json.dumps(body).encode()
            action = msgspec.structs.replace(action, body=bodies[action.body])
        actions.append(action)
    return actions


def _with_more(scenario: Scenario, dice: random.Random) -> Scenario:
    pipelines = {name: _richer_pipeline(dice, source) for name, source in scenario.pipelines.items()}
    actions = _with_richer(scenario, partial(_enrich, dice))
    if (keyed := [one for one in actions if one.key]) and dice.random() < 0.3:
        actions.append(_key_used_again(dice, dice.choice(keyed)))
    return msgspec.structs.replace(
        scenario,
        pipelines=pipelines,
        actions=tuple(sorted(actions, key=lambda one: one.at)),
        final_rate=dice.choice((0.0, 0.2, 0.5)),
    )


def _richer_pipeline(dice: random.Random, source: dict[str, Any]) -> dict[str, Any]:
    steps = [step | ({"config": {"n": dice.randrange(9)}} if dice.random() < 0.5 else {}) for step in source["steps"]]
    richer = source | {"steps": steps}
    if dice.random() < 0.25:
        richer["quorum"] = dice.choice((dice.randint(1, len(steps)), "50%", "34%"))
    return richer | ({"onLate": "amend"} if dice.random() < 0.4 else {})


def _enrich(dice: random.Random, request: dict[str, Any]) -> None:
    request["payload"]["parametros"] = {"lingua": dice.choice(("pt", "en"))}
    if dice.random() < 0.4:
        request["prioridade"] = dice.randint(0, 9)
    for destination in request.get("destinos", ()):
        destination |= {"payload": {"own": dice.randrange(9)}} if dice.random() < 0.2 else {}
        destination |= {"timeout": dice.choice((3, 8))} if dice.random() < 0.15 else {}
    if "destinos" in request and dice.random() < 0.2:
        request["quorum"] = dice.choice((dice.randint(1, len(request["destinos"])), "34%", "60%"))


def _key_used_again(dice: random.Random, first: Action) -> Action:
    """Return another request that uses the first one's key by mistake."""
    other = json.loads(first.body)
    other |= {"correlation_id": f"{other['correlation_id']}-other", "payload": {"other": True}}
    return msgspec.structs.replace(first, at=first.at + dice.uniform(0, 5), body=json.dumps(other).encode())


def _with_overrides(scenario: Scenario, dice: random.Random) -> Scenario:
    """Set some values twice, differently: in request and pipeline, or in payload and step config."""
    pipelines = {name: _overriding_pipeline(dice, source) for name, source in scenario.pipelines.items()}
    actions = _with_richer(scenario, partial(_override, dice))
    return msgspec.structs.replace(scenario, pipelines=pipelines, actions=tuple(actions))


def _overriding_pipeline(dice: random.Random, source: dict[str, Any]) -> dict[str, Any]:
    steps = [dict(step) for step in source["steps"]]
    for step in steps:
        if dice.random() < 0.4:
            step["config"] = step.get("config", {}) | {"lingua": "es"}
    if dice.random() < 0.4:
        fragile = dice.choice(steps)
        fragile |= {"optional": True, "retry": {"maxAttempts": 1}}
    return source | {"steps": steps}


def _override(dice: random.Random, request: dict[str, Any]) -> None:
    if "pipeline" in request and dice.random() < 0.3:
        request["timeout"] = dice.choice((4, 9, 25))


def _with_few_places(scenario: Scenario, dice: random.Random) -> Scenario:
    """Give workers few places, so that commands wait for them, sometimes until the deadline."""
    return msgspec.structs.replace(scenario, places=dice.choice((1, 1, 2, scenario.places)))


def _with_a_timely_cancel(scenario: Scenario, dice: random.Random) -> Scenario:
    """Cancel a run while it is open. Other cancels mostly come before its request or after its end."""
    if dice.random() < 0.5:
        return scenario
    asked = dice.choice([one for one in scenario.actions if one.kind in ("submit", "enqueue")])
    run_id = json.loads(asked.body)["correlation_id"]
    subject = int(run_id.removesuffix("-other").removeprefix("r"))
    cancel = Action(asked.at + dice.uniform(0.5, 6), "cancel", subject=subject)
    return msgspec.structs.replace(scenario, actions=tuple(sorted((*scenario.actions, cancel), key=lambda one: one.at)))


_ADDITIONS: dict[str, Callable[[Scenario, random.Random], Scenario]] = {
    "more": _with_more,
    "overrides": _with_overrides,
    "places": _with_few_places,
    "cancel": _with_a_timely_cancel,
}


def _pipeline(dice: random.Random, name: str) -> dict[str, Any]:
    size = dice.randint(1, 7)
    steps = []
    for number in range(size):
        before = [f"s{n}" for n in range(number) if dice.random() < 0.35]
        step: dict[str, Any] = {"id": f"s{number}", "type": _queue(dice), "dependsOn": before}
        step["retry"] = {"maxAttempts": dice.randint(1, 4), "backoff": dice.choice((0.1, 1, 4)), "maxBackoff": 8}
        step |= {"optional": True} if dice.random() < 0.2 else {}
        step |= {"timeout": dice.choice((2, 6, 15))} if dice.random() < 0.3 else {}
        steps.append(step)
    pipeline: dict[str, Any] = {"name": name, "timeout": dice.choice((5, 15, 40)), "steps": steps}
    pipeline |= {"quorum": dice.randint(1, size)} if dice.random() < 0.15 else {}
    return pipeline | ({"onLate": "amend"} if dice.random() < 0.3 else {})


def _queue(dice: random.Random) -> str:
    if dice.random() < 0.07:
        return DEAF_QUEUE
    return PLAIN_QUEUE if dice.random() < 0.15 else dice.choice(QUEUES)


def _request(dice: random.Random, number: int, pipelines: tuple[str, ...]) -> dict[str, Any]:
    request: dict[str, Any] = {"correlation_id": f"r{number}", "payload": {"n": number}}
    if dice.random() < 0.5:
        request["pipeline"] = dice.choice(pipelines)
    else:
        width = dice.randint(1, 8)
        request["destinos"] = [{"id": f"d{n}", "fila": _queue(dice)} for n in range(width)]
        request["timeout"] = dice.choice((4, 12, 30))
        if dice.random() < 0.15:
            request["quorum"] = dice.choice((1, width, "50%"))
    if dice.random() < 0.4:
        request["webhook"] = "http://receiver.example/hook"
    if dice.random() < 0.3:
        request["responder_em"] = "respostas"
    return request


def _asking(dice: random.Random, number: int, request: dict[str, Any]) -> list[Action]:
    at = dice.uniform(0, LASTS * 0.7)
    body = json.dumps(request).encode()
    if dice.random() < 0.6:
        actions = [Action(at, "submit", body, key=f"k{number}")]
    else:
        message = {
            "correlation_id": request["correlation_id"],
            "tipo_evento": "iniciar_orquestracao",
            "payload": request,
            "timestamp": "2026-01-01T00:00:00Z",
        }
        actions = [Action(at, "enqueue", json.dumps(message).encode())]
    if dice.random() < 0.3:  # sometimes a repeat
        actions.append(msgspec.structs.replace(actions[0], at=at + dice.uniform(0, 5)))
    return actions


_GARBAGE = (
    b"\xff\xfe",
    b"{}",
    b"[]",
    b'{"correlation_id":"nobody","tipo_evento":"resultado_coleta","payload":{},"timestamp":"2026-01-01T00:00:00Z"}',
    b'{"correlation_id":"r0","tipo_evento":"outro","payload":{},"timestamp":"2026-01-01T00:00:00Z"}',
)


def _operator(dice: random.Random, requests: int) -> Action:
    at = dice.uniform(0, LASTS)
    kind = dice.choice(("cancel", "repeat", "repeat", "redrive", "redrive", "discard", "garbage"))
    if kind == "garbage":
        return Action(at, kind, dice.choice(_GARBAGE), queue=dice.choice(("resultados", "orquestrador")))
    if kind in ("redrive", "discard"):
        return Action(at, kind, queue=dice.choice((*QUEUES, PLAIN_QUEUE)))
    return Action(at, kind, subject=dice.randrange(requests))
