"""What is written by hand is so, as far as a program can tell: the README is the same in both languages, links lead
somewhere, and the lists of errors and of MongoDB's documents are whole."""

import re
from pathlib import Path

import pytest
from bson.objectid import ObjectId
from pymongo.asynchronous.collection import AsyncCollection

from oraculo import errors
from oraculo.cli.client import Refused, Unreachable
from oraculo.ports.broker import NotAnId, NotMoved, NotTaken
from oraculo.settings import KeyRole
from oraculo.settings.loading import _VARIABLES
from oraculo.stores.mongo.server import Server
from oraculo.stores.mongo.writes import EMBEDDED_TASKS, Birth
from oraculo.testing.store_runs import creation, make_run

ROOT = Path(__file__).parents[1]
ENGLISH, PORTUGUESE = ((ROOT / name).read_text("utf-8") for name in ("README.md", "README.pt-BR.md"))
TRANSLATED = {"json", "python"}  # blocks with words for people in them


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def headings(text: str) -> list[str]:
    return re.findall(r"^#+(?= )", without_blocks(text), re.MULTILINE)


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """The language of each, and its lines without comments."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(kind, [] if kind in TRANSLATED else _code(body)) for kind, body in found]


def _code(body: str) -> list[str]:
    return [re.sub(r"\s+#.*", "", line) for line in body.splitlines()]


def links(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("README")]


def test_they_have_the_same_headings() -> None:
    assert headings(PORTUGUESE) == headings(ENGLISH)


def test_they_show_the_same_commands() -> None:
    assert blocks(PORTUGUESE) == blocks(ENGLISH)
    commands = re.compile(r"`((?:oraculo|make|uvicorn) [a-z][a-z -]*)")
    assert sorted(commands.findall(PORTUGUESE)) == sorted(commands.findall(ENGLISH))


def test_they_name_the_same_settings() -> None:
    setting = re.compile(r"ORACULO_\w+")
    assert sorted(setting.findall(PORTUGUESE)) == sorted(setting.findall(ENGLISH))


def test_the_threat_model_names_settings_and_roles_that_there_are() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    assert set(re.findall(r"ORACULO_\w+", text)) <= _VARIABLES.keys()
    assert re.findall(r"^  \| `(\w+)` \|", text, re.MULTILINE) == list(KeyRole)


def test_they_have_as_many_rows_of_tables_and_the_same_links() -> None:
    row = re.compile(r"^\|", re.MULTILINE)
    assert len(row.findall(PORTUGUESE)) == len(row.findall(ENGLISH))
    assert links(PORTUGUESE) == links(ENGLISH)


@pytest.mark.parametrize("page", ["README.md", "README.pt-BR.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_what_is_linked_to_is_there(page: str) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text("utf-8")):
        assert (ROOT / link).exists(), link


def test_the_tree_of_errors_has_them_all() -> None:
    ours = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    drawn = re.findall(r"^[│├└─ ]*(\w+)(?:  | it |$)", errors.__doc__ or "", re.MULTILINE)
    assert sorted(drawn) == sorted(each.__name__ for each in (*ours, NotAnId, NotMoved, NotTaken, Refused, Unreachable))


async def test_the_page_of_stores_has_every_field_and_collection_of_mongodb() -> None:
    page = (ROOT / "docs" / "reference" / "limits-stores.md").read_text("utf-8").partition("## MongoDB")[2]
    told = set(re.findall(r"`(\w+)`", page))
    wide = [{"id": f"t{number}", "fila": "a"} for number in range(EMBEDDED_TASKS + 1)]
    for request in ({"webhook": "https://example.org", "payload": b'{"x":"%s"}' % (b"x" * 9_000)}, {"destinos": wide}):
        run = Birth(creation(make_run("a", **request), key="k"), ObjectId()).document
        assert run.keys() <= told
        for part in ("tarefas", "entregas", "historico"):
            assert {field for item in run.get(part, ()) for field in item} <= told, part
    server = Server("mongodb://nowhere", "nowhere", 1.0, 1.0)
    collections = {each.name for each in vars(server).values() if isinstance(each, AsyncCollection)}
    await server.close()
    assert collections <= told
