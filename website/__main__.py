"""`python -m website` writes the generated pages of docs/; a test fails when one of them is outdated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from arborl.config import config_page
from website import commands, packages, public

DOCS = Path(__file__).parents[1] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": config_page.page,
    "cli-reference.md": commands.page,
    "api.md": public.page,
    "packages.md": packages.page,
}
"""The generated pages and the functions that write them."""

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
