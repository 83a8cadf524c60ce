"""The documentation site is built without a warning and needs nothing from elsewhere; generated pages are current."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from pathlib import Path

import pytest

from website.__main__ import PAGES
from website.site_pages import write_pages

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

    folder, pages = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("pages")
    write_pages(pages)
    complaints: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mkdocs").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build(load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(pages), site_dir=str(folder)))
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


QUESTIONS = {
    "OOM": "memory-and-speed", "out of memory": "memory-and-speed", "quickstart": "getting-started",
    "SFT": "offline", "DPO": "offline", "LoRA": "lora-7b", "multi-GPU": "scale-out", "FSDP": "scale-out",
    "resume checkpoint": "resume", "wandb": "tracking", "vLLM": "engines", "own tool": "tools",
    "own environment": "environments", "custom reward": "rewards", "reward model": "rewards", "convert verl": "migrate",
    "JSON schema": "serve", "MCP": "tools", "async staleness": "async", "hyperparameter search": "tuning",
    "chat template": "chat", "GRPO advantage": "algorithms", "learner.lr": "configuration", "metrics": "run-folder",
    "flat reward": "flat-reward", "reward does not rise": "flat-reward", "laptop": "laptop", "CPU training": "laptop",
    "Qwen2.5-7B": "lora-7b", "eight GPUs": "eight-gpus",
}  # fmt: skip


@pytest.fixture(scope="module")
def search(site):
    """Pages for a question, best first: the site's index, searched and ranked as Material for MkDocs does."""
    lunr = pytest.importorskip("lunr", reason="needs pip install lunr").lunr
    index = json.loads((site[0] / "search" / "search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])

    def words(text):
        return separator.sub(" ", re.sub(r"<[^>]+>", " ", text)).lower().split()

    documents = []
    for entry in index["docs"]:
        texts = {name: " ".join(words(entry[name])) for name in ("title", "text")}
        documents.append(({"ref": entry["location"], **texts}, {"boost": entry.get("boost", 1)}))
    built = lunr("ref", [{"field_name": "title", "boost": 1000}, "text"], documents)

    def pages(question):
        asked, scores = words(question), dict[str, float]()
        for hit in built.search(" ".join(f"{word} {word}*" for word in asked)):
            page, _, section = hit["ref"].partition("#")
            found = list(hit["match_data"].metadata)
            has_all = all(any(term.startswith(word[: max(3, len(word) - 3)]) for term in found) for word in asked)
            scores[page] = max(scores.get(page, 0.0), hit["score"] * (1 + ((not section) + has_all) ** 2))
        return [page.removesuffix(".html") for page in sorted(scores, key=lambda page: -scores[page])]

    return pages


@MKDOCS
@pytest.mark.parametrize(("question", "page"), QUESTIONS.items())
def test_a_question_finds_its_guide_among_the_first_three(search, question, page):
    assert page in search(question)[:3]


@MKDOCS
def test_every_metric_is_found(search):
    rows = re.findall(r"^\| (`[a-z]+/.*?) \| ", (DOCS / "run-folder.md").read_text(), re.MULTILINE)
    names = [name for row in rows for name in re.findall("`([^`<]+/[^`<]+)`", row)]
    assert len(names) > 100
    assert [name for name in names if "run-folder" not in search(name)[:5]] == []


def test_every_result_is_in_the_list_of_results():
    listed = set(re.findall(r"\]\(([\w-]+\.md)", (DOCS / "results" / "README.md").read_text()))
    assert listed == {path.name for path in (DOCS / "results").glob("*.md")} - {"README.md"}


def test_every_recipe_is_in_the_list_of_recipes():
    listed = set(re.findall(r"\]\(\.\./recipes/([\w-]+)/README\.md\)", (DOCS / "recipes.md").read_text()))
    assert listed == {path.parent.name for path in (ROOT / "recipes").glob("*/README.md")}


def test_every_package_has_its_section():
    packages = {path.parent.name for path in (ROOT / "src" / "arborl").glob("*/__init__.py")}
    assert set(re.findall(r"^## (\w+)$", (DOCS / "packages.md").read_text(), re.MULTILINE)) == packages
