"""The sample workers and requests: deterministic, quick, and failing exactly when they are asked to."""

from typing import Any

import msgspec
import pytest

from oraculo.core.request import Limits, read_request
from oraculo.samples.requests import SAMPLE_REQUESTS, UNSERVED_QUEUE
from oraculo.samples.workers import app, make_sample_app
from oraculo.worker import Answer, Context

QUEUES = {
    "escavador_youtube",
    "escavador_blog",
    "executador_relatorio",
    "images-queue",
    "text-queue",
    "voiceover-queue",
    "captions-queue",
    "video-queue",
}
SAMPLES = make_sample_app(pace=0)


async def work(queue: str, payload: dict[str, Any], attempt: int = 1) -> Any:
    context = Context(correlation_id="r", queue=queue, tentativa=attempt)
    return await SAMPLES.handlers[queue].function(payload, context)


def test_every_queue_of_the_seeds_has_a_worker() -> None:
    assert set(app.handlers) == set(SAMPLES.handlers) == QUEUES
    assert UNSERVED_QUEUE not in QUEUES


def test_queues_of_others_are_left_to_them() -> None:
    assert set(make_sample_app(without={"text-queue"}).handlers) == QUEUES - {"text-queue"}


@pytest.mark.parametrize("queue", sorted(QUEUES))
async def test_the_same_input_gives_the_same_result(queue: str) -> None:
    payload = {"parametros": {"tema": "chá"}, "entrada": {"produto": "Chá"}}
    assert await work(queue, payload) == await work(queue, payload)


@pytest.mark.parametrize("queue", sorted(QUEUES))
@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"simular": 7, "config": [], "entrada": None, "resultados": "x", "parametros": 1},
        {"config": {"count": "many", "duration": -1}, "resultados": {"VIRAL_COPY": 1, "x": {"dados": 5}}},
    ],
)
async def test_no_payload_breaks_a_sample(queue: str, payload: dict[str, Any]) -> None:
    assert not isinstance(await work(queue, payload), Answer)


@pytest.mark.parametrize(("attempt", "fails"), [(1, True), (2, True), (3, False)])
async def test_falhas_fails_so_many_attempts(attempt: int, fails: bool) -> None:
    answer = await work("text-queue", {"simular": {"falhas": 2}}, attempt)
    assert isinstance(answer, Answer) is fails
    if fails:
        assert answer.payload == {"status": "erro", "erros": [f"falha simulada {attempt} de 2"]}


async def test_falhar_fails_every_attempt_in_a_fan_out_and_in_a_pipeline() -> None:
    for payload in ({"simular": {"falhar": True}}, {"entrada": {"simular": {"falhar": True}}}):
        assert isinstance(await work("text-queue", payload, 99), Answer)


async def test_fila_names_the_one_that_fails() -> None:
    payload = {"simular": {"falhar": True, "fila": "escavador_blog"}}
    assert isinstance(await work("escavador_blog", payload), Answer)
    assert not isinstance(await work("escavador_youtube", payload), Answer)


async def test_the_last_steps_use_what_came_before() -> None:
    entrada = {"produto": "Café Aurora"}
    images = await work("images-queue", {"config": {"count": 2}, "entrada": entrada})
    assert images == {"imagens": ["café-aurora-1.png", "café-aurora-2.png"]}
    copy = await work("text-queue", {"entrada": entrada})
    voice = await work("voiceover-queue", {"resultados": {"VIRAL_COPY": {"status": "ok", "resultado": copy}}})
    assert voice["texto"] == copy["texto"]
    captions = await work("captions-queue", {"resultados": {"VOICE_OVER": {"status": "ok", "resultado": voice}}})
    assert captions["linhas"][0] in copy["texto"]
    results = {"ENHANCED_IMAGES": images, "CAPTIONS": captions}
    resultados = {step: {"status": "ok", "resultado": result} for step, result in results.items()}
    video = await work("video-queue", {"config": {"duration": 30}, "entrada": entrada, "resultados": resultados})
    assert video["recebido"] == {"ENHANCED_IMAGES": ["imagens"], "CAPTIONS": ["arquivo", "linhas"]}
    assert (video["arquivo"], video["duracao"]) == ("café-aurora.mp4", 30)


async def test_the_report_counts_what_was_collected() -> None:
    collected = {"escavador_youtube": {"status": "ok", "dados": await work("escavador_youtube", {})}}
    report = await work("executador_relatorio", {"resultados": collected})
    assert report == {"arquivo": "relatorio.pdf", "paginas": 5, "itens_por_fonte": {"escavador_youtube": 3}}


@pytest.mark.parametrize("request_body", SAMPLE_REQUESTS.values(), ids=SAMPLE_REQUESTS)
def test_every_sample_request_is_a_good_one(request_body: dict[str, Any]) -> None:
    read_request(msgspec.json.encode(request_body), Limits())
