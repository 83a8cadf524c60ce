"""A browser, and the viewer in front of it."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "view"), str(Path(__file__).parents[2] / "benchmarks")]


@pytest.fixture(scope="session")
def chromium():
    if "ARBORL_CHROMIUM" not in os.environ:
        pytest.skip("needs a browser: `make test-browser` installs what it takes and runs this")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["ARBORL_CHROMIUM"], args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page that must not complain, nor ask anybody but this machine for anything."""
    with chromium.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light") as context:
        page = context.new_page()
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url) if not _ours(request.url) else None)
        page.set_default_timeout(30_000)
        yield page
        assert wrong == []
        assert page.evaluate("window.hacked") is None


def _ours(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "file://", "data:", "about:", "blob:"))


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    from web_runs import made_run

    root = tmp_path_factory.mktemp("runs")
    made_run(root / "a", steps=5)
    made_run(root / "b", steps=4, seed=8, lr=0.002)
    return root


@pytest.fixture(scope="session")
def viewed():
    """Makes viewers of folders; returns their addresses."""
    from arborl.view.web.app import Viewer

    made = []

    def view(folder: Path) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        viewer = Viewer(folder, port)
        threading.Thread(target=viewer.run, daemon=True).start()
        while not viewer.started:
            time.sleep(0.01)
        made.append(viewer)
        return f"http://127.0.0.1:{port}"

    yield view
    for viewer in made:
        viewer.should_exit = True


@pytest.fixture(scope="session")
def address(root, viewed):
    return viewed(root)
