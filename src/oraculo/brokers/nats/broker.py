"""`nats://`: queues on NATS JetStream. `layout` has the streams and consumers behind a queue.

The server keeps a message until it is acked. A message is moved, to the dead letters or back, in this order: publish it
at its new place, wait for the confirm, remove it from the old place. A crash in between leaves a duplicate, and never
loses a message. An id lets JetStream drop the duplicate when the move is repeated soon.

The next call opens a connection that broke; all calls share one attempt.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType

from oraculo.brokers.address import Address, no_node, read_address
from oraculo.brokers.age import warning_of_age
from oraculo.brokers.nats.connection import Connection
from oraculo.brokers.nats.consumer import FAREWELL, NatsConsumer, Terms, give_back
from oraculo.brokers.nats.dead_letters import NatsDeadLetters
from oraculo.brokers.nats.declare import QueueMaker
from oraculo.brokers.nats.layout import is_queue, name_fault, pause_of, queue_of
from oraculo.brokers.nats.publisher import JetStreamPublisher, request_of
from oraculo.brokers.nats.removal import delete
from oraculo.brokers.nats.replies import UNANSWERED, ApiAnswer, ApiError, Request
from oraculo.core.chunks import pages
from oraculo.errors import BrokerError, BrokerUnavailable, Fault, InvalidSettings, QueueDown, QueueUnavailable
from oraculo.ports.broker import BrokerStatus, Capabilities, Outgoing, Receipt
from oraculo.ports.broker_admin import DeadLetter, FullBroker, QueueState
from oraculo.ports.clock import Clock, SystemClock
from oraculo.wire.naming import dlq_name, is_dlq, shown, source_name

DEFAULT_PORT = 4222
OLDEST = (2, 10)  # the oldest supported version
MADE_TOGETHER = 32  # queues
LONGEST = 12  # timeouts: the most time for a call whose confirms come in slowly
MOST_ORPHANS = 100_000  # deliveries given back after a lost connection, about; the rest wait for the end of their lease
MOST_DELAYED = 10_000  # deliveries that wait for a delay; more are counted as unacked
_CLOSED = "the NATS broker is closed: call start() first"
_SYSTEM_CLOCK = SystemClock()


class NatsBroker:
    """The broker behind `nats://[user:password@ | token@]host[:port]` and `tls://…`.

    Several hosts are the servers of one cluster; it is connected to one that answers. Parameters of the URL:
    `credentials`, the path of a .creds file; `replicas`, how many servers keep each stream that is made here.

    `delivery_limit`: how often a message is delivered, at most, before it goes to the dead letters.
    `lease`: seconds after which a delivery that was neither settled nor extended is delivered again.
    `leases`: the leases of queues that have another.
    `heartbeat`: seconds between two heartbeats of a subscription, which is lost after three of them in silence.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "nats",
        clock: Clock = _SYSTEM_CLOCK,
        delivery_limit: int = 20,
        lease: float = 60.0,
        leases: Mapping[str, float] = MappingProxyType({}),
        heartbeat: float = 0.7,
        connect_timeout: float = 3.0,
        publish_timeout: float = 5.0,
    ) -> None:
        known = frozenset({"credentials", "replicas"})
        self._address = read_address(url, port=DEFAULT_PORT, known=known, is_cluster=True)
        self.name = name
        self._taken = Receipt(name)
        self._clock = clock
        self._delivery_limit = delivery_limit
        self._heartbeat = heartbeat
        self._connect_timeout = connect_timeout
        self._timeout = publish_timeout
        self._started = False
        self._node = self._address  # the server of the cluster that was tried last
        self._failures = 0  # attempts to connect that failed; each moves on to the next server
        self._was_connected = False  # since it was started
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._consumers: set[NatsConsumer] = set()
        self._orphans: dict[str, float] = {}  # deliveries held when a connection broke, and when each lease ends
        # Delayed deliveries, which JetStream counts as unacked: the queue of each, and when its delay ends.
        self._delayed: deque[tuple[str, float]] = deque(maxlen=MOST_DELAYED)
        replicas = _replicas(self._address.parameters.get("replicas", "1"))
        self._maker = QueueMaker(replicas=replicas, lease=lease, leases=leases)
        self._publisher = JetStreamPublisher(self._maker, publish_timeout)
        self._dead_letters = NatsDeadLetters(self._calling, self._publisher)
        self._trouble: str | None = _CLOSED

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of JetStream. It counts waiting pulls, not consumers, which may have many or none."""
        return Capabilities(
            durable=True,
            shared=True,
            priorities=False,
            counts_consumers=False,
            peeks=True,
            drops_repeats=True,
            max_message=self._connection.max_payload if self._connection is not None else None,
        )

    def statuses(self) -> Sequence[BrokerStatus]:
        if self._connection is None:
            return [BrokerStatus(self.name, self._trouble)]
        queues = self._connection.queues
        return [BrokerStatus(self.name, self._trouble or queues.full(), stuck=tuple(queues.stuck().items()))]

    def behind(self) -> Sequence[FullBroker]:
        return [self]

    async def start(self) -> None:
        """Connect. Raises BrokerUnavailable when the server cannot be reached; the next call tries again.

        Raises BrokerError when the server refuses this URL.
        """
        self._started = True
        async with self._calling(self._connect_timeout * len(self._address.hosts)):
            pass

    async def check(self) -> str:
        async with self._calling() as connection:
            await connection.ask("INFO")
        if why := connection.queues.full():
            raise BrokerUnavailable(why)
        version = connection.version
        return f"NATS {version} at {connection.address.place}{warning_of_age(version, OLDEST)}"

    async def close(self) -> None:
        self._started = False
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        farewells = [consumer.close() for consumer in self._consumers]
        await asyncio.gather(*farewells, return_exceptions=True)
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(TimeoutError, BrokerUnavailable):
                async with asyncio.timeout(FAREWELL):
                    await connection.barrier()  # so that the last acks are read
            await connection.close()
        self._orphans.clear()
        self._was_connected = False
        self._trouble = _CLOSED

    # -- the connection -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _calling(self, seconds: float | None = None, longest: int = 1) -> AsyncIterator[Connection]:
        """Yield a connection for one call, and note how the call went.

        The call may take `seconds`. A call that notices a silent server by itself may take `longest` times that.
        """
        seconds = seconds or self._timeout
        connection, heard = None, 0
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(began + seconds) as limit:
                connection = await self._connected()
                limit.reschedule(began + seconds * longest)
                heard = connection.heard
                connection.complaint = ""
                yield connection
        except TimeoutError as timeout:
            error = self._silence(connection, heard, seconds)
            self._trouble = str(error)
            raise error from timeout
        except BrokerError as error:
            if connection is None or (isinstance(error, BrokerUnavailable) and not isinstance(error, QueueUnavailable)):
                self._trouble = str(error)
            raise
        if self._connection is connection:  # it may have broken since
            self._trouble = None

    def _silence(self, connection: Connection | None, heard: int, seconds: float) -> BrokerError:
        """Return the error for a call that took too long. Close the connection if the server was silent meanwhile."""
        if connection is None:
            return self._no_answer(self._node, seconds)
        if connection.complaint:
            return BrokerError(f"{connection.place} does not allow it: {connection.complaint}")
        connection.queues.forget_stuck()
        connection.queues.forget_made()  # perhaps a stream is gone and somebody else listens on its subject
        if connection.heard == heard:
            connection.fail(f"it was silent for {seconds:g} s")
        return BrokerUnavailable(f"{connection.place} did not confirm in {seconds:g} s")

    @staticmethod
    def _no_answer(address: Address, seconds: float) -> BrokerUnavailable:
        return BrokerUnavailable(f"NATS at {address.place} did not answer in {seconds:g} s")

    async def _connected(self) -> Connection:
        if not self._started:
            raise BrokerUnavailable(_CLOSED)
        if self._connection is not None:
            return self._connection
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name=f"connecting to {self._address}")
            self._connecting.add_done_callback(self._attempt_ended)
        try:
            return await asyncio.shield(self._connecting)
        except asyncio.CancelledError:
            if not self._started:  # the attempt was cancelled, not this call
                raise BrokerUnavailable(_CLOSED) from None
            raise

    def _attempt_ended(self, attempt: "asyncio.Task[Connection]") -> None:
        self._connecting = None
        if not attempt.cancelled():
            attempt.exception()  # so that asyncio does not report the error when no call waits for it

    async def _connect(self) -> Connection:
        """Try each server of the cluster once, beginning with the one that was used last.

        A server in trouble may refuse a login that was good before. Such a server counts as away: any other error would
        look as if a message were bad.
        """
        failures: list[BrokerError] = []
        for _ in self._address.hosts:
            self._node = self._address.turned(self._failures)
            self._failures += 1  # before the attempt, because a silent server gets the attempt cancelled
            try:
                connection = await self._connect_to(self._node)
            except BrokerError as error:
                failures.append(error)
            else:
                self._failures -= 1
                return connection
        refusal = no_node(failures)
        raise BrokerUnavailable(str(refusal)) if self._was_connected else refusal

    async def _connect_to(self, address: Address) -> Connection:
        connection = Connection(address, self._connection_lost, self._timeout)
        try:
            async with asyncio.timeout(self._connect_timeout):
                await connection.open(self._connect_timeout)
            if connection.lost:
                raise BrokerUnavailable(connection.lost)
        except BaseException as error:
            await connection.close()
            if isinstance(error, TimeoutError):
                raise self._no_answer(address, self._connect_timeout) from error
            raise
        orphans, self._orphans = self._orphans, {}
        give_back(connection, orphans)
        self._connection = connection
        self._was_connected = True
        return connection

    def _connection_lost(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None
        if connection.lost:
            self._trouble = connection.lost
            for consumer in [each for each in self._consumers if each.connection is connection]:
                consumer.lose(connection.lost)

    # -- calls of consumers ---------------------------------------------------------------------------------------

    def note_trouble(self, trouble: str | None) -> None:
        self._trouble = trouble

    def note_delayed(self, queue: str, delay: float) -> None:
        if delay > 0:
            self._delayed.append((queue, self._clock.now() + delay))

    def lost(self, consumer: NatsConsumer) -> None:
        """Give back what a lost consumer held, now or after the next connect. Its owner may never close it."""
        self._consumers.discard(consumer)
        held = consumer.abandon()
        if not consumer.connection.lost:
            give_back(consumer.connection, held)
        elif len(self._orphans) < MOST_ORPHANS:
            self._orphans |= held

    def closed(self, consumer: NatsConsumer) -> None:
        self._consumers.discard(consumer)

    async def store_dead_letters(self, letters: Sequence[Request]) -> Sequence[BrokerError | None]:
        async with self._calling(longest=LONGEST) as connection:
            return await self._publisher.send(connection, letters)

    # -- publishing and consuming ---------------------------------------------------------------------------------

    async def declare(self, queues: Sequence[str]) -> None:
        sources = list(dict.fromkeys(source_name(queue) for queue in queues))
        for fault in filter(None, map(name_fault, sources)):
            raise BrokerError(fault)
        without_leader: list[QueueUnavailable] = []
        for some in pages(sources, MADE_TOGETHER):  # each page has its own timeout, because a disk may be slow
            async with self._calling() as connection:
                for unmade in (await self._maker.make(connection, some)).values():
                    if not isinstance(unmade, QueueUnavailable):
                        raise unmade
                    without_leader.append(unmade)
        if without_leader:  # raised last, so that all other queues are made
            raise without_leader[0]

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        async with self._calling(longest=LONGEST) as connection:
            requests = [request_of(message, connection.max_payload) for message in messages]
            sendable = [request for request in requests if isinstance(request, Request)]
            sent = iter(await self._publisher.send(connection, sendable))
            errors = [next(sent) if isinstance(request, Request) else request for request in requests]
            if all(errors) and any(isinstance(error, QueueDown) for error in errors):
                await self._require_work(connection)
        return [self._taken if error is None else Receipt(error=error) for error in errors]

    @staticmethod
    async def _require_work(connection: Connection) -> None:
        """Raise BrokerUnavailable for a cluster that has lost its majority. It still answers, but does no work."""
        try:
            await connection.ask("INFO")
        except BrokerError:
            connection.queues.forget_stuck()
            raise

    async def consume(self, queue: str, *, prefetch: int) -> NatsConsumer:
        if prefetch < 1:
            raise BrokerError(f"prefetch: must be at least 1, got {prefetch}")
        if fault := name_fault(queue):
            raise BrokerError(fault)
        async with self._calling() as connection:
            faults = await self._maker.make(connection, [source_name(queue)])
            if is_dlq(queue):
                faults |= await self._maker.make_consumers(connection, [queue])
            for unmade in faults.values():
                raise unmade
            limit = None if is_dlq(queue) else self._delivery_limit
            terms = Terms(prefetch, self._maker.lease_of(queue), self._heartbeat, limit)
            consumer = NatsConsumer(self, connection, queue, terms)
            consumer.open()
            self._consumers.add(consumer)
        return consumer

    # -- administration -------------------------------------------------------------------------------------------

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        """Return the states of queues. Raises QueueDown when the streams of all named queues have no leader."""
        if names is None:
            counts, unknown = await self._all_counts()
            sources = [name for name in dict.fromkeys(map(source_name, counts)) if name not in unknown]
        else:
            counts, unknown = await self._counts([name for name in names if not name_fault(name)])
            known = set(map(source_name, counts)) - unknown
            sources = [name for name in dict.fromkeys(names) if name in known]
        async with self._calling() as connection:
            consumers = await connection.consumers(sources)
        now = self._clock.now()
        delayed = Counter(queue for queue, until in self._delayed if until > now)
        return [_state(name, counts, consumer, delayed[name]) for name, consumer in consumers.items()]

    async def _all_counts(self) -> tuple[dict[str, int], set[str]]:
        """Return the number of messages by queue, and the queues whose number is unknown because they have no leader.

        Each page has its own timeout, because a cluster waits four seconds for a stream without a leader.
        """
        counts, unknown = dict[str, int](), set[str]()
        offset = total = 0
        while not offset or offset < total:
            async with self._calling() as connection:
                page = await connection.ask("STREAM.LIST", {"offset": offset})
            streams, total = page.get("streams") or [], page["total"]
            counts |= {queue_of(s["config"]["name"]): s["state"]["messages"] for s in streams if is_queue(s["config"])}
            unknown |= set(map(queue_of, page.get("missing") or ()))
            offset += page["limit"]
        return counts, unknown

    async def _counts(self, names: Sequence[str]) -> tuple[dict[str, int], set[str]]:
        counts, unknown = dict[str, int](), set[str]()
        async with self._calling() as connection:
            streams = await connection.streams([each for name in names for each in (name, dlq_name(name))])
            for name, stream in streams.items():
                if not isinstance(stream, ApiError):
                    counts[name] = stream["state"]["messages"]
                elif stream is UNANSWERED:
                    unknown.add(name)
                elif not stream.is_missing:
                    raise connection.refusal(stream, f"to show the stream of {name}")
        if names and unknown.issuperset(names):
            raise QueueDown(f"{self.name} does not answer for {', '.join(names)}: the stream may have no leader")
        return counts, unknown

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        return await self._dead_letters.peek(queue, limit=limit, after=after)

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        await self._dead_letters.look_through(queue, see, ids)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        return await self._dead_letters.redrive(queue, ids)

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        return await self._dead_letters.discard(queue, ids)

    async def remove(self, queues: Sequence[str]) -> None:
        sources = [source for source in dict.fromkeys(map(source_name, queues)) if not name_fault(source)]
        async with self._calling() as connection:
            await delete(connection, sources)


def _state(queue: str, counts: Mapping[str, int], consumer: ApiAnswer, delayed: int) -> QueueState:
    """Return the counts of a queue. Its consumer was asked after its stream, so the consumer's counts are newer.

    A missing consumer holds no messages. When the server does not describe the consumer, the number is unknown.
    """
    stored, letters = counts.get(queue, 0), counts.get(dlq_name(queue), 0)
    if isinstance(consumer, ApiError):
        return QueueState(queue, stored, 0 if consumer.is_missing else None, letters)
    delayed = min(delayed, consumer["num_ack_pending"])
    ready = min(consumer["num_pending"], stored) + delayed  # some servers count more than there is
    unacked = consumer["num_ack_pending"] - delayed
    return QueueState(queue, ready, unacked, letters, delayed=delayed, paused=pause_of(consumer))


def _replicas(text: str) -> int:
    if text not in ("1", "2", "3", "4", "5"):
        raise InvalidSettings(Fault("ORACULO_BROKER_URL", f"replicas: must be 1 to 5, got {shown(text)}"))
    return int(text)
