"""The pages of the site: `python -m website.site_pages` writes them to build/docs, for any generator of static sites.

Pages of docs/ are written to be read as plain files in the repository, where a link may lead to a README, a recipe or a
source file. On the site such a file is a page too: Markdown as it is, anything else as a listing, a folder as the list
of what is in it. The README is the home page, and a notebook is a page with what it printed and drew. Links are
rewritten accordingly.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from website import notebooks

ROOT = Path(__file__).parents[1]
FRONT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages of the repository's root that are in the navigation."""
FENCED = re.compile(r"(^(?:````.*?^````|```.*?^```)|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
METRIC_TABLE = re.compile(r"^\| metric \| meaning \|\n\|---\|---\|\n(?P<rows>(?:\|.*\n)+)", re.MULTILINE)
HIGHLIGHTED = {".py": "python", ".yaml": "yaml", ".c": "c", ".json": "json"}


def write_pages(folder: Path) -> None:
    """Write all pages and images of the site to a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.md", "*.ipynb"))
    for origin in origins():
        path = folder / place(origin)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(origin), encoding="utf-8")


def origins() -> list[str]:
    """Files and folders of the repository that become pages: those of docs/, and whatever a page links to."""
    files = sorted(path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb"))
    waiting = [*FRONT, *(path.relative_to(ROOT).as_posix() for path in files)]
    known = list(waiting)
    while waiting:
        found = dict.fromkeys(targets(waiting.pop()))
        new = [one for one in found if not one.startswith("docs/") and one not in known]
        known += new
        waiting += new
    return known


def page(origin: str) -> str:
    """The Markdown of a page, with its weight in the search: guides above results and references."""
    markdown = content(origin)
    if origin == "docs/run-folder.md":
        markdown = METRIC_TABLE.sub(metric_headings, markdown)
    return f"---\nsearch:\n  boost: {search_boost(place(origin))}\n---\n{relinked(markdown, origin)}"


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


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs")
