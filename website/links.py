"""What the site adds to the files of docs/: links out of that folder lead somewhere.

Pages are written to be read as plain files in the repository, where a link may lead to a README, a recipe or a source
file. On the site such a file is a page too: Markdown as it is, anything else as a listing, a folder as the list of what
is in it. The README is the home page, and a notebook is a page with what it printed and drew.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from website import notebooks

ROOT = Path(__file__).parents[1]
FRONT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages of the repository's root that stand in the navigation."""
FENCED = re.compile(r"(^(?:````.*?^````|```.*?^```)|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
METRIC_TABLE = re.compile(r"^\| metric \| meaning \|\n\|---\|---\|\n(?P<rows>(?:\|.*\n)+)", re.MULTILINE)
HIGHLIGHTED = {".py": "python", ".yaml": "yaml", ".c": "c", ".json": "json"}


origins: dict[str, str] = {}
"""Of the pages that are added: their place on the site, and the file or folder of the repository."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file of the repository that a page, or a page added for one, leads to."""
    books = [f"docs/tutorials/{path.name}" for path in sorted(notebooks.FOLDER.glob("*.ipynb"))]
    waiting = [*FRONT, *books, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    known = set(waiting)
    while waiting:
        origin = waiting.pop()
        if not origin.startswith("docs/") or origin in books:
            added = File.generated(config, place(origin), content=content(origin))
            added.inclusion = InclusionLevel.INCLUDED if origin in (*FRONT, *books) else InclusionLevel.NOT_IN_NAV
            files.append(added)
            origins[added.src_uri] = origin
        new = {found for found in targets(origin) if not found.startswith("docs/")} - known
        known |= new
        waiting += sorted(new)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site needs them: from where the page is on it to where the target is; and the page's rank in the
    search: guides above results and references."""
    page.meta["search"] = {"boost": search_boost(page.file.src_uri)}
    if page.file.src_uri == "run-folder.md":
        markdown = METRIC_TABLE.sub(metric_headings, markdown)
    return relinked(markdown, origins.get(page.file.src_uri, f"docs/{page.file.src_uri}"))


def metric_headings(table: re.Match[str]) -> str:
    """A heading per row of a table of metrics, so that the search finds every metric."""
    rows = [line.strip("|").split(" | ", 1) for line in table["rows"].splitlines()]
    return "".join(f"#### {names.strip()}\n\n{meaning.strip()}\n\n" for names, meaning in rows)


def search_boost(uri: str) -> float:
    """The factor of a page's score in the search."""
    if uri.startswith(("source/", "results/")) or uri in ("CHANGELOG.md", "decisions.md", "packages.md"):
        return 0.2
    return 0.5 if uri in ("api.md", "cli-reference.md", "index.md") or uri.startswith("recipes/") else 1.0


def content(origin: str) -> str:
    """The Markdown of a file or folder of the repository."""
    path = ROOT / origin
    if path.is_dir():
        inside = sorted(one.name for one in path.iterdir() if not one.name.startswith(("__", ".")))
        return f"# {origin}\n\n" + "".join(f"- [{name}]({name})\n" for name in inside)
    if path.suffix == ".ipynb":
        return notebooks.page(path)
    text = path.read_text(encoding="utf-8")
    return text if origin.endswith(".md") else f"# {origin}\n\n````{HIGHLIGHTED.get(path.suffix, '')}\n{text}````\n"


def place(origin: str) -> str:
    """Where a file of the repository is on the site: `docs/a.md` -> `a.md`, `src/x.py` -> `source/src/x.py.md`."""
    if origin == "README.md":
        return "index.md"
    if origin.startswith("docs/"):
        return origin.removeprefix("docs/").replace(".ipynb", ".md")
    if origin.endswith(".md"):
        return origin
    return f"source/{origin}.md" if (ROOT / origin).is_file() else f"source/{origin}/index.md"


def targets(origin: str) -> Iterator[str]:
    """The files and folders of the repository that a page leads to."""
    for part in FENCED.split(content(origin))[::2]:
        yield from (found for _, link, _ in LINK.findall(part) if (found := resolved(link, origin)) is not None)


def resolved(link: str, origin: str) -> str | None:
    """What a link of a page means, as a path in the repository; none for addresses and anchors of the same page."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path:
        return None
    folder = origin if (ROOT / origin).is_dir() else posixpath.dirname(origin)
    found = posixpath.normpath(posixpath.join(folder, parts.path))
    if (ROOT / found).is_dir() and (ROOT / found / "README.md").is_file():
        found = posixpath.join(found, "README.md")
    return found if not found.startswith("..") and (ROOT / found).exists() else None


def relinked(markdown: str, origin: str) -> str:
    """The text of the page with every link to a file of the repository as a link within the site."""

    def changed(match: re.Match[str]) -> str:
        target = resolved(match[2], origin)
        if target is None:
            return match[0]
        anchor = urlsplit(match[2]).fragment
        to = posixpath.relpath(place(target), posixpath.dirname(place(origin)) or ".")
        return f"{match[1]}{to}{'#' + anchor if anchor else ''}{match[3]}"

    parts = FENCED.split(markdown)
    return "".join(part if index % 2 else LINK.sub(changed, part) for index, part in enumerate(parts))
