"""The sample runs that `oraculo dev` submits, as bodies of `POST /orquestracoes`."""

from collections.abc import Mapping
from typing import Any

UNSERVED_QUEUE = "executador_sem_ninguem"

SAMPLE_REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "a fan-out to three workers": {
        "tipo": "coleta_completa",
        "payload": {"fonte": "exemplo", "parametros": {"tema": "café especial"}},
    },
    "a pipeline of five steps": {
        "pipeline": "promotional-video-full",
        "payload": {"produto": "Café Aurora"},
    },
    "a worker that fails twice and succeeds at attempt 3": {
        "destinos": [
            "escavador_youtube",
            {"fila": "escavador_blog", "payload": {"simular": {"falhas": 2}}},
        ],
        "payload": {"parametros": {"tema": "torra clara"}},
    },
    "a destination that nobody serves: parcial after 8 s": {
        "destinos": ["escavador_youtube", UNSERVED_QUEUE],
        "payload": {"parametros": {"tema": "moagem"}},
        "timeout": 8,
    },
    "a worker that always fails: erro, and a dead letter": {
        "destinos": ["executador_relatorio"],
        "payload": {"simular": {"falhar": True}},
    },
}
