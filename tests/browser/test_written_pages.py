"""The pages that are files, in a browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs a browser: `make test-browser` installs what it takes and runs this")
from playwright.sync_api import expect

from arborl.view.comparison import settings_of, write_comparison
from arborl.view.report import write_report
from arborl.view.web.token_text import decoder_of

LOOKS = (Path(__file__).parent / "looks.js").read_text()


@pytest.fixture(scope="module")
def files(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("pages")
    for run in (root / "a", root / "b"):
        (run / "summary.json").write_text(json.dumps({"before": {"success": 0.2}, "after": {"success": 0.7}}))
    write_report(root / "a", decoder_of(root / "a"), out=out / "report.html", pictures=out)
    write_comparison(settings_of([root / "a", root / "b"]), out / "compare.html")
    return out


@pytest.mark.parametrize(
    ("name", "words"), [("report", "Tokens with the largest gradient"), ("compare", "Settings that differ")]
)
def test_a_page_shows_all_it_has_at_any_width(page, files, name, words):
    page.goto((files / f"{name}.html").as_uri())
    expect(page.locator("body")).to_contain_text(words)
    assert page.locator("img").evaluate_all("all => all.every((one) => one.naturalWidth > 100)")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert page.evaluate(LOOKS) == []
    for width in (360, 3840):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
