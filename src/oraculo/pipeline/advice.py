"""Warnings about a valid definition that may not say what its author means."""

from collections.abc import Collection, Iterator, Mapping

from oraculo.errors import Fault
from oraculo.pipeline.definition import JOB_TYPES, MAX_FAULTS, Definition, Step
from oraculo.wire.naming import near_miss


def mistyped_types(definition: Definition) -> list[Fault]:
    """Return a warning for each type that is nearly a job type. Its step goes to a queue named like the type."""
    return [
        Fault(f"{place}.type", f"'{step.type}' is no job type, so its queue is '{step.queue}'; did you mean '{meant}'?")
        for place, step in _steps_of_ours(definition)
        if step.queue == step.type and (meant := _near_job_type(step.type)) is not None
    ][:MAX_FAULTS]


def unserved_queues(definition: Definition, consumers: Mapping[str, int | None], known: Collection[str]) -> list[Fault]:
    """Return a warning for each queue without a consumer, with the similar name from `known` that may be meant.

    A count in `consumers` that is missing or None is not known, and gives no warning.
    """
    return [
        Fault(f"{place}.queue", f"nobody listens on queue '{step.queue}' now{_meant(step.queue, known)}")
        for place, step in _steps_of_ours(definition)
        if consumers.get(step.queue) == 0
    ][:MAX_FAULTS]


def _steps_of_ours(definition: Definition) -> Iterator[tuple[str, Step]]:
    """Yield the steps that no bridge takes, each with its place in the file."""
    for number, step in enumerate(definition.steps):
        if step.bridge is None:
            yield f"steps[{number}] ({step.id})", step


def _near_job_type(name: str) -> str | None:
    if name in JOB_TYPES:
        return None
    alike = "".join(letter if letter.isalnum() else "_" for letter in name.upper())
    return alike if alike in JOB_TYPES else near_miss(alike, JOB_TYPES)


def _meant(queue: str, known: Collection[str]) -> str:
    meant = near_miss(queue, known)
    return "" if meant is None else f"; did you mean '{meant}'?"
