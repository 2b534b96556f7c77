"""The sections of the settings: each field with its type, default and limits.

The comment beside a field is its line in docs/reference/settings.md. Error texts show the description in its type.
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
# The largest that AMQP can hold.
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
    url: Url = DEFAULT_BROKER_URL  # one URL, or several in order of preference, separated by commas
    prefix: Prefix = ""  # put before the name of every queue
    delivery_limit: Count = 20  # unhandled deliveries after which a message becomes a dead letter
    connect_timeout: Seconds = 3.0  # longest attempt to connect
    publish_timeout: Seconds = 5.0  # longest wait for a confirm; then the broker counts as lost
    lease: Seconds = 30.0  # time after which another consumer gets what a dead one held; not on RabbitMQ
    silence: Seconds = 15.0  # time without a message after which a consumer must prove that it hears

    @property
    def urls(self) -> tuple[str, ...]:
        return split_urls(self.url)


class QueueSettings(Section, frozen=True):
    """The queues that callers may name, and how many new ones."""

    allow: Patterns = ()  # queues that requests, pipelines and calls may name; empty: all but system queues
    new_per_request: Count = 100  # new queues that one request may name; more: 422
    new_per_minute: Count = 600  # new queues that all requests to one process may name in a minute; more: 429


class StoreSettings(Section, frozen=True):
    url: Url = DEFAULT_STORE_URL  # where state is kept
    patience: Pause = 60.0  # how long a start waits for a store that cannot be reached
    retention_days: Days = 30.0  # age at which an ended run is deleted; 0: never


class ObjectSettings(Section, frozen=True):
    """The place of large results."""

    url: Url = ""  # a folder, or an object store by its fsspec URL; empty: a folder beside the SQLite file
    threshold_bytes: BytesOrNone = 256 * 1024  # size above which a result is put aside; 0: none is
    inline_bytes: BytesOrNone = 32 * 1024 * 1024  # large results that one aggregate brings along


class ApiSettings(Section, frozen=True):
    host: Text = "127.0.0.1"  # address to listen on
    port: Port = 8000  # port to listen on; 0: a free one
    keys: Keys = ()  # keys of the callers; when set, every call needs one but health checks and `/docs`
    insecure: Flag = False  # serve any machine and any `Host` without keys: a proxy or firewall guards the server
    max_wait: Pause = 300.0  # longest `Prefer: wait`
    header_timeout: Seconds = 10.0  # time for the headers of a request; then 408
    keep_alive: Seconds = 5.0  # time without a request after which a connection is closed
    write_timeout: Seconds = 120.0  # time in which a client must read some of its reply; then the connection is closed
    client_connections: Count = 256  # connections of one client address at a time; more: 429
    proxies: Networks = ()  # proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed


class LimitSettings(Section, frozen=True):
    payload_bytes: Bytes = 1024 * 1024  # a request's payload, and each destination's; more: 413
    request_bytes: Bytes = 32 * 1024 * 1024  # a whole request; more: 413
    replies_bytes: Bytes = 256 * 1024 * 1024  # all replies over 64 kB that clients are reading, together; more: 503
    pipelines: CountOrNone = 1000  # pipelines that the API stores; more: 409
    pipelines_bytes: BytesOrNone = 16 * 1024 * 1024  # all pipelines that the API stores, as JSON; more: 409


class RunSettings(Section, frozen=True):
    timeout: Seconds = DEFAULT_TIMEOUT  # deadline of a run that names none
    max_attempts: Attempts = DEFAULT_RETRY.max_attempts  # attempts of a task whose step names none
    backoff: Pause = DEFAULT_RETRY.backoff  # longest pause before the second attempt; doubled for each further one
    max_backoff: Pause = DEFAULT_RETRY.max_backoff  # where the doubling ends

    @property
    def retry(self) -> RetryPolicy:
        return RetryPolicy(self.max_attempts, self.backoff, self.max_backoff)


class EngineSettings(Section, frozen=True):
    batch: Count = 1000  # inputs decided in one commit
    prefetch: Prefetch = 2000  # messages of one queue that an engine holds at a time
    cached_tasks: CountOrNone = 200_000  # tasks of open runs kept in memory; a run itself counts as 2, each kB as 1
    note_linger: Pause = 0.05  # how long a confirmed command waits to be noted in the store
    poll: Seconds = 1.0  # how often an engine looks for timers and commands that another left
    lease: Seconds = 6.0  # time after which another engine gets what a dead one held; not on RabbitMQ
    stop_grace: Pause = 10.0  # how long a stop waits for sends and deliveries


class WebhookSettings(Section, frozen=True):
    secret: Secret = ""  # signs webhooks, as Standard Webhooks has it: `whsec_` and base64; empty: unsigned
    allow: Hosts = ()  # addresses that webhooks may reach though they are not global, as hooks.intern or 10.1.0.0/16
    timeout: Seconds = 10.0  # longest attempt
    # A receiver may be away for a night: 49 pauses, each cut at random, last 20 hours in the median.
    max_attempts: Attempts = 50  # attempts to deliver one aggregate: 16 to 23 hours, with the default pauses
    backoff: Pause = 2.0  # longest pause before the second attempt; doubled for each further one
    max_backoff: Pause = 3600.0  # where the doubling ends; for reply queues at most 300 s
    concurrency: Count = 80  # attempts under way at a time, a quarter of them for one receiver; as many to reply queues


class WorkerSettings(Section, frozen=True):
    concurrency: Count = 16  # commands in work at a time
    ahead: CountOrNone = 1  # commands fetched for each that may be in work; 0 leaves long ones to other workers
    remembered: CountOrNone = 10_000  # answers kept, to answer a repeated command again
    stop_grace: Pause = 30.0  # how long a stop waits for what is in work
    tracebacks: Flag = True  # send and keep the tracebacks of failed handlers; they may hold secrets


class CelerySettings(Section, frozen=True):
    broker_url: Url = ""  # broker of the Celery app whose tasks are steps; empty: no bridge to Celery
    queue: Text = "celery"  # queue of tasks that name none: the app's `task_default_queue`
    tasks_allow: Patterns = ()  # tasks that runs may reach, as `loja.*`; empty: none
    queues_allow: Patterns = ()  # Celery queues that runs may name besides `queue`; empty: none
    key_prefix: Text = ""  # the app's `global_keyprefix`, when its broker is Redis
    redis_priority: Flag = False  # on Redis, give tasks kombu's priority 9 to 0 for `prioridade` 0 to 9
    apps: Names = ()  # worker apps, as module:app, that `celery -A oraculo.celery_app worker` serves
    events: Flag = True  # ask the workers for task events, which say why a task failed

    @property
    def allow(self) -> CeleryAllow:
        return CeleryAllow(self.tasks_allow, self.queues_allow, self.queue)


class BullmqSettings(Section, frozen=True):
    url: Url = ""  # the Redis that BullMQ uses; empty: no bridge to BullMQ
    prefix: Text = "bull"  # prefix of BullMQ's keys
    queues: Names = ()  # queues whose commands go on to the BullMQ queues of the same names
    queues_allow: Patterns = ()  # BullMQ queues that `bullmq://` may reach, as `images-*` or `queue:job`; empty: none
    priority: Flag = True  # give jobs BullMQ's priority 10 to 1 for `prioridade` 0 to 9
    entry: Text = "orchestrator-queue"  # BullMQ queue whose jobs start pipelines; `entry = ""` in the file: none
    legacy: Flag = False  # the workers use `bull` 3 or 4, not `bullmq`
    keep: Seconds = 86400.0  # how long ended jobs and their answers stay in that Redis
    concurrency: Count = 100  # jobs of the entry that one engine follows at a time
    lock: Seconds = 30.0  # time after which another engine takes over a job of the entry

    @property
    def allow(self) -> BullmqAllow:
        return BullmqAllow(self.queues_allow, self.legacy)


class LogSettings(Section, frozen=True):
    level: Level = "info"  # least level that is logged
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
    pipelines: Text = ""  # folder of pipeline files; empty: only built-in pipelines and those put by the API
    rotas: dict[str, Route] = {}

    @property
    def engine_lease(self) -> float:
        return min(self.engine.lease, self.broker.lease)

    @property
    def bridges_allow(self) -> Mapping[str, BridgeAllow]:
        """The allow list of each bridge, by its kind."""
        return {CELERY: self.celery.allow, BULLMQ: self.bullmq.allow}

    @property
    def routes(self) -> dict[str, tuple[str, ...]]:
        return {**BUILT_IN_ROUTES, **self.rotas}


def split_list(text: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated list."""
    return tuple(part for piece in text.split(",") if (part := piece.strip()))
