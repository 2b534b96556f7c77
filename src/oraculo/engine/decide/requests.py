"""Requests: reads their bytes, and makes runs that are ready to be created."""

import hashlib
from itertools import islice
from urllib.parse import urlsplit

from oraculo.core import machine
from oraculo.core.request import Limits, RunRequest, definition_of, new_run, read_request
from oraculo.core.webhook_rules import WebhookRules
from oraculo.engine.decide.cache import Plans
from oraculo.engine.inbox import Submission
from oraculo.engine.pipelines import PipelineCatalogue
from oraculo.errors import Fault, InvalidJson, InvalidMessage, InvalidRequest, PayloadTooLarge
from oraculo.pipeline.definition import MAX_FAULTS, Definition
from oraculo.ports.clock import Clock, Entropy
from oraculo.settings import Settings
from oraculo.wire import naming
from oraculo.wire.message import Message, valid_traceparent
from oraculo.wire.naming import QueueNames


def fingerprint_of(body: bytes) -> str:
    """Return the fingerprint of a request's body.

    Pipelines and settings do not count: the same body may become another run when they change.
    """
    return hashlib.sha256(body).hexdigest()


class RunMaker:
    """Makes runs of requests, whether they came by HTTP or as messages."""

    def __init__(
        self,
        catalogue: PipelineCatalogue,
        plans: Plans,
        names: QueueNames,
        clock: Clock,
        entropy: Entropy,
        settings: Settings,
    ) -> None:
        self._catalogue = catalogue
        self._plans = plans
        self._names = names
        self._clock = clock
        self._entropy = entropy
        self._limits = Limits(settings.limits.payload_bytes, settings.limits.request_bytes)
        self._queues = catalogue.rules
        self._targets = WebhookRules(settings.webhook.allow)
        self._default_timeout = settings.runs.timeout
        self._default_retry = settings.runs.retry

    def submission(
        self,
        body: bytes,
        *,
        run_id: str | None = None,
        reply_to: str | None = None,
        traceparent: str | None = None,
    ) -> Submission:
        """Return the run that a request asks for. Raise InvalidInput, PayloadTooLarge or WrittenByNewer.

        `run_id` and `reply_to` come from a message's envelope, and hold where the body says nothing.
        """
        request = read_request(body, self._limits)
        run_id = request.correlation_id or run_id or self._entropy.new_id()
        if run_id in naming.FOLDERS:
            fault = Fault("correlation_id", naming.NO_FOLDER)
            raise InvalidMessage(fault) if run_id != request.correlation_id else InvalidRequest(fault)
        if request.responder_em is None:
            request.responder_em = reply_to
        definition = self._definition_of(request)
        self._expect_allowed(request, definition)
        run = new_run(
            request,
            definition,
            run_id=run_id,
            now=self._clock.now(),
            plans=self._plans,
            traceparent=valid_traceparent(traceparent),
        )
        changes = machine.start(run, run.head.created_at)
        return Submission(changes, fingerprint=fingerprint_of(body), queue_field=_queue_field(request))

    def submission_of(self, message: Message) -> Submission:
        """Return the run that a message asks for. Raise like `submission`, with the fault's place in the message."""
        reply_to = None if message.responder_em is None else self._names.logical(message.responder_em)
        if reply_to is not None and (fault := naming.reply_queue_fault(reply_to)):
            raise InvalidMessage.at("responder_em", fault)
        run_id, request = message.correlation_id, bytes(message.payload)
        try:
            submission = self.submission(request, run_id=run_id, reply_to=reply_to, traceparent=message.traceparent)
        except (InvalidJson, InvalidRequest, PayloadTooLarge) as error:  # not InvalidMessage, of the message's own id
            raise error.within("payload") from None
        if submission.changes.run.id != run_id:
            raise InvalidMessage.at("payload.correlation_id", "differs from the message's correlation_id; leave it out")
        return submission

    def _definition_of(self, request: RunRequest) -> Definition:
        """Return what is to run. Raise InvalidRequest or WrittenByNewer."""
        if request.pipeline is not None:
            self._catalogue.expect_usable(request.pipeline)
        return definition_of(
            request, self._catalogue, default_timeout=self._default_timeout, default_retry=self._default_retry
        )

    def _expect_allowed(self, request: RunRequest, definition: Definition) -> None:
        """Raise InvalidRequest for queues and a webhook that no run may reach."""
        found = islice(self._queues.step_faults(definition), MAX_FAULTS)
        faults = [_at(request, number, fault) for number, fault in found]
        if request.responder_em is not None and (problem := self._queues.fault(request.responder_em)):
            faults.append(Fault("responder_em", problem))
        if request.webhook is not None:
            host = urlsplit(request.webhook).hostname or ""
            faults += [Fault("webhook", problem)] if (problem := self._targets.host_fault(host)) else []
        if faults:
            raise InvalidRequest(faults)


def _queue_field(request: RunRequest) -> str:
    if request.destinos is not None:
        return "destinos"
    return "tipo" if request.pipeline is None else "pipeline"


def _at(request: RunRequest, number: int, fault: Fault) -> Fault:
    """Return the fault at the field of the request that caused it."""
    if request.destinos is not None:
        return Fault(f"destinos[{number}]", fault.problem)
    return Fault(_queue_field(request), str(fault))
