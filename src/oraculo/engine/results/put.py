"""Puts large answers into the result store before they are decided: the run then holds a reference.

When the result store fails, the answer stays as it came and is committed whole.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor

from oraculo.core.answers import is_failure
from oraculo.core.result_reference import encode_reference
from oraculo.engine.inbox import AnswerInput
from oraculo.errors import OraculoError
from oraculo.ports.objects import Objects, put_result
from oraculo.ports.telemetry import LoopFailed, Telemetry

PATIENCE = 3.0  # seconds for all the large answers of a batch
REST = 15.0  # seconds after a failure in which nothing is tried
_AT_ONCE = 8


class ResultWriter:
    """The writer of large answers."""

    def __init__(
        self,
        objects: Objects | None,
        claim_fault: Callable[[], Awaitable[str | None]],
        threshold: int,
        telemetry: Telemetry,
        threads: Executor,
    ) -> None:
        self._objects = objects
        self._claim_fault = claim_fault
        self._is_claimed = False
        self._telemetry = telemetry
        self._threads = threads
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._rests_until = 0.0
        self._reason = ""
        self.threshold = threshold if objects is not None and threshold else sys.maxsize

    @property
    def trouble(self) -> str | None:
        """The reason why large answers stay as they came, while they do."""
        return self._reason if self._is_resting else None

    @property
    def _is_resting(self) -> bool:
        return asyncio.get_running_loop().time() < self._rests_until

    async def keep(self, answers: Sequence[AnswerInput]) -> None:
        """Put large answers, and give each its reference."""
        if self._is_resting:
            return
        try:
            async with asyncio.timeout(PATIENCE):
                if await self._may_use():
                    async with asyncio.TaskGroup() as group:
                        for answer in answers:
                            group.create_task(self._keep(answer))
        except TimeoutError:
            self._rest(f"no answer in {PATIENCE:g} s")
        except OraculoError as fault:
            self._rest(str(fault))
        except ExceptionGroup as faults:
            first = faults.exceptions[0]
            self._rest(str(first) or type(first).__name__)

    async def _may_use(self) -> bool:
        """Return whether this installation may write there. It may not have been known at the start."""
        if not self._is_claimed:
            if fault := await self._claim_fault():
                self._rest(fault)
            else:
                self._is_claimed = True
        return self._is_claimed

    async def _keep(self, answer: AnswerInput) -> None:
        """Put one answer. The payload of a failure is not kept, so it is not put either."""
        message, payload = answer.message, bytes(answer.message.payload)
        if self._objects is None or len(payload) <= self.threshold or is_failure(payload):
            return
        async with self._slots:
            reference = await put_result(self._objects, message.correlation_id, message.tarefa, payload, self._threads)
        answer.reference = encode_reference(reference)

    def _rest(self, reason: str) -> None:
        self._rests_until = asyncio.get_running_loop().time() + REST
        self._reason = f"large results stay in the store: {reason}"
        self._telemetry.emit(LoopFailed("objects", self._reason))
