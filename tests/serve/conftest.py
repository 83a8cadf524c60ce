"""One server for all tests of a process: the embedded model behind a real socket."""

import asyncio

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve'")
pytest.importorskip("uvicorn", reason="the extra 'serve'")

from serve_clients import running

from arborl.serve.served_model import load_for_serving


@pytest.fixture(scope="session")
def loaded():
    made = load_for_serving("seedling", ["agent=tool", "tools=[calculator]"])
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="session")
def address(loaded):
    with running(loaded) as at:
        yield at
