"""The AsyncAPI document: valid by the official schema, true to the messages that are sent, and silent on secrets."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft7Validator  # type: ignore[import-untyped]

from oraculo.api.asyncapi_document import MAX_USES, asyncapi_document
from oraculo.api.schemas import COMPONENTS
from oraculo.bootstrap import make_adapters
from oraculo.core.aggregate import encode_aggregate
from oraculo.core.command import encode_command
from oraculo.core.request import Limits, read_request
from oraculo.pipeline.definition import Definition
from oraculo.ports.clock import SystemClock
from oraculo.settings import BrokerSettings, Settings
from oraculo.wire import naming
from oraculo.wire.message import Message, decode_message, encode_message
from oraculo.wire.naming import QueueNames
from oraculo.worker.answers import AnswerWriter
from tests.core.building import Driver, fan_out, flow, pipeline

OFFICIAL = Draft7Validator(json.loads((Path(__file__).parent / "data" / "asyncapi-3.0.0.json").read_text("utf-8")))
RABBITMQ, REDIS, NATS = "amqp://user:segredo@rabbit:5672/v", "rediss://:segredo@redis/3", "nats://token@[::1]:4222"
ROUTES = {"coleta_completa": ("escavador_youtube", "executador_relatorio")}
VIDEO = pipeline(
    {"type": "ENHANCED_IMAGES", "config": {"count": 5}},
    {"type": "PROMOTIONAL_VIDEO", "dependsOn": ["ENHANCED_IMAGES"], "config": {"duration": 30}},
    {"id": "de novo", "queue": "video-queue"},
    name="video",
)
QUEUES = ["escavador_youtube", "executador_relatorio", "images-queue", "video-queue"]
NOW = "2025-10-14T12:00:00.000Z"


def document(
    *pipelines: Definition, urls: tuple[str, ...] = (), prefix: str = "", routes: dict[str, Any] | None = None
) -> dict[str, Any]:
    schemas = {name: COMPONENTS[name] for name in ("Pedido", "Agregado", "Resumo")}
    routes = ROUTES if routes is None else routes
    return asyncapi_document(
        version="1.2.3", broker_urls=urls, prefix=prefix, routes=routes, pipelines=pipelines, schemas=schemas
    )


FULL = document(VIDEO, urls=(RABBITMQ, REDIS, NATS), prefix="px.")


def test_a_route_that_goes_over_a_bridge_is_reported_at_the_queue_of_the_bridge() -> None:
    made = document(routes={"loja": ("celery://loja.precos", "celery://loja.anuncio")})
    assert not [channel for channel in made["channels"] if "loja" in channel]
    assert made["channels"]["ponte-celery"]["description"].count("- route `loja`") == 1


# -- by the specification ---------------------------------------------------------------------------------------------

DOCUMENTS = {
    "full": FULL,
    "memory": document(VIDEO, urls=("memory://",)),
    "nothing known": document(routes={}),
    "odd names": document(pipeline({"id": "a/b ~`c``", "queue": "x.y-z_", "config": {"`": "{x}"}})),
}


@pytest.mark.parametrize("made", DOCUMENTS.values(), ids=DOCUMENTS)
def test_it_is_valid_by_the_official_schema(made: dict[str, Any]) -> None:
    assert [f"{error.json_path}: {error.message}" for error in OFFICIAL.iter_errors(made)] == []


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (("asyncapi",), "2.6.0"),
        (("operations", "receber_pedidos", "action"), "subscribe"),
        (("channels", "resultados", "adress"), "x"),
        (("channels", "resultados", "bindings", "amqp", "is"), "topic"),
        (("servers", "rabbitmq", "url"), "amqp://x"),
        (("components", "messages", "progresso", "payload", "type"), "no type"),
        (("components", "correlationIds", "orquestracao", "location"), "correlation_id"),
    ],
)
def test_the_official_schema_would_refuse(place: tuple[str, ...], wrong: str) -> None:
    broken = json.loads(json.dumps(FULL))
    within = broken
    for key in place[:-1]:
        within = within[key]
    within[place[-1]] = wrong
    assert not OFFICIAL.is_valid(broken)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for child in node.values():
            yield from references(child)
    elif isinstance(node, list):
        for child in node:
            yield from references(child)


def resolved(made: dict[str, Any], reference: str) -> Any:
    found: Any = made
    for key in reference.removeprefix("#/").split("/"):
        found = found[key]
    return resolved(made, found["$ref"]) if isinstance(found, dict) and "$ref" in found else found


@pytest.mark.parametrize("made", DOCUMENTS.values(), ids=DOCUMENTS)
def test_every_reference_leads_somewhere(made: dict[str, Any]) -> None:
    found = list(references(made))
    assert found
    for reference in found:
        resolved(made, reference)


@pytest.mark.parametrize("made", DOCUMENTS.values(), ids=DOCUMENTS)
def test_what_the_official_schema_cannot_check(made: dict[str, Any]) -> None:
    """The rules of the specification's text about operations and replies."""
    for operation in made["operations"].values():
        ends = [operation, operation["reply"]] if "reply" in operation else [operation]
        for end in ends:
            assert all(one["$ref"].startswith(end["channel"]["$ref"] + "/messages/") for one in end["messages"])
            assert "address" not in end or resolved(made, end["channel"]["$ref"])["address"] is None


def test_the_order_of_what_it_is_made_from_does_not_matter() -> None:
    other = pipeline("escavador_blog", "video-queue<escavador_blog", name="a")
    routes = {"b": ("x", "y"), "a": ("y",)}
    first = document(VIDEO, other, routes=routes)
    assert json.dumps(first) == json.dumps(document(other, VIDEO, routes=dict(reversed(routes.items()))))
    destinations = [name for name in first["operations"] if name.startswith("comandar.")]
    assert destinations == sorted(destinations)


# -- channels and operations ------------------------------------------------------------------------------------------


def test_there_is_a_channel_for_each_queue_and_its_quarantine() -> None:
    queues = ["orquestrador", "resultados", *QUEUES]
    assert list(FULL["channels"]) == [*queues, *(f"{queue}.dlq" for queue in queues), "resposta"]
    for name, channel in FULL["channels"].items():
        assert channel["address"] == (None if name == "resposta" else f"px.{name}")
    assert document()["channels"]["orquestrador"]["address"] == "orquestrador"


def test_each_channel_has_its_messages() -> None:
    carried = {name: list(channel["messages"]) for name, channel in FULL["channels"].items()}
    assert carried.pop("orquestrador") == ["iniciar_orquestracao"]
    assert carried.pop("resultados") == ["resultado_coleta", "resultado_execucao", "progresso"]
    assert carried.pop("escavador_youtube") == ["iniciar_coleta"]
    assert carried.pop("resposta") == ["orquestracao_concluida"]
    assert all(
        messages == (["carta_morta"] if name.endswith(".dlq") else ["iniciar_execucao"])
        for name, messages in carried.items()
    )


def ends(operation: str) -> tuple[str, str, str | None, list[str]]:
    """Action, channel, the reply's channel and messages."""
    found = FULL["operations"][operation]
    reply = found.get("reply", {"channel": {"$ref": ""}, "messages": []})
    replies = [one["$ref"].rpartition("/")[2] for one in reply["messages"]]
    return found["action"], found["channel"]["$ref"][11:], reply["channel"]["$ref"][11:] or None, replies


def test_operations_are_reported_from_the_orchestrators_side() -> None:
    assert ends("receber_pedidos") == ("receive", "orquestrador", "resposta", ["orquestracao_concluida"])
    assert ends("receber_resultados") == ("receive", "resultados", None, [])
    assert ends("entregar_agregado") == ("send", "resposta", None, [])
    assert ends("comandar.escavador_youtube") == (
        *("send", "escavador_youtube", "resultados"),
        ["resultado_coleta", "progresso"],
    )
    assert ends("comandar.video-queue")[3] == ["resultado_execucao", "progresso"]
    assert ends("isolar.resultados") == ("send", "resultados.dlq", None, [])
    assert ends("reenviar.video-queue") == ("receive", "video-queue.dlq", None, [])


def test_every_destination_is_commanded_and_every_quarantine_can_be_emptied() -> None:
    for queue in QUEUES:
        assert f"comandar.{queue}" in FULL["operations"]
    for queue in ("orquestrador", "resultados", *QUEUES):
        assert f"reenviar.{queue}" in FULL["operations"]


def test_the_reply_to_a_request_goes_where_the_request_says() -> None:
    address = FULL["operations"]["receber_pedidos"]["reply"]["address"]
    assert address["location"] == "$message.payload#/payload/responder_em"
    assert "prefix" in address["description"]


def test_every_message_with_an_envelope_has_the_correlation_id() -> None:
    for name, message in FULL["components"]["messages"].items():
        if name != "carta_morta":
            assert resolved(FULL, message["correlationId"]["$ref"])["location"] == "$message.payload#/correlation_id"


def test_a_queue_that_is_called_like_our_reply_channel_has_its_own() -> None:
    made = document(pipeline("resposta"))
    assert made["channels"]["resposta"]["address"] == "resposta"
    assert made["channels"]["resposta_"]["address"] is None
    assert made["operations"]["entregar_agregado"]["channel"]["$ref"] == "#/channels/resposta_"
    OFFICIAL.validate(made)


# -- who uses a queue -------------------------------------------------------------------------------------------------


def test_a_channel_shows_which_routes_and_steps_use_it() -> None:
    said = {name: channel["description"] for name, channel in FULL["channels"].items()}
    assert "- route `coleta_completa`" in said["escavador_youtube"]
    assert "- pipeline `video`, step `PROMOTIONAL_VIDEO`" in said["video-queue"].splitlines()
    assert "- pipeline `video`, step `de novo`" in said["video-queue"].splitlines()
    assert "ENHANCED_IMAGES" not in said["video-queue"]


def test_a_description_is_bounded_and_counts_what_it_leaves_out() -> None:
    steps: list[Any] = [{"id": str(number), "queue": "q"} for number in range(MAX_USES + 7)]
    description = document(pipeline(*steps), routes={})["channels"]["q"]["description"]
    assert description.count("- pipeline") == MAX_USES
    assert description.endswith("- and 7 more")


# -- brokers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "host", "protocol", "path"),
    [
        ("amqp://user:segredo@rabbit:5673/v", "rabbit:5673", "amqp", "/v"),
        ("amqps://user:segredo@rabbit/%2Fv%7Bx%7D{y}", "rabbit", "amqps", "/%2Fv%7Bx%7D%7By%7D"),
        ("amqp://rabbit/", "rabbit", "amqp", None),
        ("redis://:segredo@redis/3", "redis", "redis", "/3"),
        ("rediss://redis:1?ssl_ca_certs=segredo", "redis:1", "redis", None),
        ("nats://segredo@n:4222", "n:4222", "nats", None),
        ("tls://[::1]:4222", "[::1]:4222", "nats", None),
        ("nats://", "localhost", "nats", None),
        # Passwords with something in them that should have been percent-encoded.
        ("amqp://user:1234/segredo@rabbit/v", "user", "amqp", None),
        ("amqp://user:1234#segredo@rabbit", "user", "amqp", None),
        ("redis://:1234?segredo@redis", "localhost", "redis", None),
        ("amqp://user:segredo@segredo@rabbit:1", "rabbit:1", "amqp", None),
        ("amqp://user:1234,segredo/@rabbit", "user", "amqp", None),
    ],
)
def test_a_broker_is_a_server_without_its_secrets(url: str, host: str, protocol: str, path: str | None) -> None:
    made = document(VIDEO, urls=(url,))
    (server,) = made["servers"].values()
    assert (server["host"], server["protocol"], server.get("pathname")) == (host, protocol, path)
    assert ("TLS" in server["description"]) == url.startswith(("amqps", "rediss", "tls"))
    assert "segredo" not in json.dumps(made)
    assert ":1234" not in json.dumps(made)
    OFFICIAL.validate(made)


def test_the_nodes_of_a_cluster_are_one_server() -> None:
    (server,) = document(urls=("amqp://u:segredo@a:5672,b:5673,[::1]/v",))["servers"].values()
    assert (server["host"], server["pathname"]) == ("a:5672", "/v")
    assert server["description"].endswith(" Other nodes of the same cluster: b:5673, [::1].")


def test_memory_is_no_server() -> None:
    assert "servers" not in document(urls=("memory://",))


def test_a_password_is_asked_for_where_there_is_one() -> None:
    assert [server.get("security") for server in FULL["servers"].values()] == [
        *([{"type": "userPassword"}], [{"type": "userPassword"}]),
        None,
    ]


def test_servers_have_the_names_under_which_the_brokers_are_known() -> None:
    urls = ("redis://a", "amqp://b", "rediss://c", "nats://d", "tls://e", "amqps://f", "redis://g")
    adapters = make_adapters(Settings(broker=BrokerSettings(url=",".join(urls))), SystemClock())
    assert list(document(urls=urls)["servers"]) == [broker.statuses()[0].name for _, broker in adapters]


def test_rabbitmq_has_bindings_and_the_others_have_none() -> None:
    assert FULL["channels"]["resultados"]["bindings"]["amqp"] == {
        "is": "queue",
        "queue": {"name": "px.resultados", "durable": True, "exclusive": False, "autoDelete": False, "vhost": "v"},
        "bindingVersion": "0.3.0",
    }
    assert FULL["operations"]["comandar.video-queue"]["bindings"]["amqp"]["deliveryMode"] == 2
    assert FULL["operations"]["receber_resultados"]["bindings"]["amqp"]["ack"] is True
    assert '"bindings"' not in json.dumps(document(VIDEO, urls=(REDIS, NATS)))


@pytest.mark.parametrize(
    ("urls", "vhost"),
    [
        (("amqp://a",), "/"),
        (("amqp://a/", "amqps://b/%2F"), "/"),
        (("amqp://a/x%20y",), "x y"),
        (("amqp://a/x", "amqp://b/y"), None),
    ],
)
def test_the_virtual_host_is_reported_where_there_is_one(urls: tuple[str, ...], vhost: str | None) -> None:
    binding = document(urls=urls)["channels"]["resultados"]["bindings"]["amqp"]
    assert binding["queue"].get("vhost") == vhost


# -- messages ---------------------------------------------------------------------------------------------------------


def validator(path: str) -> Any:
    """Of one schema in the document."""
    return Draft7Validator({"$ref": f"#/components/{path}", "components": FULL["components"]})


def accepts(event: str, body: Any) -> bool:
    message = json.loads(body) if isinstance(body, bytes) else body
    accepted: bool = validator(f"messages/{event}/payload").is_valid(message)
    return accepted


def meanings(channel: str, body: bytes) -> list[str]:
    """The messages of the channel that it is valid as; the specification wants one and only one."""
    return [event for event in FULL["channels"][channel]["messages"] if accepts(event, body)]


def message(event: str, payload: Any, **more: Any) -> dict[str, Any]:
    return {"correlation_id": "abc123", "tipo_evento": event, "payload": payload, "timestamp": NOW, **more}


EXAMPLES = [
    (event, example["payload"])
    for event, said in FULL["components"]["messages"].items()
    for example in said.get("examples", ())
]


def test_every_event_has_an_example() -> None:
    assert {event for event, _ in EXAMPLES} == set(FULL["components"]["messages"]) - {"carta_morta"}


@pytest.mark.parametrize(("event", "example"), EXAMPLES)
def test_an_example_is_valid_and_the_code_reads_it(event: str, example: dict[str, Any]) -> None:
    validator(f"messages/{event}/payload").validate(example)
    assert decode_message(json.dumps(example).encode()).tipo_evento == event
    if event == naming.START_RUN:
        read_request(json.dumps(example["payload"]).encode(), Limits())


def command(driver: Driver, task: str) -> bytes:
    return encode_command(driver.run, driver.task(task), NOW, "px.resultados")


def test_the_commands_of_a_fan_out_are_valid() -> None:
    driver = fan_out("escavador_youtube", {"fila": "executador_relatorio", "payload": {"config": 3}}, payload={"n": 1})
    assert meanings("escavador_youtube", command(driver, "escavador_youtube")) == ["iniciar_coleta"]
    assert meanings("executador_relatorio", command(driver, "executador_relatorio")) == ["iniciar_execucao"]


def test_the_commands_of_a_pipeline_are_valid_as_steps() -> None:
    step = {"type": "escavador_youtube", "config": {"max": 3}}
    driver = flow(step, "video-queue<escavador_youtube", request={"payload": {"parametros": {"canal": "c"}}})
    collect = command(driver, "escavador_youtube")
    driver.ok("escavador_youtube", b'{"dados": []}')
    execute = command(driver, "video-queue")
    assert meanings("escavador_youtube", collect) == ["iniciar_coleta"]
    assert meanings("video-queue", execute) == ["iniciar_execucao"]
    validator("schemas/EtapaDeColeta").validate(json.loads(collect)["payload"])
    validator("schemas/Etapa").validate(json.loads(execute)["payload"])
    assert not validator("schemas/EtapaDeColeta").is_valid(json.loads(execute)["payload"])
    schemas = FULL["components"]["schemas"]
    assert list(schemas["EtapaDeColeta"]["properties"]) == list(json.loads(collect)["payload"])
    assert list(schemas["Etapa"]["properties"]) == list(json.loads(execute)["payload"])


def test_what_a_worker_of_ours_answers_is_valid() -> None:
    writer = AnswerWriter(SystemClock(), QueueNames("px."))
    asked = decode_message(command(fan_out("escavador_youtube"), "escavador_youtube"))
    collected = writer.success("escavador_youtube", asked, [{"titulo": "x"}])
    assert meanings("resultados", collected) == ["resultado_coleta"]
    for answer in (
        writer.success("video-queue", asked, {"arquivo": "x.mp4"}),
        writer.failure("video-queue", asked, ["boom"], retry=False),
    ):
        assert meanings("resultados", answer) == ["resultado_execucao"]
    assert meanings("resultados", writer.progress(asked, 12.5, "still at it")) == ["progresso"]


@pytest.mark.parametrize(
    "payload",
    [
        {"resultado": "ok", "arquivo": "relatorio.pdf"},
        {"status": "ok", "dados": []},
        {"status": "FALHA", "erros": [{"codigo": 1}]},
        {"status": "ok", "resultado": None, "erros": None},
        {"fonte": {"url": "x"}, "dados": "texto"},
        {},
    ],
)
def test_answers_of_plain_workers_are_valid(payload: dict[str, Any]) -> None:
    assert accepts("resultado_coleta", message("resultado_coleta", payload))
    assert accepts("resultado_execucao", message("resultado_execucao", payload, tarefa="x", outro=[1]))


def test_the_aggregate_of_a_run_is_valid() -> None:
    driver = fan_out("escavador_youtube", "escavador_blog", timeout=30)
    driver.ok("escavador_youtube", b'{"dados": [1]}')
    driver.at(31).run_due()
    ended = Message(
        correlation_id=driver.run.id,
        tipo_evento=naming.RUN_ENDED,
        payload=msgspec.Raw(encode_aggregate(driver.run)),
        timestamp=NOW,
    )
    assert meanings("resposta", encode_message(ended)) == ["orquestracao_concluida"]


WRONG = [
    ("iniciar_coleta", message("iniciar_execucao", {})),
    ("iniciar_coleta", message("iniciar_coleta", [])),
    ("iniciar_execucao", message("iniciar_execucao", {}, tentativa=0)),
    ("iniciar_execucao", {"tipo_evento": "iniciar_execucao", "payload": {}, "timestamp": NOW}),
    ("iniciar_orquestracao", message("iniciar_orquestracao", {"payload": {}})),
    ("iniciar_orquestracao", message("iniciar_orquestracao", {"tipo": "a", "pipeline": "b"})),
    ("iniciar_orquestracao", message("iniciar_orquestracao", {"tipo": "a", "desconhecido": 1})),
    ("resultado_coleta", message("resultado_coleta", {"status": 5})),
    ("resultado_execucao", message("resultado_execucao", {"erros": "texto"})),
    ("progresso", message("progresso", {"percentual": 101})),
    ("progresso", message("progresso", {"mensagem": 1})),
    ("orquestracao_concluida", message("orquestracao_concluida", {"status": "parcial"})),
]


@pytest.mark.parametrize(("event", "wrong"), WRONG)
def test_something_else_is_not_valid(event: str, wrong: dict[str, Any]) -> None:
    assert not accepts(event, wrong)


def test_a_dead_letter_may_be_anything() -> None:
    for body in ({"x": 1}, "not even JSON", None, message("progresso", {})):
        assert accepts("carta_morta", body)
