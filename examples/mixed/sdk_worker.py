"""The last step of `misto.yaml`: a handler of the SDK, which is given the results of the three others.

oraculo worker examples.mixed.sdk_worker:app
"""

from typing import Any

from oraculo.worker import App

app = App("misto")


@app.executador("anuncio")
async def write_advert(payload: dict[str, Any]) -> dict[str, Any]:
    results = {step: answer["resultado"] for step, answer in payload["resultados"].items()}
    price = results["precos"]
    return {
        "texto": f"{payload['entrada']['titulo']}: {price['produto']} por {price['preco']} {price['moeda']}",
        "imagens": results["imagens"]["images"],
        "catalogo": results["catalogo"]["recebido"]["config"],
    }
