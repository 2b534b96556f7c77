"""Sample workers for the queues of the built-in routes and pipelines: quick, visible and deterministic.

Each takes 0.3 to 1.5 seconds (times `pace`), reports progress, and makes a small plausible result of what it
was given. To see failures, put `simular` into the payload of a run, or of one destination:

    {"simular": {"falhas": 2}}                        fails at attempts 1 and 2, succeeds at attempt 3
    {"simular": {"falhar": true}}                     fails at every attempt; its command ends in the dead letters
    {"simular": {"falhar": true, "fila": "text-queue"}}   only the worker of that queue fails

    oraculo dev                                       runs them beside the engine
    oraculo worker oraculo.samples.workers:app        runs them alone, against a shared broker
"""

import asyncio
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from oraculo.worker import Answer, App, Context

Payload = dict[str, Any]
Make = Callable[[Payload], Any]

DEFAULT_PACE = 1.0


def make_sample_app(pace: float = DEFAULT_PACE, *, without: Collection[str] = ()) -> App:
    """Return the sample workers. `pace` multiplies their time; queues in `without` are left to others."""
    app = App("exemplos")
    for queue, (seconds, stages, make) in _SAMPLES.items():
        if queue not in without:
            app.queue(queue)(_handler(seconds * pace, stages, make))
    return app


def _handler(seconds: float, stages: Sequence[str], make: Make) -> Callable[..., Any]:
    async def work(payload: Payload, ctx: Context) -> Any:
        for number, stage in enumerate(stages):
            ctx.progress(round(100 * number / len(stages)), stage)
            await asyncio.sleep(seconds / len(stages))
        if reason := _simulated_failure(payload, ctx):
            # Returned, not raised: a simulated failure must not fill the log with tracebacks.
            return Answer({"status": "erro", "erros": [reason]})
        ctx.progress(100, "pronto")
        return make(payload)

    return work


def _simulated_failure(payload: Payload, ctx: Context) -> str | None:
    wish = _section(payload, "simular") or _section(_section(payload, "entrada"), "simular")
    if wish.get("fila", ctx.queue) != ctx.queue:
        return None
    attempt = ctx.tentativa or 1
    if wish.get("falhar") is True:
        return f"falha simulada (tentativa {attempt})"
    failures = wish.get("falhas")
    if isinstance(failures, int) and attempt <= failures:
        return f"falha simulada {attempt} de {failures}"
    return None


# -- what each makes -------------------------------------------------------------------------------------------------


def _videos(payload: Payload) -> list[Payload]:
    topic = _topic(payload)
    return [
        {"titulo": f"{topic}: parte {n}", "url": f"https://youtube.example/{_number(topic, n):08x}"}
        for n in range(1, 4)
    ]


def _articles(payload: Payload) -> list[Payload]:
    topic = _topic(payload)
    return [
        {"titulo": f"O que aprendi sobre {topic} ({n})", "palavras": 300 + _number(topic, n) % 900} for n in range(1, 3)
    ]


def _report(payload: Payload) -> Payload:
    sources = {name: len(_items(result)) for name, result in _section(payload, "resultados").items()}
    return {"arquivo": "relatorio.pdf", "paginas": 2 + sum(sources.values()), "itens_por_fonte": sources}


def _images(payload: Payload) -> Payload:
    product = _product(payload)
    count = _whole(_section(payload, "config").get("count"), default=3)
    return {"imagens": [f"{_slug(product)}-{n}.png" for n in range(1, min(count, 20) + 1)]}


def _copy(payload: Payload) -> Payload:
    product = _product(payload)
    platform = _section(payload, "config").get("platform", "instagram")
    return {
        "plataforma": platform,
        "texto": f"{product}: você nunca provou nada igual. Feito para quem não aceita menos. Peça já o seu!",
    }


def _voice_over(payload: Payload) -> Payload:
    text = str(_result_of(payload, "VIRAL_COPY").get("texto") or _product(payload))
    language = _section(payload, "config").get("language", "pt-BR")
    return {"arquivo": "locucao.mp3", "idioma": language, "segundos": round(len(text) / 15, 1), "texto": text}


def _captions(payload: Payload) -> Payload:
    text = str(_result_of(payload, "VOICE_OVER").get("texto") or _product(payload))
    sentences = [part.strip() for part in text.replace("!", ".").split(".") if part.strip()]
    return {"arquivo": "legendas.srt", "linhas": sentences}


def _video(payload: Payload) -> Payload:
    received = {name: sorted(_result_of(payload, name)) for name in _section(payload, "resultados")}
    seconds = _whole(_section(payload, "config").get("duration"), default=15)
    return {"arquivo": f"{_slug(_product(payload))}.mp4", "duracao": seconds, "recebido": received}


# The seconds of each worker, its progress texts, and the function that makes its result.
_SAMPLES: dict[str, tuple[float, Sequence[str], Make]] = {
    "escavador_youtube": (0.9, ("buscando canais", "lendo vídeos", "ordenando"), _videos),
    "escavador_blog": (0.6, ("lendo feeds", "extraindo textos"), _articles),
    "executador_relatorio": (0.6, ("reunindo dados", "escrevendo páginas"), _report),
    "images-queue": (1.5, ("recortando", "ajustando luz", "ampliando", "exportando"), _images),
    "text-queue": (0.6, ("lendo o produto", "escrevendo"), _copy),
    "voiceover-queue": (0.9, ("escolhendo a voz", "gravando", "limpando o som"), _voice_over),
    "captions-queue": (0.3, ("transcrevendo", "sincronizando"), _captions),
    "video-queue": (1.5, ("montando cenas", "juntando o som", "legendando", "renderizando"), _video),
}


# -- reading payloads, which may hold anything -----------------------------------------------------------------------


def _section(payload: Payload, key: str) -> Payload:
    value = payload.get(key)
    return value if isinstance(value, dict) else {}


def _result_of(payload: Payload, step: str) -> Payload:
    return _section(_section(_section(payload, "resultados"), step), "resultado")


def _items(result: object) -> Sequence[Any]:
    items = result.get("dados") if isinstance(result, dict) else None
    return items if isinstance(items, list) else ()


def _topic(payload: Payload) -> str:
    return str(_section(payload, "parametros").get("tema") or payload.get("fonte") or "café")


def _product(payload: Payload) -> str:
    return str(_section(payload, "entrada").get("produto") or payload.get("produto") or "Produto")


def _whole(value: object, *, default: int) -> int:
    return value if isinstance(value, int) and value >= 0 else default


def _slug(text: str) -> str:
    return "-".join(text.lower().split())


def _number(text: str, salt: int) -> int:
    return zlib.crc32(f"{text}/{salt}".encode())


app = make_sample_app()
