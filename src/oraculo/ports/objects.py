"""The result store: large results, in one folder for each run.

`core.result_reference` defines the keys. Every call may raise ObjectsUnavailable (cannot be reached now, try again) or
another ObjectsError (refused).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import ParamSpec, Protocol, TypeVar

import msgspec

from oraculo.core.result_reference import ResultReference, make_reference
from oraculo.errors import ObjectLost, ObjectsUnavailable
from oraculo.ports.threads import handed_over

P = ParamSpec("P")
T = TypeVar("T")


class RunFolder(msgspec.Struct, frozen=True, gc=False):
    """One run's folder in the result store."""

    name: str  # made by `core.result_reference.run_folder`
    written_at: float  # the last time that something was put into it


class Objects(Protocol):
    """A place that keeps large results."""

    @property
    def name(self) -> str:
        """The kind of place, in logs and lists: `folder`, `s3`, …"""
        ...

    @property
    def shared_place(self) -> str | None:
        """A text that is different for each place, or None when no other installation can reach this place."""
        ...

    async def put(self, run_id: str, key: str, body: bytes) -> None:
        """Write an object durably: the whole of it, or nothing.

        The first object of a folder is preceded by the run's id, which `owner` returns. Putting an object again is
        cheap.
        """
        ...

    async def get(self, key: str) -> bytes:
        """Return an object. Raises ObjectLost when it is not there."""
        ...

    async def folders(self, shard: str) -> Sequence[RunFolder]:
        """Return the folders in one of the 256 shards."""
        ...

    async def owner(self, folder: str) -> str | None:
        """Return the id of the run that owns the folder, or None when the folder has no owner."""
        ...

    async def delete(self, folder: str, written_before: float) -> bool:
        """Delete the folder and return True, unless something was put there after `written_before`.

        The owner goes last.
        """
        ...

    async def claim(self, installation: str, *, was_claimed: bool = False) -> str:
        """Return the installation that owns this place. The first one that claims it owns it for good.

        A place that nobody else can reach always belongs to the caller. `was_claimed` means that the caller owned it
        before: if the place now has no owner, the real one is not mounted.
        """
        ...

    async def check(self) -> str:
        """Return where the place is, once reading and writing work. Raises ObjectsError with the reason."""
        ...

    async def close(self) -> None:
        """Close connections. Idempotent."""
        ...


async def put_result(
    objects: Objects, run_id: str, task: str | None, payload: bytes, threads: Executor | None = None
) -> ResultReference:
    """Put a payload and return the reference to it. Hashing takes long enough to need a thread."""
    reference = await in_thread(threads, make_reference, run_id, task, payload)
    await objects.put(run_id, reference.key, payload)
    return reference


async def get_result(objects: Objects, reference: ResultReference, threads: Executor | None = None) -> bytes:
    """Return the payload of a reference. Raises ObjectLost when it is missing or is not what was put."""
    payload = await objects.get(reference.key)
    if not await in_thread(threads, reference.names, payload):
        raise ObjectLost(f"{reference.key} is not what was put: its size or SHA-256 differs")
    return payload


async def in_thread(threads: Executor | None, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in one of `threads`, or in the event loop's own pool.

    Raises ObjectsUnavailable when the system has no room for another thread, so that the caller tries again: the result
    itself is fine, and may have cost a worker hours.
    """
    try:
        done = handed_over(threads, function, *args, **kwargs)
    except (RuntimeError, MemoryError) as error:
        raise ObjectsUnavailable(str(error) or type(error).__name__) from error
    return await done
