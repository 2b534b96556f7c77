"""Settings: what is read, what wins, and how each fault names its place and what would be right."""

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from oraculo.errors import InvalidSettings
from oraculo.settings import BUILT_IN_ROUTES, Settings, load_settings
from oraculo.settings.loading import _FIELD_TYPES, _VARIABLES
from oraculo.settings.urls import node_urls


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def from_text(toml: str, **environ: str) -> Settings:
    file = Path("oraculo.toml")
    file.write_text(toml, "utf-8")
    return load_settings(environ, file)


def faults_of(toml: str = "", **environ: str) -> dict[str, str]:
    with pytest.raises(InvalidSettings) as caught:
        from_text(toml, **environ)
    return {fault.field: fault.problem for fault in caught.value.faults}


# -- what is read -----------------------------------------------------------------------------------------------


def test_with_nothing_set_it_is_memory_and_sqlite() -> None:
    settings = load_settings({})
    assert settings == Settings()
    assert settings.broker.url == "memory://"
    assert settings.store.url == "sqlite:///.oraculo/oraculo.db"
    assert settings.routes == BUILT_IN_ROUTES


def test_the_defaults_obey_their_own_limits() -> None:
    assert msgspec.convert(msgspec.to_builtins(Settings()), Settings) == Settings()


def test_the_file_sets_every_kind_of_value() -> None:
    settings = from_text(
        """
        pipelines = "fluxos"
        [broker]
        url = "amqp://a, nats://b"
        [api]
        port = 9000
        keys = ["key-1-of-sixteen", "admin:key-2-of-sixteen"]
        [engine]
        poll = 2
        [log]
        level = "WARNING"
        [rotas]
        so_blog = ["escavador_blog"]
        """
    )
    assert settings.pipelines == "fluxos"
    assert settings.broker.urls == ("amqp://a", "nats://b")
    assert (settings.api.port, settings.api.keys) == (9000, ("key-1-of-sixteen", "admin:key-2-of-sixteen"))
    assert settings.engine.poll == 2.0
    assert settings.log.level == "warning"
    assert settings.routes == {**BUILT_IN_ROUTES, "so_blog": ("escavador_blog",)}


def test_a_route_of_the_file_replaces_the_built_in_one() -> None:
    assert from_text('rotas.coleta_completa = ["escavador_blog"]').routes == {"coleta_completa": ("escavador_blog",)}


def test_the_environment_wins_over_the_file() -> None:
    settings = from_text('[broker]\nurl = "amqp://file"\nprefix = "f."', ORACULO_BROKER_URL="nats://env")
    assert (settings.broker.url, settings.broker.prefix) == ("nats://env", "f.")


def test_the_names_that_most_people_use() -> None:
    settings = load_settings(
        {
            "ORACULO_BROKER_URL": "amqp://a,redis://b",
            "ORACULO_STORE_URL": "postgresql://u:p@h/db",
            "ORACULO_PIPELINES": "/etc/oraculo/pipelines",
            "ORACULO_API_KEYS": "one-key-of-sixteen, reader:two-key-of-sixteen,",
            "ORACULO_PREFIX": "dev.",
        }
    )
    assert settings.broker.urls == ("amqp://a", "redis://b")
    assert settings.store.url == "postgresql://u:p@h/db"
    assert settings.pipelines == "/etc/oraculo/pipelines"
    assert settings.api.keys == ("one-key-of-sixteen", "reader:two-key-of-sixteen")
    assert settings.broker.prefix == "dev."


def test_every_field_has_a_variable_that_sets_it() -> None:
    for name, (section, field) in _VARIABLES.items():
        default = getattr(getattr(Settings(), section) if section else Settings(), field)
        text, expected = _another(name, default)
        settings = load_settings({name: text})
        assert getattr(getattr(settings, section) if section else settings, field) == expected, name


def _another(name: str, default: object) -> tuple[str, object]:
    special: dict[str, str] = {
        "ORACULO_BROKER_URL": "nats://h",
        "ORACULO_STORE_URL": "mongodb://h",
        "ORACULO_LOG_LEVEL": "error",
        "ORACULO_LOG_FORMAT": "json",
        "ORACULO_WEBHOOK_SECRET": "whsec_c2VjcmV0",
    }
    if name in special:
        return special[name], special[name]
    if isinstance(default, tuple):
        first, second = ("10.0.0.1", "10.0.0.2") if name == "ORACULO_API_PROXIES" else ("x" * 16, "y" * 16)
        return f"{first},{second}", (first, second)
    if isinstance(default, str):
        return "other", "other"
    if isinstance(default, bool):
        return str(not default).lower(), not default
    assert isinstance(default, int | float)
    return str(type(default)(7)), 7


def test_every_field_says_what_would_be_right() -> None:
    for place, kind in _FIELD_TYPES.items():
        assert get_args(kind)[1].description, place


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load_settings({"ORACULO_BROKER_URL": "", "ORACULO_API_PORT": " "}) == Settings()


def test_the_clients_variables_and_strangers_are_left_alone() -> None:
    environ = {"ORACULO_URL": "http://x", "ORACULO_API_KEY": "k", "ORACULO_TEST_STORE_URL": "y", "ORACULO_VERSION": "1"}
    assert load_settings({**environ, "PATH": "/bin"}) == Settings()


def test_what_kubernetes_says_of_services_named_like_us_is_left_alone() -> None:
    environ = {
        "ORACULO_PORT": "tcp://10.0.0.1:8000",
        "ORACULO_API_PORT": "tcp://10.0.0.1:8000",
        "ORACULO_API_SERVICE_HOST": "10.0.0.1",
        "ORACULO_API_SERVICE_PORT_HTTP": "8000",
        "ORACULO_API_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert load_settings(environ) == Settings()


# -- which file -------------------------------------------------------------------------------------------------


def test_the_file_in_the_folder_is_found() -> None:
    Path("oraculo.toml").write_text("api.port = 1", "utf-8")
    assert load_settings({}).api.port == 1


def test_the_named_file_comes_before_the_variable_and_that_before_the_folder() -> None:
    for number, name in enumerate(("oraculo.toml", "variable.toml", "named.toml"), start=1):
        Path(name).write_text(f"api.port = {number}", "utf-8")
    assert load_settings({"ORACULO_CONFIG": "variable.toml"}).api.port == 2
    assert load_settings({"ORACULO_CONFIG": "variable.toml"}, Path("named.toml")).api.port == 3


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_a_named_file_that_is_not_there_is_a_fault(how: str) -> None:
    environ, file = ({}, Path("nope.toml")) if how == "argument" else ({"ORACULO_CONFIG": "nope.toml"}, None)
    with pytest.raises(InvalidSettings, match=r"nope\.toml: there is no such file"):
        load_settings(environ, file)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="cannot be read"):
        load_settings({}, tmp_path)


def test_what_is_not_toml_is_reported_with_its_line() -> None:
    assert "line 2" in faults_of("pipelines = 'x'\n[broker\n")["oraculo.toml"]


def test_a_byte_order_mark_is_passed_over() -> None:
    Path("oraculo.toml").write_bytes(b"\xef\xbb\xbfapi.port = 8199")
    assert load_settings({}).api.port == 8199


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("api.port = " + "9" * 5000, "has a number of more digits than can be read"),
        ("pipelines = " + "[" * 5000 + "]" * 5000, "too deep in one another"),
    ],
    ids=["a number", "a list"],
)
def test_what_no_toml_reader_takes_is_reported(toml: str, says: str) -> None:
    Path("oraculo.toml").write_text(toml)
    with pytest.raises(InvalidSettings, match=f"oraculo.toml: .*{says}"):
        load_settings({})


def test_what_is_not_utf8_is_reported() -> None:
    Path("oraculo.toml").write_bytes(b"pipelines = '\xff'")
    with pytest.raises(InvalidSettings, match="is not UTF-8: byte 13 is 0xff"):
        load_settings({})


# -- faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toml", "field", "says"),
    [
        ("brocker.url = 'x'", "brocker", "did you mean 'broker'?"),
        ("pipeline = 'x'", "pipeline", "did you mean 'pipelines'?"),
        ("broker.ulr = 'x'", "broker.ulr", "did you mean 'url'?"),
        ("broker = 'amqp://h'", "broker", "must be a table"),
        ("pipelines = 3", "pipelines", "must be a string; got 3"),
        ("api.port = '80'", "api.port", "whole number from 0 to 65535; got '80'"),
        ("api.port = 65536", "api.port", "from 0 to 65535; got 65536"),
        ("api.port = -1", "api.port", "from 0 to 65535; got -1"),
        ("api.keys = 'k'", "api.keys", "a list of keys of 16 characters or more"),
        ("api.keys = ['']", "api.keys", "has 0 characters in key 1"),
        ("api.max_wait = -1", "api.max_wait", "from 0 to a year; got -1"),
        ("engine.batch = 0", "engine.batch", "1 or more; got 0"),
        ("engine.batch = 1.5", "engine.batch", "whole number"),
        ("engine.batch = true", "engine.batch", "whole number, 1 or more; got True"),
        ("engine.prefetch = 65536", "engine.prefetch", "from 1 to 65535"),
        ("engine.poll = 0", "engine.poll", "more than 0"),
        ("engine.poll = nan", "engine.poll", "more than 0 and at most a year; got nan"),
        ("engine.stop_grace = inf", "engine.stop_grace", "to a year; got inf"),
        ("runs.timeout = -5", "runs.timeout", "more than 0"),
        ("runs.max_attempts = 0", "runs.max_attempts", "from 1 to 1000"),
        ("runs.backoff = -0.1", "runs.backoff", "from 0"),
        ("limits.payload_bytes = 0", "limits.payload_bytes", "1 or more"),
        ("store.retention_days = -1", "store.retention_days", "from 0"),
        ("webhook.concurrency = 0", "webhook.concurrency", "1 or more"),
        ("worker.concurrency = 0", "worker.concurrency", "1 or more"),
        ("log.level = 'loud'", "log.level", "one of debug, info, warning, error, critical; got 'loud'"),
        ("log.format = 'xml'", "log.format", "one of auto, json, console; got 'xml'"),
        ("broker.prefix = 'a b'", "broker.prefix", "letters, digits"),
        ("broker.prefix = 'a\\n'", "broker.prefix", "must be at most 64"),
        ('broker.prefix = "a\\n"', "broker.prefix", "letters, digits"),
        ("broker.url = 'pyamqp://h'", "broker.url", "did you mean amqp://?"),
        ("broker.url = 'kafka://h'", "broker.url", "Use one of memory://, amqp://, amqps://, redis://"),
        ("broker.url = 'sqlite:///x'", "broker.url", "unknown scheme sqlite://"),
        ("broker.url = 'rabbit'", "broker.url", "without a scheme"),
        ("broker.url = ''", "broker.url", "empty URL"),
        ("broker.url = 'amqp://a,,nats://b'", "broker.url", "empty URL"),
        ("broker.url = 'a,amqp://b:5672'", "broker.url", "without a scheme"),
        ("broker.url = 'amqp://h:99999'", "broker.url", "port"),
        ("store.url = 'mysql://h'", "store.url", "Use one of sqlite://, postgresql://"),
        ("store.url = 'amqp://h'", "store.url", "unknown scheme amqp://"),
        ("store.url = 'sqlite://x.db'", "store.url", "three slashes"),
        ("store.url = 'sqlite://'", "store.url", "names no file"),
        ("store.url = 'sqlite:///'", "store.url", "names no file"),
        ("queues.allow = ['a b*']", "queues.allow", "a pattern has"),
        ("api.proxies = ['proxy.local']", "api.proxies", "no address or network"),
        ("webhook.allow = ['http://a']", "webhook.allow", "no host, address or network"),
        ("webhook.secret = 'whsec_abc'", "webhook.secret", "base64"),
        ("webhook.secret = 'whsec_c2V$jcmV0'", "webhook.secret", "base64"),
        ("webhook.secret = 'whsec_'", "webhook.secret", "base64"),
        (
            "bullmq.queues = ['resultados']",
            "bullmq.queues",
            "queue 'resultados': 'resultados' is the orch",
        ),
        ("bullmq.queues = ['b', 'ponte-celery']", "bullmq.queues", "'ponte-celery' is a bridge's own queue"),
        ("bullmq.queues = ['a:b']", "bullmq.queues", "queue 'a:b': must be 1 to 128 letters"),
        ("bullmq.entry = 'a:b'", "bullmq.entry", "must have no ':'"),
        ("rotas = 3", "rotas", "must be a table"),
        ("rotas.a = []", "rotas.a", "at least one destination"),
        ("rotas.a = 'x'", "rotas.a", "a list of destinations; got 'x'"),
        ("rotas.a = [1]", "rotas.a", "a list of destinations"),
        ("rotas.a = ['b c']", "rotas.a", "destination 'b c': must be 1 to 128 letters"),
        ("rotas.a = ['b', 'b']", "rotas.a", "'b' more than once"),
        ("rotas.a = ['resultados']", "rotas.a", "the orchestrator's own"),
        ("rotas.a = ['b.dlq']", "rotas.a", "'b.dlq' is a dead-letter queue"),
        ("rotas.a = ['b', 'ponte-celery']", "rotas.a", "'ponte-celery' is a bridge's own queue"),
        ("rotas.a = ['b', 'kafka://t']", "rotas.a", "destination 'kafka://t': has the unknown scheme 'kafka'"),
        ("rotas.a = ['celery://']", "rotas.a", "destination 'celery://': task: must name the task"),
        ("rotas.a = ['bullmq://q?attempts=0']", "rotas.a", "attempts: must be a whole number from 1 to 1000"),
        ("rotas.a = ['celery://t', 'celery://t']", "rotas.a", "'celery://t' more than once"),
        ("rotas.'' = ['b']", "rotas.", "needs a name"),
    ],
)
def test_a_fault_in_the_file(toml: str, field: str, says: str) -> None:
    faults = faults_of(toml)
    assert list(faults) == [f"oraculo.toml: {field}"]
    assert says in faults[f"oraculo.toml: {field}"]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ORACULO_API_PORT", "eighty", "whole number from 0 to 65535; got 'eighty'"),
        ("ORACULO_API_KEYS", ",", "nothing between them: write one or more, as a,b, or leave it unset"),
        ("ORACULO_API_KEYS", " , ", "nothing between them"),
        ("ORACULO_API_KEYS", f"{'x' * 16},{'y' * 15}", "has 15 characters in key 2, and needs 16 or more"),
        ("ORACULO_API_KEYS", f"reader:{'y' * 15}", "has 15 characters in key 1, and needs 16 or more"),
        ("ORACULO_API_KEYS", "admin:", "has 0 characters in key 1"),
        ("ORACULO_API_KEYS", f"raeder:{'y' * 20}", "no role before the ':' of key 1; the roles are reader, operator"),
        ("ORACULO_API_KEYS", f"reader:{'y' * 20},{'y' * 20}", "has key 2 twice"),
        ("ORACULO_API_INSECURE", "maybe", "true or false"),
        ("ORACULO_ENGINE_BATCH", "0", "1 or more; got '0'"),
        ("ORACULO_RUNS_TIMEOUT", "soon", "number of seconds"),
        ("ORACULO_BROKER_URL", "http://h", "unknown scheme http://"),
        ("ORACULO_PREFIX", "a/b", "letters, digits"),
        ("ORACULO_BROKERURL", "amqp://h", "did you mean 'ORACULO_BROKER_URL'?"),
        ("ORACULO_API_PROT", "80", "did you mean 'ORACULO_API_PORT'?"),
        ("ORACULO_ENGINE_GREEN_THREADS", "4", "is not a known variable"),
        ("ORACULO_LOGLEVEL", "info", "did you mean 'ORACULO_LOG_LEVEL'?"),
        ("ORACULO_STORE", "sqlite:///x", "did you mean 'ORACULO_STORE_URL'?"),
    ],
)
def test_a_fault_in_the_environment(name: str, value: str, says: str) -> None:
    faults = faults_of(**{name: value})
    assert list(faults) == [name]
    assert says in faults[name]


def test_two_names_of_one_setting_must_agree() -> None:
    assert "set one of them" in faults_of(ORACULO_PREFIX="a", ORACULO_BROKER_PREFIX="b")["ORACULO_PREFIX"]
    assert load_settings({"ORACULO_PREFIX": "a", "ORACULO_BROKER_PREFIX": "a"}).broker.prefix == "a"


def test_all_faults_are_reported_at_once() -> None:
    faults = faults_of("x = 1\nengine.batch = 0\nrotas.a = []", ORACULO_API_PORT="x", ORACULO_LOG_LEVLE="info")
    assert len(faults) == 5


def test_secrets_are_not_shown() -> None:
    faults = faults_of(
        "api.keys = 'hunter2'", ORACULO_BROKER_URL="ampq://u:hunter3@h", ORACULO_WEBHOOK_SECRET="hunter4"
    )
    assert len(faults) == 3
    assert "hunter" not in str(faults)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///a.db",
        "sqlite:////var/a.db",
        "postgres://h1:1,h2:2/db",
        "postgres://u:p@h1:1,[::1]:2/db?user=a@b",
        "postgresql:///db?host=/run/a@b",
        "rediss://h",
        "mongodb+srv://h",
        "mongodb://a,b",
        "mongodb://u:p#w@h/db",
        "mongodb://a:k%3D@h:10255/?ssl=true&appName=@a@",
        "redis://:p@ss@h/0",
        "redis://joe@corp.com:pw@h/0",
        "postgresql://u:pw@h/my@db",
    ],
)
def test_good_store_urls(url: str) -> None:
    assert load_settings({"ORACULO_STORE_URL": url}).store.url == url


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://[::1/d",
        "mongodb://[::1/d",
        "postgresql://u:pw?pw@h/d",
        "postgresql://u:12?pw@h/d",
        "postgresql://u:12#pw@h/d",
        "postgresql://u:12/pw@h/d",
        "postgresql://u:pw@pw@h/d",
        "postgresql://u:pw@12:pw@h/d",
        "mongodb://u:12/pw@h/d",
        "redis://:12?pw@h/0",
    ],
)
def test_store_urls_that_cannot_be_read_are_not_quoted(url: str) -> None:
    fault = faults_of(ORACULO_STORE_URL=url)["ORACULO_STORE_URL"]
    assert "in a password is written %3A, %40, %2F, %3F, %23" in fault
    assert "pw" not in fault


@pytest.mark.parametrize(
    "url",
    [
        "memory://",
        "amqp://guest@rabbitmq//",
        "amqps://h",
        "rediss://h:1/0",
        "tls://h:4222",
        "amqp://u:p@a:5672,b:5672,c/vhost",
        "nats://[::1]:4222,[::2]",
    ],
)
def test_good_broker_urls(url: str) -> None:
    assert load_settings({"ORACULO_BROKER_URL": url}).broker.urls == (url,)


@pytest.mark.parametrize("pause", [",", ", ", " , "])
def test_brokers_are_parted_where_the_next_scheme_begins(pause: str) -> None:
    urls = ("amqp://u:p@a:1,b:2/v", "redis://c", "nats://d,e?replicas=3")
    assert load_settings({"ORACULO_BROKER_URL": pause.join(urls)}).broker.urls == urls


def test_the_nodes_of_a_cluster() -> None:
    assert node_urls("amqp://u:p%2C@a:1, b/v?x=1,2") == ("amqp://u:p%2C@a:1/v?x=1,2", "amqp://u:p%2C@b/v?x=1,2")
    assert node_urls("amqp://u:p,w@a") == ("amqp://u:p,w@a",)
    assert node_urls("memory://") == ("memory://",)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("amqp://a,,redis://b", "has an empty URL or host in its list"),
        ("amqp://a,", "has an empty URL or host in its list"),
        ("amqp://a,b:x", "has a port that is not a number"),
        ("redis://a,b", "names several hosts for redis://; only those of amqp://, amqps://, nats://, tls:// may be"),
        ("memory://a,b", "names several hosts for memory://"),
        ("amqp://a,http://b", "has the unknown scheme http://"),
        (",amqp://a", "has an empty URL or host in its list"),
        ("amqp://u:p@a,u:p@b/v", "has a user or password for each host, or"),
        ("nats://token@a,token@b", "has a user or password for each host"),
        ("amqp://u:p@a:5672/v,b:5672/v", "has a comma behind the path"),
        ("amqp://a/v,", "has a comma behind the path"),
        ("amqp://a/v,,redis://b", "has a comma behind the path"),
        ("redis://a/0,", "has a comma behind the path"),
    ],
)
def test_bad_lists_of_brokers(url: str, says: str) -> None:
    assert says in faults_of(ORACULO_BROKER_URL=url)["ORACULO_BROKER_URL"]
