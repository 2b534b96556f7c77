"""Hooks of MkDocs: links that leave docs/ work on the site too, the site is built in seconds, and asks no other host.

A page of the docs may link to a file or folder of the repository, as `../../examples/worker_app.py`. On a forge such a
link simply works. For the site, `on_files` copies the target to `source/` and points the link there. Markdown
outside docs/ becomes a page, its own links are mended in the same way, and a folder without a README becomes a list.
"""

import posixpath
import re
import shutil
from pathlib import Path

import jinja2
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
_CACHE = ROOT / ".cache" / "site"
_SDK = ["__init__.py", "worker", "testing/__init__.py", "testing/harness.py", "wire/__init__.py", "wire/answers.py"]
# What makes a browser load something from another host; Material loads Mermaid from one for a diagram.
_FOREIGN = re.compile(
    r'<(?:script|img|iframe)\b[^>]*\bsrc="https?:[^>]*>|<link\b[^>]*\brel="(?:stylesheet|preconnect)"[^>]*'
    r'\bhref="https?:[^>]*>|<\w+ class="mermaid"'
)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> None:
    """Show mkdocstrings only what the page of the SDK describes: reading all of the package takes seconds."""
    sources = _CACHE / "src"
    shutil.rmtree(sources, ignore_errors=True)
    for name in _SDK:
        link = sources / "oraculo" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(ROOT / "src" / "oraculo" / name)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(sources)]


def on_env(env: jinja2.Environment, config: MkDocsConfig, files: Files) -> None:
    """Keep compiled templates: each language is built apart, and would compile all of them anew."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    env.bytecode_cache = jinja2.FileSystemBytecodeCache(str(_CACHE))


@event_priority(-200)  # after the plugin for languages, which refuses pages from outside docs/
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each file outside docs/ that a page links to, directly or through another such file."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in {_target(page, link) for link in _LINK.findall(_text(page))} - seen:
            seen.add(target)
            if not target.startswith("docs/") and (content := _content(target)):
                files.append(File.generated(config, _on_site(target), content=content))
                waiting += [target] if target.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links between docs/ and the rest of the repository to where the site has their targets."""
    uri = page.file.src_uri
    if "/" not in uri:  # a tab of one page: its list of pages would have one line
        page.meta["hide"] = ["navigation"]
    here = uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"

    def mended(link: re.Match[str]) -> str:
        target = _target(here, link[1])
        if here.startswith("docs/") and target.startswith("docs/"):
            return link[1]
        return posixpath.relpath(_on_site(target), posixpath.dirname(_on_site(here)))

    return _LINK.sub(mended, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> None:
    """Refuse a page that would load a script, a style or a picture from another host."""
    if found := _FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {found[0]}")


def _target(page: str, link: str) -> str:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return f"{target}/README.md" if (ROOT / target).is_dir() else target


def _on_site(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def _text(page: str) -> str:
    return (_content(page) or b"").decode()


def _content(target: str) -> bytes | None:
    path = ROOT / target
    if path.is_file():
        return path.read_bytes()
    if path.name == "README.md" and path.parent.is_dir():
        names = sorted(each.name for each in path.parent.iterdir() if each.is_file())
        return "\n".join([f"# {path.parent.name}\n", *(f"- [{name}]({name})" for name in names)]).encode()
    return None
