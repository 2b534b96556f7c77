"""The page that shows the OpenAPI document, with its scripts. Where there are keys, it asks for one.

Its addresses are relative, so that it works behind a proxy with another host, scheme or path.
"""

from importlib.resources import files

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

_PAGE = files("oraculo.api").joinpath("pages", "docs.html").read_text(encoding="utf-8")


def install(app: FastAPI) -> None:
    app.mount("/swagger", StaticFiles(packages=[("fastapi_swagger", "resources"), ("oraculo.api", "pages")]))
    app.add_api_route("/docs", _page, include_in_schema=False)
    app.add_api_route("/", _to_the_page, include_in_schema=False)


async def _page() -> Response:
    return HTMLResponse(_PAGE)


async def _to_the_page() -> Response:
    return RedirectResponse("docs", 307)
