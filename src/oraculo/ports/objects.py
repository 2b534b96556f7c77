"""Where large results rest, each run's in a folder of its own.

Keys are those of `core.reference`. Every call may raise ObjectsUnavailable (cannot be reached now: try again) or
ObjectsError (refused).
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
    name: str  # as `core.reference.run_folder` has it
    written_at: float  # when something was last put into it


class Objects(Protocol):
    @property
    def name(self) -> str:
        """For people: `folder`, `s3`, …"""
        ...

    @property
    def shared_place(self) -> str | None:
        """Where it is, another place having another name. None: nobody else can have it."""
        ...

    async def put(self, run_id: str, key: str, body: bytes) -> None:
        """Writes it, durably and whole or not at all. Before a folder's first object, its run's id is put there; the
        same key again is the same body again, and costs little."""
        ...

    async def get(self, key: str) -> bytes:
        """Raises ObjectLost when it is not there."""
        ...

    async def folders(self, shard: str) -> Sequence[RunFolder]:
        """Of one of the 256 shards."""
        ...

    async def owner(self, folder: str) -> str | None:
        """The id of the run whose folder it is; None when it holds none."""
        ...

    async def delete(self, folder: str, written_before: float) -> bool:
        """Deletes the folder with all that is in it, the owner last; unless something was put there since then."""
        ...

    async def claim(self, installation: str, *, was_claimed: bool = False) -> str:
        """Whose place it is: the first to claim it has it for good. One that nobody else can have is the asker's.
        `was_claimed`: the asker had it already, so that a folder which nobody has is not this one: it is away."""
        ...

    async def check(self) -> str:
        """Proves that it can be used and tells where it is; raises ObjectsError with the reason."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...


async def put_result(
    objects: Objects, run_id: str, task: str | None, payload: bytes, threads: Executor | None = None
) -> ResultReference:
    """Hashing takes a while: it is done in a thread, too; in one of `threads`, or of the event loop's own, where others
    may keep it waiting."""
    reference = await in_thread(threads, make_reference, run_id, task, payload)
    await objects.put(run_id, reference.key, payload)
    return reference


async def get_result(objects: Objects, reference: ResultReference, threads: Executor | None = None) -> bytes:
    """Raises ObjectLost when it is not there, or is not what was put."""
    payload = await objects.get(reference.key)
    if not await in_thread(threads, reference.names, payload):
        raise ObjectLost(f"{reference.key} is not what was put: its size or SHA-256 differs")
    return payload


async def in_thread(threads: Executor | None, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """In one of `threads`, or of the event loop's own. Raises ObjectsUnavailable when the system has no room for one
    more: that says nothing of the result, which may have taken a worker hours."""
    try:
        done = handed_over(threads, function, *args, **kwargs)
    except (RuntimeError, MemoryError) as error:
        raise ObjectsUnavailable(str(error) or type(error).__name__) from error
    return await done
