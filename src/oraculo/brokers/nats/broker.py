"""`nats://`: queues on NATS JetStream. How they lie there is told in `layout`.

A message is the server's until it is acked. Moving one (to the quarantine, or back) is: publish it at its new place,
wait for the confirm, remove it from the old. A crash in between leaves a duplicate, never a hole; an id lets JetStream
drop the duplicate when the move is done again soon.

A connection that broke is opened again by the next call; all calls share one attempt. Then the streams that were used
before are looked at: one that is gone, or was made anew, had messages that were confirmed, and counts as a loss. Those
to which only replies were sent are not: a client may delete its own.

A queue that does not work (its stream has no leader, or cannot be made, or the account may not send to it) holds up no
other: what was confirmed of a call is told, and a queue that said nothing is left alone for a while.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from oraculo.brokers.address import Address, no_node, read_address
from oraculo.brokers.age import warning_of_age
from oraculo.brokers.nats.appetite import Appetite
from oraculo.brokers.nats.births import Births
from oraculo.brokers.nats.connection import Connection
from oraculo.brokers.nats.consumer import FAREWELL, Letter, NatsConsumer, Terms, give_back
from oraculo.brokers.nats.dead_letters import DeadLetters
from oraculo.brokers.nats.declare import LOOK_SHARE, Maker
from oraculo.brokers.nats.given_back import GivenBack
from oraculo.brokers.nats.layout import (
    agreed_terms,
    is_queue,
    letter_headers,
    name_fault,
    pause_told,
    queue_of,
    stream_of,
)
from oraculo.brokers.nats.outgoing import Refusals, request_of
from oraculo.brokers.nats.replies import UNANSWERED, ApiError, Request
from oraculo.brokers.nats.sending import Sender
from oraculo.core.chunks import pages
from oraculo.errors import BrokerError, BrokerUnavailable, Fault, InvalidSettings, QueueDown, QueueUnavailable
from oraculo.ports.broker import BrokerStatus, Capabilities, Outgoing, Receipt
from oraculo.ports.broker_admin import DeadLetter, FullBroker, QueueState
from oraculo.ports.clock import Clock, SystemClock
from oraculo.wire.naming import dlq_name, is_dlq, shown, source_name

DEFAULT_PORT = 4222
OLDEST = (2, 10)
MADE_TOGETHER = 32  # queues
LONGEST = 12  # times its timeout: so long a publish may take at most, though confirms drip in
MOST_ORPHANS = 100_000  # about as many deliveries are given back after a break; more wait for the end of their lease
_CLOSED = "the NATS broker is closed: call start() first"
_SYSTEM_CLOCK = SystemClock()


class NatsBroker:
    """The broker behind `nats://[user:password@ | token@]host[:port]` and `tls://…`. Of several hosts, which are the
    servers of one cluster, it is connected to one that answers.

    Parameters of the URL: `credentials`, the path of a .creds file; `replicas`, how many servers of a cluster keep each
    stream that is made here.

    `delivery_limit`: how often a message is delivered, at most, before it goes to the dead letters.
    `lease`: seconds after which a delivery that was neither settled nor extended is delivered again; `leases`: for
    queues that have another.
    `heartbeat`: seconds; a subscription from which nothing is heard for three of them is lost.
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
        self._delivery_limit = delivery_limit
        self._heartbeat = heartbeat
        self._connect_timeout = connect_timeout
        self._publish_timeout = publish_timeout
        self._look_patience = publish_timeout * LOOK_SHARE
        self._started = False
        self._node = self._address  # of the cluster, if it is one: where it is connected, or tries to be
        self._failures = 0  # to connect: each time it goes on to the next server
        self._was_connected = False  # since it was started
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._consumers: set[NatsConsumer] = set()
        self._retiring: set[asyncio.Task[None]] = set()
        self._orphans: dict[str, float] = {}  # what was held when a connection broke, and when each lease ends
        self._given_back = GivenBack(clock)
        self._appetite = Appetite()
        self._births = Births(lambda: {stream_of(consumer.queue) for consumer in self._consumers})
        replicas = _replicas(self._address.parameters.get("replicas", "1"))
        self._maker = Maker(self._births, replicas=replicas, lease=lease, leases=leases, patience=publish_timeout)
        self._sender = Sender(self._maker, self._births, patience=publish_timeout)
        self._dead_letters = DeadLetters(lambda: self._calling(publish_timeout), self._sender.send, self._look_patience)
        self._trouble: str | None = _CLOSED

    @property
    def capabilities(self) -> Capabilities:
        """JetStream counts pulls that wait, which are not the consumers: one may have many, or none while it works."""
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
            return [BrokerStatus(self.name, self._trouble, self._births.losses)]
        trouble, stuck = self._trouble or self._connection.full(), self._connection.stuck()
        return [BrokerStatus(self.name, trouble, self._births.losses, stuck=tuple(stuck.items()))]

    def behind(self) -> Sequence[FullBroker]:
        return [self]

    async def start(self) -> None:
        """Raises BrokerUnavailable when the server cannot be reached; the next call tries again. Raises BrokerError
        when it lets nobody in with this URL; if it has before, it counts as away."""
        self._started = True
        async with self._calling(self._connect_timeout * len(self._address.hosts)):
            pass

    async def check(self) -> str:
        async with self._calling(self._publish_timeout) as connection:
            await connection.ask("INFO")
        if why := connection.full():
            raise BrokerUnavailable(why)
        version = connection.version
        return f"NATS {version} at {connection.address.place}{warning_of_age(version, OLDEST)}"

    async def close(self) -> None:
        self._started = False
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        farewells = [consumer.close() for consumer in self._consumers]
        await asyncio.gather(*farewells, *self._retiring, return_exceptions=True)
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._hang_up(connection)
        self._orphans.clear()
        self._was_connected = False
        self._trouble = _CLOSED

    async def _hang_up(self, connection: Connection) -> None:
        """After the last acks were read by the server, where it still reads."""
        try:
            async with asyncio.timeout(FAREWELL):
                await connection.barrier()
        except (TimeoutError, BrokerUnavailable):
            pass
        await connection.close()

    # -- the connection -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _calling(self, seconds: float, longest: int = 1) -> AsyncIterator[Connection]:
        """A connection for one call, which may take that long, or `longest` times that if it sees to the silence of the
        server itself. Notes how it went."""
        connection, heard = None, 0
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(began + seconds) as limit:
                connection = await self._connected()
                limit.reschedule(began + seconds * longest)
                heard = connection.heard
                connection.forget_complaint()
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
        """A server that said nothing at all is given up: else what it does not read would pile up here."""
        if connection is None:
            return self._no_answer(self._node, seconds)
        if connection.complaint:
            return BrokerError(f"{connection.place} does not allow it: {connection.complaint}")
        connection.forget_stuck()
        connection.made.clear()  # perhaps a stream is gone and somebody else listens on its subject
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
            attempt.exception()  # whoever waits has it; if nobody does, it must not be reported as forgotten

    async def _connect(self) -> Connection:
        """Tries each server of the cluster once, beginning with the one that it was at. A login that was good before is
        refused by a server in trouble: to whoever has a message to send that must not look as if the message were bad.
        """
        failures: list[BrokerError] = []
        for _ in self._address.hosts:
            self._node = self._address.turned(self._failures)
            self._failures += 1  # also when it is cancelled meanwhile: then it may be the one that says nothing
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
        connection = Connection(address, self._connection_lost)
        try:
            async with asyncio.timeout(self._connect_timeout):
                await connection.open(self._connect_timeout)
            await self._births.compare(connection, self._connect_timeout)
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
        self._appetite.note_connected()
        self._was_connected = True
        return connection

    def _connection_lost(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None
            if connection.lost:
                self._appetite.note_lost()
        if connection.lost:
            self._trouble = connection.lost
            for consumer in [each for each in self._consumers if each.connection is connection]:
                consumer.lose(connection.lost)

    # -- what consumers ask and tell ------------------------------------------------------------------------------

    @property
    def pull_bytes(self) -> int:
        return self._appetite.bytes

    def note_trouble(self, trouble: str | None) -> None:
        self._trouble = trouble

    def note_given_back(self, queue: str, sequence: int, delay: float) -> None:
        self._given_back.note(queue, sequence, delay)

    def note_seen(self, queue: str, sequences: Iterable[int]) -> None:
        self._given_back.forget(queue, sequences)

    def lost(self, consumer: NatsConsumer) -> None:
        """The caller may never close it, so what it held is given back now, or when there is a connection again."""
        self._consumers.discard(consumer)
        if consumer.connection.lost:
            held = consumer.abandon()
            if len(self._orphans) < MOST_ORPHANS:
                self._orphans |= held
            return
        retiring = asyncio.create_task(consumer.give_back(), name="retiring a lost consumer")
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    def closed(self, consumer: NatsConsumer) -> None:
        self._consumers.discard(consumer)

    # -- the queues -----------------------------------------------------------------------------------------------

    async def declare(self, queues: Sequence[str]) -> None:
        sources = list(dict.fromkeys(source_name(queue) for queue in queues))
        for fault in filter(None, map(name_fault, sources)):
            raise BrokerError(fault)
        without_leader: list[QueueUnavailable] = []
        for some in pages(sources, MADE_TOGETHER):  # each part has its own time: a disk may be slow
            async with self._calling(self._publish_timeout) as connection:
                for unmade in (await self._maker.make(connection, some)).values():
                    if not isinstance(unmade, QueueUnavailable):
                        raise unmade
                    without_leader.append(unmade)
        if without_leader:  # keeps no other from being made
            raise without_leader[0]

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        """Raises QueueDown when nobody can tell of any that are named, since their streams have no leader."""
        if names is None:
            counts, unknown = await self._all_counts()
            sources = [name for name in dict.fromkeys(map(source_name, counts)) if name not in unknown]
        else:
            counts, unknown = await self._counts([name for name in names if not name_fault(name)])
            known = set(map(source_name, counts)) - unknown
            sources = [name for name in dict.fromkeys(names) if name in known]
        async with self._calling(self._publish_timeout) as connection:
            calls = ((f"CONSUMER.INFO.{stream_of(name)}.{stream_of(name)}", None) for name in sources)
            consumers = await connection.ask_many(calls, self._look_patience)
        return [self._state(name, counts, told) for name, told in zip(sources, consumers, strict=True)]

    async def _all_counts(self) -> tuple[dict[str, int], set[str]]:
        """How many messages lie in each of our streams, and those of which nobody can tell, since they have no leader.
        Each page has its own time: for one that has none a cluster waits for four seconds."""
        counts, unknown = dict[str, int](), set[str]()
        offset = total = 0
        while not offset or offset < total:
            async with self._calling(self._publish_timeout) as connection:
                page = await connection.ask("STREAM.LIST", {"offset": offset})
            streams, total = page.get("streams") or [], page["total"]
            counts |= {queue_of(s["config"]["name"]): s["state"]["messages"] for s in streams if is_queue(s["config"])}
            unknown |= set(map(queue_of, page.get("missing") or ()))
            offset += page["limit"]
        return counts, unknown

    async def _counts(self, names: Sequence[str]) -> tuple[dict[str, int], set[str]]:
        wanted = list(dict.fromkeys(name for each in names for name in (each, dlq_name(each))))
        counts, unknown = dict[str, int](), set[str]()
        async with self._calling(self._publish_timeout) as connection:
            looks = ((f"STREAM.INFO.{stream_of(name)}", None) for name in wanted)
            for name, answer in zip(wanted, await connection.ask_many(looks, self._look_patience), strict=True):
                if not isinstance(answer, ApiError):
                    counts[name] = answer["state"]["messages"]
                elif answer is UNANSWERED:
                    unknown.add(name)
                elif not answer.is_missing:
                    raise connection.refusal(answer, f"to tell of {name}")
        if names and unknown.issuperset(names):
            raise QueueDown(f"{self.name} does not tell of {', '.join(names)}: the stream may have no leader")
        return counts, unknown

    def _state(self, queue: str, counts: dict[str, int], consumer: dict[str, Any] | ApiError) -> QueueState:
        """As its consumer tells: the stream was asked before it, and what was acked since would count as ready. Where
        there is no consumer, nobody holds anything; where nothing is told of it, nobody knows."""
        stored, letters = counts.get(queue, 0), counts.get(dlq_name(queue), 0)
        if isinstance(consumer, ApiError):
            return QueueState(queue, stored, 0 if consumer.is_missing else None, letters)
        given_back = self._given_back.count(queue, consumer)
        ready = min(consumer["num_pending"], stored) + given_back  # some servers count more than there is
        delayed = min(self._given_back.delayed(queue), given_back)
        unacked, paused = consumer["num_ack_pending"] - given_back, pause_told(consumer)
        return QueueState(queue, ready, unacked, letters, delayed=delayed, paused=paused)

    # -- publishing -----------------------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        async with self._calling(self._publish_timeout, LONGEST) as connection:
            refusals = Refusals()
            requests = [request_of(message, connection.max_payload) for message in messages]
            await self._sender.send(connection, [each for each in requests if isinstance(each, Request)], refusals)
            if refusals.are_all_down(len(messages)):
                async with asyncio.timeout(self._publish_timeout):
                    await self._require_work(connection)
        return [refusals.receipt(request, self._taken) for request in requests]

    @staticmethod
    async def _require_work(connection: Connection) -> None:
        """A cluster without its majority answers, and does no work."""
        try:
            await connection.ask("INFO")
        except BrokerError:
            connection.forget_stuck()
            raise

    async def bury(self, letters: Sequence[Letter]) -> None:
        async with self._calling(self._publish_timeout, LONGEST) as connection:
            room = connection.max_payload
            refusals = Refusals()
            requests = [
                Request(
                    dlq_name(letter.queue),
                    letter.body,
                    letter_headers(letter.reason, letter.redeliveries, room - len(letter.body), letter.id),
                )
                for letter in letters
            ]
            await self._sender.send(connection, requests, refusals)
        refusals.raise_any()

    # -- consuming ------------------------------------------------------------------------------------------------

    async def consume(self, queue: str, *, prefetch: int) -> NatsConsumer:
        if prefetch < 1:
            raise BrokerError(f"prefetch: must be at least 1, got {prefetch}")
        if fault := name_fault(queue):
            raise BrokerError(fault)
        is_quarantine = is_dlq(queue)
        limit = None if is_quarantine else self._delivery_limit
        async with self._calling(self._publish_timeout) as connection:
            _raise_first(await self._maker.make(connection, [source_name(queue)]))
            if is_quarantine:
                _raise_first(await self._maker.make_consumers(connection, [queue]))
            terms = Terms(prefetch, self._maker.lease_of(queue), self._heartbeat, limit)
            (told,) = await connection.ask_many([(f"CONSUMER.INFO.{stream_of(queue)}.{stream_of(queue)}", None)])
            if not isinstance(told, ApiError):  # if it is gone again, the first pull will tell
                terms = terms._replace(**agreed_terms(told["config"]))
            consumer = NatsConsumer(self, connection, queue, terms)
            consumer.open()
            self._consumers.add(consumer)
        return consumer

    # -- dead letters ---------------------------------------------------------------------------------------------

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
        async with self._calling(self._publish_timeout) as connection:
            await self._maker.remove(connection, sources)
        for source in sources:
            self._given_back.forget_all(source)

    async def remove_unused(self, queues: Sequence[str]) -> Sequence[str]:
        """Closes the streams to new messages before it looks a last time: who publishes meanwhile hears that the queue
        is full, and tries again."""
        gone: list[str] = []
        async with self._calling(self._publish_timeout, LONGEST) as connection:
            for queue in queues:
                if not name_fault(queue) and await self._maker.is_removed_unused(connection, source_name(queue)):
                    self._given_back.forget_all(source_name(queue))
                    gone.append(queue)
        return gone


def _raise_first(faults: Mapping[str, BrokerError]) -> None:
    for fault in faults.values():
        raise fault


def _replicas(text: str) -> int:
    if text not in ("1", "2", "3", "4", "5"):
        raise InvalidSettings(Fault("ORACULO_BROKER_URL", f"replicas: must be 1 to 5, got {shown(text)}"))
    return int(text)
