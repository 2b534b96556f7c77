"""What can be set: one small frozen section for each concern, each field with its default and its limits.

A field's type says what is allowed; the description in it is what an error message says would be right.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from oraculo.pipeline.bridge_rules import BridgeAllow, BullmqAllow, CeleryAllow
from oraculo.pipeline.bridges import BULLMQ, CELERY
from oraculo.pipeline.definition import DEFAULT_TIMEOUT
from oraculo.pipeline.retry import DEFAULT_RETRY, RetryPolicy
from oraculo.settings.urls import split_urls

DEFAULT_BROKER_URL = "memory://"
DEFAULT_STORE_URL = "sqlite:///.oraculo/oraculo.db"
BUILT_IN_ROUTES: Mapping[str, tuple[str, ...]] = {
    "coleta_completa": ("escavador_youtube", "escavador_blog", "executador_relatorio")
}

_YEAR = 365 * 86400.0
_SECRET = {"secret": True}  # an error message never shows such a value

Text = Annotated[str, Meta(description="a string")]
Secret = Annotated[str, Meta(description="a string", extra=_SECRET)]
Url = Annotated[str, Meta(description="a URL", extra=_SECRET)]  # it may hold a password
Prefix = Annotated[
    str,
    Meta(pattern=r"\A[A-Za-z0-9_.-]{0,64}\Z", description="at most 64 letters, digits, '_', '-' or '.'"),
]
Keys = Annotated[
    tuple[str, ...],
    Meta(description="a list of keys of 16 characters or more, each bare or as reader:KEY", extra=_SECRET),
]
Flag = Annotated[bool, Meta(description="true or false")]
Hosts = Annotated[tuple[str, ...], Meta(description="a list of hosts, addresses and networks")]
Networks = Annotated[tuple[str, ...], Meta(description="a list of addresses and networks")]
Patterns = Annotated[tuple[str, ...], Meta(description="a list of patterns, as escavador_*")]
Names = Annotated[tuple[str, ...], Meta(description="a list of names")]
Route = Annotated[tuple[str, ...], Meta(description="a list of destinations")]
Port = Annotated[int, Meta(ge=0, le=65535, description="a port: a whole number from 0 to 65535")]
Count = Annotated[int, Meta(ge=1, le=10**9, description="a whole number, 1 or more")]
CountOrNone = Annotated[int, Meta(ge=0, le=10**9, description="a whole number, 0 or more")]
Attempts = Annotated[int, Meta(ge=1, le=1000, description="a whole number from 1 to 1000")]
# The most that AMQP can say.
Prefetch = Annotated[int, Meta(ge=1, le=65535, description="a whole number from 1 to 65535")]
Bytes = Annotated[int, Meta(ge=1, le=2**40, description="a number of bytes, 1 or more")]
BytesOrNone = Annotated[int, Meta(ge=0, le=2**40, description="a number of bytes, 0 or more")]
Seconds = Annotated[float, Meta(gt=0, le=_YEAR, description="a number of seconds, more than 0 and at most a year")]
Pause = Annotated[float, Meta(ge=0, le=_YEAR, description="a number of seconds, from 0 to a year")]
Days = Annotated[float, Meta(ge=0, le=36500, description="a number of days, from 0 to 36500")]
Level = Annotated[
    Literal["debug", "info", "warning", "error", "critical"],
    Meta(description="one of debug, info, warning, error, critical"),
]
Format = Annotated[Literal["auto", "json", "console"], Meta(description="one of auto, json, console")]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class BrokerSettings(Section, frozen=True):
    url: Url = DEFAULT_BROKER_URL  # one, or several in order of preference, separated by commas
    prefix: Prefix = ""  # put before every queue's name
    delivery_limit: Count = 20  # deliveries without being handled, after which a message is quarantined
    connect_timeout: Seconds = 3.0  # for one attempt to connect
    publish_timeout: Seconds = 5.0  # until a broker that does not confirm counts as lost
    lease: Seconds = 30.0  # after which what a dead consumer held is delivered to another; RabbitMQ needs none
    silence: Seconds = 15.0  # without a message, after which a consumer must prove that it can hear

    @property
    def urls(self) -> tuple[str, ...]:
        return split_urls(self.url)


class QueueSettings(Section, frozen=True):
    """Which queues the outside may name, and how many new ones. See docs/brokers.md."""

    allow: Patterns = ()  # that requests, pipelines and calls may name; none: all but system queues
    new_per_request: Count = 100  # new queues that one request may name; over it: 422
    new_per_minute: Count = 600  # new queues that requests to one process may name within a minute; over it: 429
    remove_after: Pause = 86400.0  # without use until a queue that was made for a request is removed; 0 keeps all


class StoreSettings(Section, frozen=True):
    url: Url = DEFAULT_STORE_URL  # where state is kept; see docs/stores.md
    patience: Pause = 60.0  # how long a start waits for a store that cannot be reached
    retention_days: Days = 30.0  # ended runs older than this are deleted; 0 keeps them for ever


class ObjectSettings(Section, frozen=True):
    """Where large results rest. See docs/large-results.md."""

    url: Url = ""  # a folder, or an object store by its fsspec URL; empty: a folder beside the SQLite file
    threshold_bytes: BytesOrNone = 256 * 1024  # results larger than this; 0: none
    inline_bytes: BytesOrNone = 32 * 1024 * 1024  # of large results that one aggregate brings along


class ApiSettings(Section, frozen=True):
    host: Text = "127.0.0.1"  # the address to listen on
    port: Port = 8000  # 0: one that is free
    keys: Keys = ()  # when there are some, every call but the health checks and the page that asks for one needs one
    insecure: Flag = False  # without keys: others guard the server, so it answers to any machine and any `Host`
    max_wait: Pause = 300.0  # the longest `Prefer: wait`
    header_timeout: Seconds = 10.0  # for the headers of a request; then 408, and the connection is closed
    keep_alive: Seconds = 5.0  # after which a connection without a request is closed
    write_timeout: Seconds = 120.0  # in which a client must read some of its reply; else the connection is closed
    client_connections: Count = 256  # that one client address may have at a time; over it: 429
    proxies: Networks = ()  # whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed, as 10.0.0.7 or 10.1.0.0/16


class LimitSettings(Section, frozen=True):
    payload_bytes: Bytes = 1024 * 1024  # of a request's payload, and of each destination's; over it: 413
    request_bytes: Bytes = 32 * 1024 * 1024  # of a whole request; over it: 413
    replies_bytes: Bytes = 256 * 1024 * 1024  # of replies over 64 kB that clients are reading; over it: 503
    pipelines: CountOrNone = 1000  # that the API stores; one more: 409
    pipelines_bytes: BytesOrNone = 16 * 1024 * 1024  # of all that the API stores, as JSON; over it: 409


class RunSettings(Section, frozen=True):
    timeout: Seconds = DEFAULT_TIMEOUT  # of a run that does not say its own
    max_attempts: Attempts = DEFAULT_RETRY.max_attempts  # of a task whose step does not say `retry`
    backoff: Pause = DEFAULT_RETRY.backoff  # the longest pause before the second; then doubled each time
    max_backoff: Pause = DEFAULT_RETRY.max_backoff  # where the doubling ends

    @property
    def retry(self) -> RetryPolicy:
        return RetryPolicy(self.max_attempts, self.backoff, self.max_backoff)


class EngineSettings(Section, frozen=True):
    batch: Count = 1000  # inputs decided in one commit
    prefetch: Prefetch = 2000  # messages of a queue that it holds at a time
    cached_tasks: CountOrNone = 200_000  # tasks of hot runs kept in memory; a run itself counts as 2, each kB as 1
    note_linger: Pause = 0.05  # for which a confirmed command waits to be noted; in `oraculo api` while more is sent
    poll: Seconds = 1.0  # how often timers and the outbox look for what another engine left
    lease: Seconds = 6.0  # after which what a dead engine held comes to another; RabbitMQ needs none
    stop_grace: Pause = 10.0  # at a stop, for what is being sent and delivered


class WebhookSettings(Section, frozen=True):
    secret: Secret = ""  # `whsec_` and base64, as Standard Webhooks has it; without one, webhooks go out unsigned
    allow: Hosts = ()  # that webhooks may reach though they are not global, as hooks.intern or 10.1.0.0/16
    timeout: Seconds = 10.0  # for one attempt
    # 49 pauses of up to 2 s, 4 s, … and an hour, each cut at random: they last 20 hours in the median, 16 to 23 nearly
    # always. A receiver may be away for a night.
    max_attempts: Attempts = 50  # to deliver one aggregate; with the pauses unless set, 16 to 23 hours
    backoff: Pause = 2.0  # the longest pause before the second attempt; doubled before each further one
    max_backoff: Pause = 3600.0  # where the doubling ends; for a reply queue at 300 s at the latest
    concurrency: Count = 80  # attempts under way at a time, of one receiver at most a quarter; as many to reply queues


class WorkerSettings(Section, frozen=True):
    concurrency: Count = 16  # commands in work at a time
    ahead: CountOrNone = 1  # fetched beside each that may be in work; 0 where they take long: others can have them
    remembered: CountOrNone = 10_000  # answers kept to answer a repeated command again
    stop_grace: Pause = 30.0  # at a stop, for what is in work
    tracebacks: Flag = True  # send and keep the tracebacks of failed handlers; they may hold secrets


class CelerySettings(Section, frozen=True):
    broker_url: Url = ""  # of the Celery app whose tasks are steps; empty: there is no bridge to Celery
    queue: Text = "celery"  # where tasks go that name no queue: the app's `task_default_queue`
    tasks_allow: Patterns = ()  # tasks that runs may reach, as `loja.*`; empty: none
    queues_allow: Patterns = ()  # Celery queues that runs may name besides `queue`; empty: none
    key_prefix: Text = ""  # the app's `global_keyprefix`, when its broker is Redis and it has one
    redis_priority: Flag = False  # on Redis, tasks get kombu's priority 9 to 0 for `prioridade` 0 to 9
    apps: Names = ()  # worker apps, as module:app, whose commands `celery -A oraculo.celery_app worker` answers
    events: Flag = True  # ask the workers for task events, as Flower does: they say why a task failed

    @property
    def allow(self) -> CeleryAllow:
        return CeleryAllow(self.tasks_allow, self.queues_allow, self.queue)


class BullmqSettings(Section, frozen=True):
    url: Url = ""  # of the Redis that BullMQ uses; empty: there is no bridge to BullMQ
    prefix: Text = "bull"  # of BullMQ's keys
    queues: Names = ()  # commands for these queues of ours go on to the BullMQ queues of the same names
    queues_allow: Patterns = ()  # BullMQ queues that runs may reach by `bullmq://`, as `images-*` or `queue:job`
    priority: Flag = True  # jobs get BullMQ's priority 10 to 1 for `prioridade` 0 to 9; `false`: none
    entry: Text = "orchestrator-queue"  # jobs of this BullMQ queue start pipelines; `entry = ""` in the file: none do
    legacy: Flag = False  # the workers use `bull` 3 or 4, not `bullmq`
    keep: Seconds = 86400.0  # how long ended jobs of ours, and what they answered, stay in that Redis
    concurrency: Count = 100  # jobs of the entry whose runs one engine follows at a time
    lock: Seconds = 30.0  # after which a job of the entry whose engine died is taken over by another

    @property
    def allow(self) -> BullmqAllow:
        return BullmqAllow(self.queues_allow, self.legacy)


class LogSettings(Section, frozen=True):
    level: Level = "info"  # what is less grave is not told
    format: Format = "auto"  # `json`, `console`, or `auto`: console on a terminal


class Settings(Section, frozen=True):
    broker: BrokerSettings = BrokerSettings()
    queues: QueueSettings = QueueSettings()
    store: StoreSettings = StoreSettings()
    objects: ObjectSettings = ObjectSettings()
    api: ApiSettings = ApiSettings()
    limits: LimitSettings = LimitSettings()
    runs: RunSettings = RunSettings()
    engine: EngineSettings = EngineSettings()
    webhook: WebhookSettings = WebhookSettings()
    worker: WorkerSettings = WorkerSettings()
    celery: CelerySettings = CelerySettings()
    bullmq: BullmqSettings = BullmqSettings()
    log: LogSettings = LogSettings()
    pipelines: Text = ""  # a folder of pipeline files; empty: only the built-in ones and those put by the API
    rotas: dict[str, Route] = {}

    @property
    def engine_lease(self) -> float:
        return min(self.engine.lease, self.broker.lease)

    @property
    def bridges_allow(self) -> Mapping[str, BridgeAllow]:
        """What runs may reach behind each bridge, by its kind."""
        return {CELERY: self.celery.allow, BULLMQ: self.bullmq.allow}

    @property
    def routes(self) -> dict[str, tuple[str, ...]]:
        return {**BUILT_IN_ROUTES, **self.rotas}


def split_list(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list, as the environment writes one."""
    return tuple(part for piece in text.split(",") if (part := piece.strip()))
