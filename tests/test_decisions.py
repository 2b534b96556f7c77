"""ARCHITECTURE.md and the pages of decisions stay short, are all listed, and name only what exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs" / "decisions"
INDEX = (DECISIONS / "index.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
PAGES = sorted(path for path in DECISIONS.glob("*.md") if path.name != "index.md")


def test_the_architecture_has_at_most_2000_words_and_three_pictures() -> None:
    assert len(ARCHITECTURE.split()) <= 2_000
    assert len(re.findall(r"^!\[", ARCHITECTURE, re.MULTILINE)) == 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_decision_has_at_most_200_words_in_four_parts(page: Path) -> None:
    text = page.read_text("utf-8")
    assert len(text.split()) <= 200
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == ["Context", "Decision", "Why", "Cost"]


def test_the_index_lists_each_decision_once_with_its_number_and_title() -> None:
    listed = re.findall(r"^\| (\d+) \| \[(.+?)\]\((.+?)\) \| \S.*\. \|$", INDEX, re.MULTILINE)
    titles = [page.read_text("utf-8").partition("\n")[0].removeprefix("# ") for page in PAGES]
    assert listed == [(str(int(page.name[:4])), title, page.name) for page, title in zip(PAGES, titles, strict=True)]
    assert [int(page.name[:4]) for page in PAGES] == list(range(1, len(PAGES) + 1))


def test_the_site_lists_each_decision() -> None:
    listed = re.findall(r"- decisions/(\d\S+)", (ROOT / "mkdocs.yml").read_text("utf-8"))
    assert listed == [page.name for page in PAGES]


def test_the_rooms_that_are_named_exist() -> None:
    texts = [ARCHITECTURE, *(page.read_text("utf-8") for page in PAGES)]
    named = {name for text in texts for name in re.findall(r"`(\w+(?:/\w+)+/?(?:\.py)?)`", text)}
    assert "core/aggregate.py" in named
    roots = (ROOT / "src" / "oraculo", ROOT)
    assert not [
        name for name in named if not any((root / f"{name}{end}").exists() for root in roots for end in ("", ".py"))
    ]
