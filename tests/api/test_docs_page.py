"""The page of the API in a real browser: it asks for a key where there are keys, and keeps it in its tab only."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from oraculo.api import auth
from tests.servers.browser_page import BrowserPage, browser_page
from tests.servers.chromium import expect_chromium
from tests.servers.fleet import Fleet

from .live import LiveService, live
from .service import SETTINGS
from .test_http import WITH_KEYS

KEY = "chave-dóis"  # not of ASCII alone
ASKS = "!document.getElementById('ask').hidden"
SHOWS = "document.querySelectorAll('.opblock').length > 10 && document.getElementById('ask').hidden"
FITS = "document.documentElement.scrollWidth <= innerWidth"
WITNESS = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective + event.blockedURI));
"""


@pytest.fixture
def page(fleet: Fleet, tmp_path: Path) -> Iterator[BrowserPage]:
    with browser_page(expect_chromium(fleet), tmp_path / "profile") as page:
        page.before_each_page(WITNESS)
        yield page


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveService]:
    monkeypatch.setattr(auth, "WRONG_KEY_PAUSE", 0.01)
    with live(tmp_path, WITH_KEYS) as served:
        yield served


def give(page: BrowserPage, key: str) -> None:
    page.wait_for(ASKS)
    page.value("document.getElementById('key').value = ''")
    page.type(key)
    page.press_enter()


def kept(page: BrowserPage) -> str:
    """All that the page leaves outside its own tab."""
    kept: str = page.value("location.href + document.cookie + JSON.stringify({...localStorage})")
    return kept


def test_the_page_asks_for_a_key_and_then_shows_the_api(page: BrowserPage, served: LiveService, tmp_path: Path) -> None:
    page.size(390, 844)
    page.open(f"{served.url}/")
    page.wait_for(ASKS)
    assert page.value(FITS)
    page.picture(tmp_path / "asks.png")
    give(page, "nenhuma-chave-daqui")
    page.wait_for("document.getElementById('fault').textContent == 'The server does not know this key.'")
    page.picture(tmp_path / "refused.png")
    give(page, KEY)
    page.wait_for(SHOWS)
    assert page.value(FITS)
    assert page.value("document.querySelector('.opblock').clientWidth > 320"), "the button does not take half of it"
    page.picture(tmp_path / "shows.png")
    assert page.value("violations") == []
    assert KEY not in kept(page)
    assert "chave" not in kept(page)


def test_a_call_that_is_tried_out_has_the_key(page: BrowserPage, served: LiveService) -> None:
    page.size(1280, 900)
    page.open(f"{served.url}/docs")
    give(page, KEY)
    page.wait_for(SHOWS)
    call = "#operations-pipelines-list_pipelines"
    page.click(f"{call} .opblock-summary-control")
    page.wait_for(f"!!document.querySelector('{call} .execute')")
    answer = f"{call} .live-responses-table tbody .response-col_status"
    # A click is lost when the page draws the button anew at that moment: then it is clicked again, as one would.
    execute = (
        f"!document.querySelector('{call} .loading-container') && document.querySelector('{call} .execute').click()"
    )
    page.wait_for(f"!!document.querySelector('{answer}') || ({execute}, false)")
    assert page.value(f"document.querySelector('{answer}').innerText").startswith("200")
    assert page.value("violations") == []


def test_the_key_lasts_as_long_as_its_tab_and_can_be_forgotten(page: BrowserPage, served: LiveService) -> None:
    page.open(f"{served.url}/docs")
    give(page, KEY)
    page.wait_for(SHOWS)
    page.value("location.reload(); window.old = true")
    page.wait_for(f"!window.old && {SHOWS}")
    page.click("#forget")
    page.wait_for(f"!!document.getElementById('ask') && {ASKS}")
    assert page.value("JSON.stringify({...sessionStorage})") == "{}"


def test_the_page_speaks_portuguese_to_who_does(page: BrowserPage, served: LiveService) -> None:
    page.size(390, 844, language="pt-BR")
    page.open(f"{served.url}/docs")
    page.wait_for(ASKS)
    assert page.value("document.querySelector('label').innerText") == "Chave da API"
    assert page.value("document.documentElement.lang") == "pt"


def test_without_keys_the_page_shows_the_api_at_once(page: BrowserPage, tmp_path: Path) -> None:
    with live(tmp_path, SETTINGS) as served:
        page.open(f"{served.url}/docs")
        page.wait_for(SHOWS)
        assert page.value("document.getElementById('forget').hidden")
        assert page.value("violations") == []


def test_the_page_needs_no_key_and_what_it_shows_does(served: LiveService) -> None:
    with httpx2.Client(base_url=served.url) as client:
        for path in ("/", "/docs", "/swagger/docs.js", "/swagger/docs.css", "/swagger/swagger-ui.css"):
            reply = client.get(path, follow_redirects=True)
            assert reply.status_code == 200
            assert "orquestracoes" not in reply.text.lower(), "it names no call"
        policy = client.get("/docs").headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        for path in ("/openapi.json", "/docs/", "/docs/x", "/swagger", "/swagger/../openapi.json"):
            assert client.get(path).status_code == 401, path
        for path in ("/swagger%2F..%2Fopenapi.json", "/swagger/%2e%2e/openapi.json", "/swagger/..%2Fauth.py"):
            assert client.get(path).status_code in (401, 404), path
