"""The page that shows the OpenAPI document, with scripts of our own.

Its addresses are relative: a proxy may put it under another host, scheme or path, and need not tell us.
"""

from fastapi import FastAPI, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import RedirectResponse
from fastapi.staticfiles import StaticFiles

from oraculo.api.openapi import TITLE

_PARAMETERS = {"tryItOutEnabled": True, "persistAuthorization": True, "filter": True, "displayRequestDuration": True}


def install(app: FastAPI) -> None:
    app.mount("/swagger", StaticFiles(packages=[("fastapi_swagger", "resources")]))
    app.add_api_route("/docs", _page, include_in_schema=False)
    app.add_api_route("/", _to_the_page, include_in_schema=False)


async def _page() -> Response:
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title=f"{TITLE} - Swagger UI",
        swagger_js_url="swagger/swagger-ui-bundle.js",
        swagger_css_url="swagger/swagger-ui.css",
        swagger_favicon_url="swagger/favicon-32x32.png",
        swagger_ui_parameters=_PARAMETERS,
    )


async def _to_the_page() -> Response:
    return RedirectResponse("docs", 307)
