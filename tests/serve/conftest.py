"""One server for all tests of a process: the embedded model behind a real socket."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve'")
pytest.importorskip("uvicorn", reason="the extra 'serve'")

from conftest_serve import running

from arborl.serve.opened import open_model


@pytest.fixture(scope="session")
def opened():
    made = open_model("seedling", ["agent=tool", "tools=[calculator]"])
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="session")
def address(opened):
    with running(opened) as at:
        yield at
