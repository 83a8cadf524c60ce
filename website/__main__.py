"""`python -m website` writes the generated pages of docs/; a test says when one of them is behind the source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from arborl.config import config_page
from website import commands, public, rooms

DOCS = Path(__file__).parents[1] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": config_page.page,
    "cli-reference.md": commands.page,
    "api.md": public.page,
    "rooms.md": rooms.page,
}
"""The generated pages, and who writes each."""

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
