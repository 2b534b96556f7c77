"""Pages written by hand are true, as far as a program can tell: both languages say the same, the front pages are short,
links lead somewhere, and the lists of errors and of MongoDB's documents are whole. The site checks all other links."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pymongo import AsyncMongoClient

from oraculo import errors
from oraculo.cli.client import Refused, Unreachable
from oraculo.core.history import Happened, HistoryEntry
from oraculo.ports.broker import NotMoved
from oraculo.ports.broker_admin import NotAnId
from oraculo.settings import KeyRole
from oraculo.settings.loading import _VARIABLES
from oraculo.stores.mongo.commits import MongoWrite
from oraculo.stores.mongo.documents import entry_documents, task_documents
from oraculo.stores.mongo.server import Collections
from oraculo.testing.store_runs import NOW, creation, full_task, make_run

ROOT = Path(__file__).parents[1]
TRANSLATED = ["README.md", "docs/index.md", "docs/tutorial.md"]
LIMITS = {"README.md": 650, "README.pt-BR.md": 700, "ARCHITECTURE.md": 2_000}  # words, code included
in_both_languages = pytest.mark.parametrize("page", TRANSLATED)


def read(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def both(page: str) -> tuple[str, str]:
    return read(page), read(page.replace(".md", ".pt-BR.md"))


def headings(text: str) -> list[str]:
    return re.findall(r"^#+(?= )", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """Return the head of each block of code, and its lines without comments, which are translated."""
    found = re.findall(r"^```(\w[^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(head, [re.sub(r"\s+# .*", "", line) for line in body.splitlines()]) for head, body in found]


def links(text: str) -> list[str]:
    found = re.findall(r"\]\(([^)]+)\)", text)
    return [link.replace(".pt-BR.", ".") for link in found if not link.startswith("README")]


def commands(text: str) -> list[str]:
    return sorted(re.findall(r"`((?:oraculo|make|uvicorn) [a-z][a-z -]*)", text))


def settings(text: str) -> list[str]:
    return sorted(re.findall(r"ORACULO_\w+", text))


def rows(text: str) -> int:
    return len(re.findall(r"^\|", text, re.MULTILINE))


# -- the same in both languages ---------------------------------------------------------------------------------


@in_both_languages
@pytest.mark.parametrize("part", [headings, blocks, links, commands, settings, rows])
def test_both_languages_have_the_same(page: str, part: Callable[[str], object]) -> None:
    english, portuguese = both(page)
    assert part(portuguese) == part(english)


@pytest.mark.parametrize("page", [page.replace(".md", ".pt-BR.md") for page in TRANSLATED])
def test_a_portuguese_page_leads_to_portuguese_pages(page: str) -> None:
    translated = {(ROOT / each).resolve() for each in TRANSLATED}
    for link in re.findall(r"\]\(([^)]+\.md)\)", read(page)):
        assert link == "README.md" or ((ROOT / page).parent / link).resolve() not in translated, link


# -- short enough to be read ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "most"), LIMITS.items())
def test_a_page_at_the_front_is_short(page: str, most: int) -> None:
    assert len(read(page).split()) <= most


def test_the_changelog_has_a_line_for_each_thing_a_user_can_do() -> None:
    lines = read("CHANGELOG.md").splitlines()
    assert len(lines) <= 40
    assert all(line == "" or line.startswith(("#", "- ")) for line in lines)
    assert max(map(len, lines)) <= 150


# -- true -------------------------------------------------------------------------------------------------------


def test_the_threat_model_names_settings_and_roles_that_there_are() -> None:
    text = read("SECURITY.md")
    assert set(re.findall(r"ORACULO_\w+", text)) <= _VARIABLES.keys()
    assert re.findall(r"^  \| `(\w+)` \|", text, re.MULTILINE) == list(KeyRole)


@pytest.mark.parametrize("page", ["README.md", "README.pt-BR.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_what_is_linked_to_is_there(page: str) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", read(page)):
        assert (ROOT / link).exists(), link


def test_the_tree_of_errors_has_them_all() -> None:
    ours = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    drawn = re.findall(r"^[│├└─ ]*(\w+)(?:  | it |$)", errors.__doc__ or "", re.MULTILINE)
    assert sorted(drawn) == sorted(each.__name__ for each in (*ours, NotAnId, NotMoved, Refused, Unreachable))


def test_the_page_of_mongodb_has_every_field_and_collection() -> None:
    named = set(re.findall(r"`(\w+)`", read("docs/reference/mongodb-documents.md")))
    run = make_run("a", webhook="https://example.org")
    creations = creation(run, key="k"), creation(make_run("b", payload=b'{"x":"%s"}' % (b"x" * 8_000)))
    small, large = (MongoWrite(each.changes, each) for each in creations)
    documents = [small.head, *small.head["entregas"], *task_documents(run, map(full_task, run.tasks)), *large.inputs]
    documents += entry_documents(run, [HistoryEntry(1, NOW, Happened.PROGRESS, 1, 1, "1 %")])
    assert {field for document in documents for field in document} <= named
    collections = Collections(AsyncMongoClient(connect=False).get_database("any"))
    assert {collection.name for collection in vars(collections).values()} <= named
