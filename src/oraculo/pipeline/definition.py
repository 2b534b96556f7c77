"""A pipeline's definition: its types, how it is read from decoded YAML or JSON, and its faults by step and field.

A fan-out is a definition of steps without dependencies, so every run is the run of a definition.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from datetime import date
from enum import StrEnum
from fractions import Fraction
from math import ceil, isfinite
from typing import Any

import msgspec

from oraculo.errors import Fault, InvalidPipeline, WrittenByNewer
from oraculo.pipeline import bridges
from oraculo.pipeline.bridges import Bridge
from oraculo.pipeline.retry import DEFAULT_RETRY, RetryPolicy
from oraculo.wire import naming

DEFAULT_TIMEOUT = 300.0  # never changes, because stored definitions leave it out
MAX_SECONDS = 365 * 86400.0
MAX_STEPS = 100_000
MAX_FAULTS = 20  # nobody mends more in one go

# The job types of the video application and the queues of their workers.
JOB_TYPES: Mapping[str, str] = {
    "ENHANCED_IMAGES": "images-queue",
    "VIRAL_COPY": "text-queue",
    "VOICE_OVER": "voiceover-queue",
    "CAPTIONS": "captions-queue",
    "PROMOTIONAL_VIDEO": "video-queue",
}

# Short, because Python does not read a number of thousands of digits.
_PERCENTAGE = re.compile(r"([0-9]{1,3}(\.[0-9]{0,6})?|\.[0-9]{1,6})%")
_TOO_LONG = 10**4_300  # a number of more digits than Python writes

# A missing JSON value. msgspec recognises a default by its identity when it encodes, so there is only this one.
NO_JSON = msgspec.Raw()


class OnLate(StrEnum):
    """The effect of an answer that comes after its task timed out."""

    RECORD = "record"
    AMEND = "amend"


class Kind(StrEnum):
    """The form of the request. The end status of a run follows from its tasks by different rules for each."""

    FAN_OUT = "fan_out"
    PIPELINE = "pipeline"


class Step(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename="camel"):
    """One node of the graph: a command for one queue."""

    id: str
    queue: str
    type: str = ""
    depends_on: tuple[str, ...] = ()
    config: msgspec.Raw = NO_JSON
    payload: msgspec.Raw = NO_JSON  # a fan-out's own payload; a pipeline builds its own from config and results
    retry: RetryPolicy = DEFAULT_RETRY
    timeout: float | None = None
    optional: bool = False
    bridge: Bridge | None = None  # when given, `queue` is the bridge's own


class Definition(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A whole graph with its fan-in policy. Valid once built by this module or by `core.request`."""

    name: str
    steps: tuple[Step, ...]
    description: str = ""
    kind: Kind = Kind.PIPELINE
    timeout: float = DEFAULT_TIMEOUT
    quorum: int | str | None = None
    on_late: OnLate = OnLate.RECORD


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Definition)


def encode_definition(definition: Definition) -> bytes:
    return _encoder.encode(definition)


def decode_definition(body: bytes) -> Definition:
    """Return the definition that a store kept. Raises WrittenByNewer when it is not one of this version."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise WrittenByNewer(f"a definition that cannot be read ({error})") from error


def content_hash(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()


def quorum_needed(quorum: int | str | None, total: int) -> int | None:
    """Return how many successes end the run early, or None when it waits for all tasks."""
    if quorum is None or quorum == "all":
        return None
    if isinstance(quorum, int):
        return quorum
    return max(1, ceil(total * Fraction(quorum.removesuffix("%")) / 100))


def quorum_fault(quorum: object, total: int) -> str | None:
    """Return why `quorum` is not valid for `total` tasks, or None when it is."""
    right = f'must be "all", a whole number from 1 to {total}, or a percentage such as "60%"'
    if quorum is None or quorum == "all":
        return None
    if isinstance(quorum, bool):
        return right
    if isinstance(quorum, int):
        return None if 1 <= quorum <= total else f"{right}; got {naming.shown(quorum)}"
    if isinstance(quorum, str) and _PERCENTAGE.fullmatch(quorum) and 0 < float(quorum.removesuffix("%")) <= 100:
        return None
    return f"{right}; got {naming.shown(quorum)}"


def seconds_fault(value: object, *, zero: bool = False) -> str | None:
    """Return why `value` is not a length of time, or None when it is. `zero` allows 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"must be a number of seconds; got {naming.shown(value)}"
    if 0 < value <= MAX_SECONDS or (zero and value == 0):
        return None
    least = "0 or more" if zero else "more than 0"
    return f"must be {least} and at most {MAX_SECONDS:.0f} seconds; got {naming.shown(value)}"


QueueFault = Callable[[Step], str | None]


def parse_pipeline(
    source: object,
    *,
    name: str | None = None,
    default_retry: RetryPolicy = DEFAULT_RETRY,
    default_timeout: float = DEFAULT_TIMEOUT,
    queue_fault: QueueFault | None = None,
) -> Definition:
    """Return the definition in decoded YAML or JSON. Raises InvalidPipeline with every fault.

    `queue_fault` returns why a step may not send to its queue, or None.
    """
    return _PipelineReader(default_retry, default_timeout, queue_fault).read(source, name)


class _PipelineReader:
    """Reads one definition. It collects all faults, so that a user mends a file in one go."""

    def __init__(self, default_retry: RetryPolicy, default_timeout: float, queue_fault: QueueFault | None) -> None:
        self.faults: list[Fault] = []
        self.queue_fault = queue_fault
        self.default_retry = default_retry
        self.default_timeout = default_timeout

    def read(self, source: object, name: str | None) -> Definition:
        if not isinstance(source, dict):
            given = "nothing: it is empty" if source is None else naming.shown(source)
            raise InvalidPipeline(Fault("", f"a pipeline is an object with `steps`; got {given}"))
        self._known_keys(source, "", _PIPELINE_KEYS, ignored=ADDED_KEYS)
        name = self._name(source, name)
        description = self._typed(source, "", "description", str, "a string", "")
        if fault := _json_fault(description, "description"):
            self._fault("description", fault)
        timeout = self._seconds(source, "", "timeout") or self.default_timeout
        on_late = self._on_late(source)
        steps = self._steps(source.get("steps"))
        if steps and (fault := quorum_fault(source.get("quorum"), len(source["steps"]))):
            self._fault("quorum", fault)
        if steps:
            self._graph(steps, is_whole=len(steps) == len(source["steps"]) and all(step.id for step in steps.values()))
        if self.faults:
            error = InvalidPipeline(self.faults[:MAX_FAULTS])
            error.name = name
            raise error
        return Definition(
            name=name,
            steps=tuple(steps.values()),
            description=description,
            timeout=timeout,
            quorum=source.get("quorum"),
            on_late=on_late,
        )

    def _name(self, source: dict[str, Any], given: str | None) -> str:
        name = source.get("name", given)
        if given is not None and name != given:
            self._fault(
                "name",
                f"is {naming.shown(name)} but the pipeline is addressed as '{given}'; make them the same",
            )
        elif name in naming.FOLDERS:
            self._fault("name", naming.NO_FOLDER)
        elif not isinstance(name, str) or not naming.is_name(name):
            right = "1 to 128 letters, digits, '_', '-' or '.'"
            problem = f"must be {right}; got {naming.shown(name)}" if isinstance(name, str) else _missing(name, right)
            self._fault("name", problem)
        return name if isinstance(name, str) else ""

    def _on_late(self, source: dict[str, Any]) -> OnLate:
        value = source.get("onLate", OnLate.RECORD)
        if value in tuple(OnLate):
            return OnLate(value)
        self._fault("onLate", f'must be "record" or "amend"; got {naming.shown(value)}')
        return OnLate.RECORD

    def _steps(self, source: object) -> dict[int, Step]:
        """Return the steps that could be read, by their place in the list. Some of them may have faults."""
        if source is None or source == []:
            self._fault("steps", "is required: a list of at least one step")
            return {}
        if not isinstance(source, list):
            self._fault("steps", f"must be a list of at least one step; got {naming.shown(source)}")
            return {}
        if len(source) > MAX_STEPS:
            self._fault("steps", f"has {len(source)} steps; at most {MAX_STEPS} are allowed")
            return {}
        steps: dict[int, Step] = {}
        for number, item in enumerate(source):
            if len(self.faults) < MAX_FAULTS and (step := self._step(item, number)):
                steps[number] = step
        self._unique_ids(steps)
        self._allowed_queues(steps)
        return steps

    def _allowed_queues(self, steps: dict[int, Step]) -> None:
        if self.queue_fault is None:
            return
        faulty = {fault.field for fault in self.faults}
        for number, step in steps.items():
            field = f"steps[{number}] ({step.id}).queue"
            if field not in faulty and len(self.faults) < MAX_FAULTS and (fault := self.queue_fault(step)):
                self._fault(field, fault)

    def _unique_ids(self, steps: dict[int, Step]) -> None:
        seen: dict[str, int] = {}
        for number, step in steps.items():
            if step.id and (first := seen.setdefault(step.id, number)) != number:
                self._fault(
                    f"steps[{number}]",
                    f"step '{step.id}' is there already as steps[{first}]; give one an `id`",
                )

    def _step(self, item: object, number: int) -> Step | None:
        at = f"steps[{number}]"
        if not isinstance(item, dict):
            self._fault(at, f"a step is an object with `type`; got {naming.shown(item)}")
            return None
        step_type = self._type(item, at)
        step_id = self._typed(item, at, "id", str, "a string", step_type)
        at = f"{at} ({step_id})" if step_type or step_id else at
        self._known_keys(item, at, _STEP_KEYS)
        queue = item.get("queue", JOB_TYPES.get(step_type, step_type))
        bridge = self._bridge(item, queue, at)
        if bridge is not None:
            queue = bridges.QUEUES[bridge.kind]
            if bridge.kind == bridges.BULLMQ and not bridge.name and not bridges.is_bridge(step_type):
                bridge = msgspec.structs.replace(bridge, name=step_type)
        elif (
            not self._is_bridged(item, queue)
            and (step_type or "queue" in item)
            and (fault := naming.queue_fault(queue))
        ):
            near = naming.nearest(step_type, JOB_TYPES)
            hint = "" if "queue" in item else f" (no `queue` is given and the type is not a job type{near})"
            self._fault(f"{at}.queue", fault + hint)
        if (step_type or "id" in item) and (fault := id_fault(step_id)):
            self._fault(f"{at}.id", fault)
        return Step(
            id=step_id,
            queue=queue if isinstance(queue, str) else "",
            type=step_type,
            depends_on=self._depends_on(item, at),
            config=self._config(item, at),
            retry=self._retry(item, at),
            timeout=self._seconds(item, at, "timeout"),
            optional=self._typed(item, at, "optional", bool, "true or false", False),
            bridge=bridge,
        )

    def _is_bridged(self, item: dict[str, Any], queue: object) -> bool:
        return bridges.is_bridge(queue) or any(kind in item for kind in bridges.QUEUES)

    def _bridge(self, item: dict[str, Any], queue: object, at: str) -> Bridge | None:
        """Return the bridge of a step, or None when it has none or a fault."""
        kinds = [kind for kind in bridges.QUEUES if kind in item]
        if len(kinds) + ("queue" in item) > 1:
            names = [*kinds, "queue"] if "queue" in item else kinds
            self._fault(at, f"has {' and '.join(names)}; a step goes to one place")
            return None
        if kinds:
            made = bridges.read_block(kinds[0], item[kinds[0]])
            if isinstance(made, Bridge):
                return made
            for fault in made:
                self._fault(f"{at}.{kinds[0]}.{fault.field}".removesuffix("."), fault.problem)
            return None
        if not bridges.is_bridge(queue):
            return None
        read = bridges.read_bridge(str(queue))
        if isinstance(read, str):
            self._fault(f"{at}.queue" if "queue" in item else f"{at}.type", read)
            return None
        return read

    def _type(self, item: dict[str, Any], at: str) -> str:
        """Return the type of a step, which is the name of its queue if it has none. A fault gives an empty text."""
        queue = item.get("queue")
        value = item.get("type", queue if isinstance(queue, str) else self._target(item))
        if isinstance(value, str) and value and value.isprintable():
            return value
        if "type" in item or "queue" not in item:  # otherwise the queue has a fault of its own
            self._fault(f"{at}.type", _missing(value, "a job type or the name of a queue"))
        return ""

    def _target(self, item: dict[str, Any]) -> object:
        """Return the task or queue that the block of a bridge names."""
        block: dict[str, Any] = next((item[kind] for kind in bridges.QUEUES if isinstance(item.get(kind), dict)), {})
        return block.get("task", block.get("queue"))

    def _depends_on(self, item: dict[str, Any], at: str) -> tuple[str, ...]:
        value = item.get("dependsOn", [])
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._fault(f"{at}.dependsOn", "must be a list of step ids")
            return ()
        return tuple(dict.fromkeys(value))

    def _config(self, item: dict[str, Any], at: str) -> msgspec.Raw:
        if item.get("config") is None:
            return NO_JSON
        if not isinstance(item["config"], dict):
            self._fault(f"{at}.config", f"must be an object; got {naming.shown(item['config'])}")
            return NO_JSON
        if fault := _json_fault(item["config"]):
            self._fault(f"{at}.config", fault)
            return NO_JSON
        # Sorted, so that the content hash does not depend on the order in which keys were written.
        return msgspec.Raw(msgspec.json.encode(item["config"], order="sorted"))

    def _retry(self, item: dict[str, Any], at: str) -> RetryPolicy:
        value = item.get("retry")
        if value is None:
            return self.default_retry
        if not isinstance(value, dict):
            self._fault(f"{at}.retry", "must be an object, as {maxAttempts: 3, backoff: 2, maxBackoff: 60}")
            return self.default_retry
        at = f"{at}.retry"
        self._known_keys(value, at, _RETRY_KEYS)
        attempts = value.get("maxAttempts", self.default_retry.max_attempts)
        if isinstance(attempts, bool) or not isinstance(attempts, int) or not 1 <= attempts <= 1000:
            self._fault(f"{at}.maxAttempts", f"must be a whole number from 1 to 1000; got {naming.shown(attempts)}")
            attempts = 1
        backoff = self._seconds(value, at, "backoff", zero=True)
        cap = self._seconds(value, at, "maxBackoff", zero=True)
        return RetryPolicy(
            max_attempts=attempts,
            backoff=self.default_retry.backoff if backoff is None else backoff,
            max_backoff=self.default_retry.max_backoff if cap is None else cap,
        )

    def _graph(self, steps: dict[int, Step], is_whole: bool) -> None:
        """Find unknown dependencies and circles.

        When some step could not be read (`is_whole` is False), a dependency may name that step, so only circles count.
        """
        places = {step.id: number for number, step in steps.items()}
        for number, step in steps.items():
            for name in step.depends_on:
                if is_whole and name not in places and len(self.faults) < MAX_FAULTS:
                    near = naming.nearest(name, places.keys() - {step.id})
                    at = f"steps[{number}] ({step.id}).dependsOn"
                    self._fault(at, f"no step has the id {naming.shown(name)}{near}")
        known = {step.id: tuple(name for name in step.depends_on if name in places) for step in steps.values()}
        if cycle := find_cycle(known):
            at = f"steps[{places[cycle[0]]}] ({cycle[0]}).dependsOn"
            self._fault(at, "the steps wait for each other in a circle: " + _path(cycle))

    def _seconds(self, item: dict[str, Any], at: str, key: str, zero: bool = False) -> float | None:
        value = item.get(key)
        if value is None:
            return None
        if fault := seconds_fault(value, zero=zero):
            self._fault(f"{at}.{key}" if at else key, fault)
            return None
        return float(value) or 0.0  # -0.0 would change the content hash

    def _typed(self, item: dict[str, Any], at: str, key: str, kind: type, right: str, default: Any) -> Any:
        value = item.get(key, default)
        if isinstance(value, kind):
            return value
        self._fault(f"{at}.{key}" if at else key, f"must be {right}; got {naming.shown(value)}")
        return default

    def _known_keys(
        self, item: Mapping[Any, Any], at: str, known: frozenset[str], ignored: frozenset[str] = frozenset()
    ) -> None:
        for key in item:
            if key not in known and key not in ignored:
                name = key if isinstance(key, str) else naming.shown(key)
                self._fault(f"{at}.{name}" if at else name, f"is not a known key{naming.nearest(name, known)}")

    def _fault(self, field: str, problem: str) -> None:
        self.faults.append(Fault(field, problem))


_PIPELINE_KEYS = frozenset({"name", "description", "timeout", "steps", "quorum", "onLate"})
# The API adds these keys to a definition. They are ignored on reading, so that its answer can be stored again.
ADDED_KEYS = frozenset({"origem", "hash", "avisos"})
_STEP_KEYS = frozenset({"id", "type", "queue", "dependsOn", "config", "retry", "timeout", "optional", *bridges.QUEUES})
_RETRY_KEYS = frozenset({"maxAttempts", "backoff", "maxBackoff"})


def _json_fault(value: object, path: str = "config") -> str | None:
    """Return the fault of the first key or value that JSON or a worker cannot hold."""
    if isinstance(value, dict):
        odd = next((key for key in value if not isinstance(key, str)), None)
        if odd is not None or None in value:
            return f"the key {naming.shown(odd)} of `{path}` must be a text; put it in quotes"
        faults = (_text_problem(key, path) or _json_fault(item, f"{path}.{key[:40]}") for key, item in value.items())
        return next(filter(None, faults), None)
    if isinstance(value, list | tuple):
        faults = (_json_fault(item, f"{path}[{number}]") for number, item in enumerate(value))
        return next(filter(None, faults), None)
    if isinstance(value, str):
        return _text_problem(value, path)
    if isinstance(value, int) and abs(value) >= _TOO_LONG:
        return f"the number `{path}` has too many digits; put it in quotes, as a text"
    if isinstance(value, float) and not isfinite(value):
        return f"`{path}` is {value}, which JSON cannot hold"
    if value is None or isinstance(value, int | float | date):
        return None
    return f"`{path}` is {naming.shown(value)}, which JSON cannot hold"


def _text_problem(text: str, path: str) -> str | None:
    """Return the fault of a text with NUL, or with half a surrogate pair, which UTF-8 cannot write."""
    is_sound = text.isprintable() or not any(sign == "\0" or "\ud800" <= sign <= "\udfff" for sign in text)
    return (
        None if is_sound else f"a text in `{path}` holds a NUL character or half a surrogate pair (\\ud800 to \\udfff)"
    )


def text_fault(value: str, limit: int = 128) -> str | None:
    """Return why `value` is not a text of 1 to 128 printable characters, or None when it is."""
    if not 1 <= len(value) <= limit:
        return f"must have 1 to {limit} characters; got {len(value)}"
    if not value.isprintable():
        return "must not hold control characters"
    return None


def id_fault(value: str) -> str | None:
    """Return why `value` cannot be the id of a task, which is part of URLs, or None when it can."""
    return naming.NO_FOLDER if value in naming.FOLDERS else text_fault(value)


def _missing(value: object, right: str) -> str:
    """Return the fault of a missing text. YAML reads NO and 1 as other values, so the fault asks for quotes."""
    if value is None or value == "":
        return f"is required: {right}"
    if isinstance(value, str):
        return f"must be a text without control characters: {right}"
    return f"must be a text: {right}; got {naming.shown(value)}, which must be in quotes to be one"


def find_cycle(depends_on: Mapping[str, tuple[str, ...]]) -> list[str] | None:
    """Return a circle of dependencies as `[a, b, a]`, or None. It is iterative, as a chain may be 10,000 deep."""
    done: set[str] = set()
    for start in depends_on:
        if start in done:
            continue
        path: dict[str, None] = {start: None}
        stack = [iter(depends_on[start])]
        while stack:
            name = next(stack[-1], None)
            if name is None:
                stack.pop()
                done.add(path.popitem()[0])
            elif name in path:
                names = list(path)
                return [*names[names.index(name) :], name]
            elif name not in done:
                path[name] = None
                stack.append(iter(depends_on[name]))
    return None


def _path(names: list[str], shown: int = 20) -> str:
    left_out = len(names) - shown
    parts = names if left_out <= 0 else [*names[: shown - 1], f"… {left_out} more …", names[-1]]
    return " → ".join(parts)


def pipeline_document(definition: Definition) -> dict[str, Any]:
    """Return the definition as a user would write it, for `GET /pipelines/{name}`."""
    steps: list[dict[str, Any]] = []
    for step in definition.steps:
        item: dict[str, Any] = {"id": step.id, "type": step.type, **_place(step)}
        _put(item, "dependsOn", list(step.depends_on), bool)
        _put(item, "config", step.config, bool)
        item["retry"] = step.retry
        _put(item, "timeout", step.timeout, _is_given)
        _put(item, "optional", step.optional, bool)
        steps.append(item)
    document: dict[str, Any] = {"name": definition.name, "description": definition.description}
    document["timeout"] = definition.timeout
    _put(document, "quorum", definition.quorum, _is_given)
    return document | {"onLate": definition.on_late, "steps": steps}


def _place(step: Step) -> dict[str, Any]:
    bridge = step.bridge
    if bridge is None or not (bridge.args or bridge.kwargs):
        return {"queue": step.queue if bridge is None else bridge.url}
    block: dict[str, Any] = {"task": bridge.target}
    for key, value in (
        ("queue", bridge.queue),
        ("send", bridge.send),
        ("args", bridge.args),
        ("kwargs", bridge.kwargs),
    ):
        _put(block, key, value, bool)
    return {bridge.kind: block}


def _put(item: dict[str, Any], key: str, value: Any, wanted: Callable[[Any], bool]) -> None:
    if wanted(value):
        item[key] = value


def _is_given(value: object) -> bool:
    return value is not None
