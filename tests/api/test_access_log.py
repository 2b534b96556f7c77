"""Keys in addresses, as the access log shows them."""

import logging
from collections.abc import Iterator

import pytest

from oraculo.api.server.access_log import mask_keys

KEY = "chave/de+teste&0123456789"
LOGGER = logging.getLogger("uvicorn.access")


@pytest.fixture(autouse=True)
def masked(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    before = LOGGER.filters[:]
    mask_keys([f"reader:{KEY}"])
    caplog.set_level(logging.INFO, LOGGER.name)
    yield
    LOGGER.filters[:] = before


def logged(target: str, caplog: pytest.LogCaptureFixture) -> str:
    LOGGER.propagate = True
    LOGGER.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", target, "1.1", 200)
    return caplog.records[-1].getMessage()


NAMES = ["key", "api_key", "api-key", "apiKey", "X-API-Key", "token", "access_token", "accessToken"]
NAMES += ["auth", "Authorization", "secret", "client_secret", "password", "sig", "jwt"]


@pytest.mark.parametrize("name", NAMES)
def test_the_value_of_a_parameter_called_like_a_secret_is_masked(name: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = f'127.0.0.1:1 - "GET /filas?limit=5&{name}=***&q=a HTTP/1.1" 200'
    assert logged(f"/filas?limit=5&{name}=anything%20else&q=a", caplog) == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/filas?q=chave/de%2Bteste%260123456789", "/filas?***"),
        ("/filas?q=a%20chave%2Fde%2bteste%260123456789", "/filas?***"),
        ("/orquestracoes/chave%2Fde+teste%260123456789/eventos", "/***"),
    ],
)
def test_a_key_is_masked_wherever_it_stands(target: str, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    assert f'"GET {expected} HTTP/1.1"' in logged(target, caplog)


@pytest.mark.parametrize("target", ["/health", "/filas?", "/a%20b?status=erro%2Ctimeout&q=key", "/a?keyboard=1"])
def test_what_is_no_secret_is_shown_as_it_came(target: str, caplog: pytest.LogCaptureFixture) -> None:
    assert f'"GET {target} HTTP/1.1"' in logged(target, caplog)
