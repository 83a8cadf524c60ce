"""The documentation site is built without a warning and needs nothing from elsewhere; generated pages are current."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path

import pytest

from website.__main__ import PAGES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MKDOCS = pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="MkDocs is missing: pip install 'arborl[docs]'"
)


@pytest.mark.parametrize("name", list(PAGES))
def test_a_generated_page_is_current(name):
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `python -m website`"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, and what its building had to complain about."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    complaints: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mkdocs").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    logging.getLogger("mkdocs").removeHandler(handler)
    return folder, complaints


@MKDOCS
def test_the_site_is_built_without_a_warning(site):
    assert site[1] == []


@MKDOCS
def test_the_site_needs_nothing_from_elsewhere(site):
    pages = list(site[0].rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        fetched = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\" >]+)", page.read_text())
        assert fetched == [], page


@MKDOCS
def test_a_link_out_of_the_docs_leads_to_a_page_of_the_site(site):
    folder = site[0]
    assert 'href="recipes/calculator/index.html"' in (folder / "agents.html").read_text()
    assert 'href="../../results/tools.html' in (folder / "recipes" / "calculator" / "index.html").read_text()
    assert "openai" in (folder / "source" / "examples" / "endpoint" / "openai_loop.py.html").read_text()
    assert 'href="concepts.html"' in (folder / "index.html").read_text()


def test_every_result_is_in_the_list_of_results():
    listed = set(re.findall(r"\]\(([\w-]+\.md)", (DOCS / "results" / "README.md").read_text()))
    assert listed == {path.name for path in (DOCS / "results").glob("*.md")} - {"README.md"}


def test_every_recipe_is_in_the_list_of_recipes():
    listed = set(re.findall(r"\]\(\.\./recipes/([\w-]+)/README\.md\)", (DOCS / "recipes.md").read_text()))
    assert listed == {path.parent.name for path in (ROOT / "recipes").glob("*/README.md")}


def test_every_package_has_its_section():
    packages = {path.parent.name for path in (ROOT / "src" / "arborl").glob("*/__init__.py")}
    assert set(re.findall(r"^## (\w+)$", (DOCS / "packages.md").read_text(), re.MULTILINE)) == packages
