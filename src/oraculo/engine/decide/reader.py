"""Reads what has arrived: sorts the inputs of a batch, and decodes its messages."""

from collections.abc import Awaitable, Callable, Iterable, Sequence

from oraculo.engine.decide.batches import Batch
from oraculo.engine.decide.requests import RunMaker
from oraculo.engine.inbox import AnswerInput, Arrived, BadAnswer, Input, Note, Submission, is_withdrawn
from oraculo.engine.results.put import ResultWriter
from oraculo.errors import InvalidInput, InvalidJson, InvalidMessage, PayloadTooLarge, UnknownPipeline
from oraculo.wire import naming
from oraculo.wire.json_guard import MAX_DEPTH
from oraculo.wire.message import Message, correlation_id_of, decode_message
from oraculo.wire.naming import QueueNames

_ABOUT_A_RUN = naming.ANSWER_EVENTS | {naming.PROGRESS}


class BatchReader:
    """The reader of batches. `refresh_pipelines` reads those that another process may have put just now."""

    def __init__(
        self,
        names: QueueNames,
        maker: RunMaker,
        refresh_pipelines: Callable[[], Awaitable[object]],
        results: ResultWriter,
    ) -> None:
        self._names = names
        self._maker = maker
        self._refresh_pipelines = refresh_pipelines
        self._results = results

    def read(self, inputs: Sequence[Input], notes: Sequence[Note]) -> Batch:
        batch = Batch()
        for note in notes:  # notes come first, because a sending comes before its answer
            batch.of_run(note.run_id, note)
        for one in inputs:
            if is_withdrawn(one):
                continue
            if isinstance(one, Arrived):
                self._read_arrived(one, batch)
            elif isinstance(one, Submission):
                batch.submissions.append(one)
            else:
                batch.of_run(one.run_id, one)
        return batch

    async def read_again(self, batch: Batch) -> None:
        """Read requests again that name unknown pipelines."""
        if batch.unknown:
            await self._refresh_pipelines()
            for arrived in batch.unknown:
                self._read_arrived(arrived, batch, is_last_try=True)

    async def put_aside(self, batch: Batch) -> None:
        """Put the large answers of a batch into the result store."""
        if batch.large:
            await self._results.keep(batch.large)

    def _read_arrived(self, arrived: Arrived, batch: Batch, *, is_last_try: bool = False) -> None:
        try:
            if arrived.delivery.queue == self._names.requests:  # a request has its own limit of depth
                batch.submissions.append(self._read_request(arrived))
            else:
                message = decode_message(arrived.delivery.body, MAX_DEPTH)
                _expect_event(message, _ABOUT_A_RUN)
                answer = AnswerInput(message, arrived)
                batch.of_run(message.correlation_id, answer)
                if len(arrived.delivery.body) > self._results.threshold:
                    batch.large.append(answer)
        except UnknownPipeline as error:
            if is_last_try:
                batch.refused.append((arrived, str(error)))
            else:
                batch.unknown.append(arrived)
        except (InvalidJson, InvalidMessage) as error:
            self._refuse(arrived, str(error), batch)
        except (InvalidInput, PayloadTooLarge) as error:
            batch.refused.append((arrived, str(error)))

    def _refuse(self, arrived: Arrived, why: str, batch: Batch) -> None:
        """Refuse a broken message, through its run if it is an answer that names one.

        The run's history then shows the refusal, because the worker believes that it has answered.
        """
        is_answer = arrived.delivery.queue != self._names.requests
        if is_answer and (run_id := correlation_id_of(arrived.delivery.body)) is not None:
            batch.of_run(run_id, BadAnswer(arrived, why))
        else:
            batch.refused.append((arrived, why))

    def _read_request(self, arrived: Arrived) -> Submission:
        message = decode_message(arrived.delivery.body)
        _expect_event(message, {naming.START_RUN})
        submission = self._maker.submission_of(message)
        submission.arrived = arrived
        for delivery in submission.changes.run.head.deliveries:
            delivery.via = arrived.delivery.via
        return submission


def _expect_event(message: Message, known: Iterable[str]) -> None:
    if message.tipo_evento not in known:
        right = ", ".join(sorted(known))
        raise InvalidMessage.at(
            "tipo_evento", f"must be one of {right} on this queue; got {naming.shown(message.tipo_evento)}"
        )
