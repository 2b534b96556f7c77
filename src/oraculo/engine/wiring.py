"""The composition root of the engine: makes its parts, and hands each what it uses."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial

from oraculo.core.events import Event, RunDue, TaskDue
from oraculo.engine.after_commit import AfterCommit
from oraculo.engine.bridges import Bridges
from oraculo.engine.cluster.broker_marks import BrokerMarks
from oraculo.engine.cluster.broker_watch import BrokerWatch
from oraculo.engine.cluster.peers import Peers
from oraculo.engine.consumers import EngineConsumers
from oraculo.engine.dead_letters import DeadLetters
from oraculo.engine.decide.admission import Admission
from oraculo.engine.decide.cache import HotRuns, Plans
from oraculo.engine.decide.conclude import Conclusion
from oraculo.engine.decide.decider import Decider
from oraculo.engine.decide.intake import Intake
from oraculo.engine.decide.reader import BatchReader
from oraculo.engine.decide.requests import RunMaker
from oraculo.engine.decide.settle import Settling
from oraculo.engine.deliver.deliveries import Deliveries
from oraculo.engine.deliver.reply_queues import ReplyQueues
from oraculo.engine.deliver.webhooks import HttpPost, Webhooks
from oraculo.engine.explanation import Explanation
from oraculo.engine.health import EngineHealth, LargeResults, Lifecycle
from oraculo.engine.inbox import Inbox
from oraculo.engine.operations import Operations, RunParts
from oraculo.engine.pipelines import PipelineCatalogue, PipelineQueues
from oraculo.engine.ports import Ports
from oraculo.engine.queues.known import KnownQueues
from oraculo.engine.queues.last_looks import LastLooks
from oraculo.engine.queues.limits import NewQueueLimits
from oraculo.engine.queues.looks import QueueLooks
from oraculo.engine.queues.parts import QueueParts
from oraculo.engine.queues.remembered import RememberedQueues
from oraculo.engine.queues.served import ServedQueues
from oraculo.engine.queues.trouble import QueueTrouble
from oraculo.engine.queues.unheard_answers import UnheardAnswers
from oraculo.engine.results.clean_up import ResultCleanUp, claim_fault
from oraculo.engine.results.get import ResultReader
from oraculo.engine.results.put import ResultWriter
from oraculo.engine.retention import RunRetention
from oraculo.engine.send.outbox import Outbox
from oraculo.engine.send.sweep import RefusedCommands, Sweep
from oraculo.engine.service import Duty, Engine, Parts
from oraculo.engine.timers import Timers
from oraculo.engine.watchers import Lookout, Watchers
from oraculo.ports.store import Due
from oraculo.settings import Settings
from oraculo.wire.naming import QueueNames

_THREADS = 4


class Role(Enum):
    """The part of an engine's work that a process does.

    A FRONT creates runs, sends their first commands and does what people ask. It leaves answers and timers to the
    engines that share its store and broker.
    """

    WHOLE = "whole"
    FRONT = "front"


def make_engine(settings: Settings, ports: Ports, *, name: str = "", role: Role = Role.WHOLE) -> Engine:
    """Make an engine, not yet started."""
    broker, store, clock, entropy, telemetry = ports.broker, ports.store, ports.clock, ports.entropy, ports.telemetry
    is_whole, poll = role is Role.WHOLE, settings.engine.poll
    # The event loop's own threads may all wait for silent name servers.
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="oraculo-engine")
    # Pipelines have a thread of their own, because each large text takes seconds to read.
    reader = ThreadPoolExecutor(1, thread_name_prefix="oraculo-pipelines")

    # What many parts share.
    names, lifecycle = QueueNames(settings.broker.prefix), Lifecycle()
    peers = Peers(store, clock, telemetry, name or entropy.new_id(), poll, is_engine=is_whole)
    inbox, plans, watchers = Inbox(settings.engine.note_linger, settings.engine.batch), Plans(), Watchers()
    catalogue = PipelineCatalogue(settings, telemetry, threads, reader)
    claims = partial(claim_fault, ports.objects, store)
    results = ResultReader(ports.objects, claims, settings, telemetry, threads)
    result_writer = ResultWriter(ports.objects, claims, settings.objects.threshold_bytes, telemetry, threads)
    maker = RunMaker(catalogue, plans, names, clock, entropy, settings)
    runs = RunParts(inbox, plans, watchers, results, maker, threads)
    queues = _queue_parts(settings, ports, names, catalogue, threads)

    # What goes out.
    outbox = Outbox(broker, store, inbox, results, names, queues.known, clock, telemetry)
    refused = RefusedCommands()
    if is_whole:
        outbox.on_refused = refused.note
    else:  # others sweep, and hear the answers
        outbox.others_answer = True
    http = HttpPost(settings.webhook)
    deliveries = Deliveries(
        Webhooks(ports.post or http, settings.webhook.secret, clock),
        ReplyQueues(broker, results, names, clock),
        inbox,
        settings.webhook,
        clock,
        entropy,
        telemetry,
    )

    # What comes in, and what is known about it.
    own_queues = (names.answers, names.requests) if is_whole else ()
    consumers = EngineConsumers(broker, inbox, own_queues, settings.engine)
    unheard = None if is_whole else UnheardAnswers(broker, names.answers)
    trouble = QueueTrouble(broker, names, outbox, consumers, unheard)
    last_looks = LastLooks(store, plans, clock, threads, queues.looks, queues.served)
    timers = Timers(store, inbox, clock, peers, poll, partial(_event_maker, trouble, last_looks))

    # What decides, between the two.
    after_commit = AfterCommit(outbox, timers, deliveries, watchers, results, telemetry)
    hot = HotRuns(settings.engine.cached_tasks, lambda: peers.decides_alone)
    settling = Settling(names, telemetry)
    intake = Intake(
        store,
        inbox,
        BatchReader(names, maker, partial(catalogue.refresh_stored, store), result_writer),
        Decider(store, hot, plans, clock, entropy, prefix=names.prefix, tracebacks=settings.worker.tracebacks),
        Conclusion(store, hot, after_commit, telemetry),
        settling,
        Admission(queues.limits, inbox, settling),
        telemetry,
        settings.engine.batch,
    )
    peers.is_well = lambda: intake.trouble is None

    # What people ask for.
    bridges = Bridges(settings.bullmq.queues, telemetry)
    health = EngineHealth(
        lifecycle,
        store,
        peers,
        intake,
        trouble,
        LargeResults(ports.objects, results, result_writer),
        (bridges.health, peers.health, catalogue.health),
    )
    dead_letters = DeadLetters(broker, store, inbox, plans, names, threads)
    explanation = Explanation(broker, store, clock, threads, queues, health, bridges, dead_letters)
    operations = Operations(ports, lifecycle, health, runs, queues, catalogue, dead_letters, explanation)

    # What is kept going.
    broker_watch = BrokerWatch(broker, store, inbox, peers, clock, telemetry, poll)
    broker_watch.on_loss = queues.of_pipelines.declare_again
    broker_marks = BrokerMarks(broker, broker_watch, names, telemetry, poll)
    sweep = Sweep(outbox, refused, store, inbox, peers, poll)
    lookout = Lookout(watchers, store, plans, results, lambda: peers.is_sole, poll)
    duties: dict[str, Duty] = {"outbox": outbox.run, "lookout": lookout.run}
    if not broker.capabilities.lists_queues:
        duties["remembered queues"] = queues.remembered.run
    if unheard is not None:
        duties["answers"] = unheard.run
    if is_whole:
        duties |= {"engines": peers.run, "sweep": sweep.run, "last looks": last_looks.run}
        duties["retention"] = RunRetention(store, clock, telemetry, settings.store.retention_days).run
        if ports.objects is not None:
            duties["janitor"] = ResultCleanUp(ports.objects, store, peers, clock).run
        if broker.capabilities.shared:
            duties["broker marks"] = broker_marks.run

    parts = Parts(
        lifecycle=lifecycle,
        health=health,
        operations=operations,
        peers=peers,
        runs=runs,
        queues=queues,
        catalogue=catalogue,
        bridges=bridges,
        consumers=consumers,
        intake=intake,
        timers=timers,
        outbox=outbox,
        sweep=sweep,
        after_commit=after_commit,
        deliveries=deliveries,
        http=http,
        broker_watch=broker_watch,
        broker_marks=broker_marks,
        threads=(threads, reader),
        duties=duties,
    )
    return Engine(settings, ports, parts)


def _queue_parts(
    settings: Settings, ports: Ports, names: QueueNames, catalogue: PipelineCatalogue, threads: ThreadPoolExecutor
) -> QueueParts:
    broker, known = ports.broker, KnownQueues()
    remembered = RememberedQueues(broker, ports.store)
    return QueueParts(
        names=names,
        rules=catalogue.rules,
        known=known,
        limits=NewQueueLimits(broker, known, names, settings.queues, catalogue.destinations),
        looks=QueueLooks(broker, names, ports.clock, threads, settings.bullmq.queues),
        remembered=remembered,
        served=ServedQueues(broker, remembered, names, catalogue.rules),
        of_pipelines=PipelineQueues(broker, catalogue, names, ports.telemetry, known),
    )


def _event_maker(trouble: QueueTrouble, last_looks: LastLooks) -> Callable[[Due], Event]:
    """Return the maker of the events of due timers, with what is known now about queues and brokers."""
    known = trouble.untaken(), last_looks.looks(), trouble.deaf
    return lambda due: RunDue(*known) if due.task is None else TaskDue(due.task, *known)
