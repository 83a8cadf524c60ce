"""From a configuration to tools and their format."""

import pytest

from arborl.config.load_config import load
from arborl.errors import ConfigError
from arborl.tools.library.search import Search
from arborl.training_run.part_factory import RunPartFactory


def tools(*settings):
    workshop = RunPartFactory(load(None, ["agent=tool", *settings]), {}, connect=True)
    (made,) = workshop.tools().values()
    return made


def test_tools_are_made_with_their_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "docs.jsonl").write_text('{"text": "a frozen lake"}\n')
    made = tools("tools=[calculator,search]", f"agent.tool_args.search.corpus={tmp_path}/docs.jsonl")
    assert [one.name for one in made] == ["calculator", "search"]
    assert isinstance(made[1], Search)
    assert "[[lake]]" in made[1].search("lake")


@pytest.mark.parametrize(
    ("settings", "received"),
    [
        (["tools=[search]"], r"tools\.0\.args\.corpus: is missing"),
        (["tools=[search]", "agent.tool_args.search.korpus=x"], r"agent.tool_args.search.korpus: unknown argument"),
        (["tools=[search]", "agent.tool_args.search.corpus=nowhere.jsonl"], "nowhere.jsonl: no corpus"),
        (["tools=[calculator]", "agent.tool_args.calculator.x=1"], "takes no arguments"),
        (["tools=[calculator]", "agent.tool_args.search.corpus=x"], r"no such tool here. Write tools=\[search\]"),
        (["tools=[calculater]"], "Did you mean 'calculator'"),
    ],
)
def test_mistakes_say_where_and_what(settings, received):
    with pytest.raises(ConfigError, match=received):
        tools(*settings)


def test_a_tool_without_types_or_docstring_warns_what_the_model_will_see(caplog):
    from arborl.tools import tool
    from arborl.tools.core.toolbox import missing_parts, warn_incomplete_specs

    @tool
    def guess(city, days: int = 1):
        return city

    @tool
    def weather(city: str, near: list[str] | None = None) -> str:
        """Forecast the weather."""

    warn_incomplete_specs([guess, weather])
    (warning,) = caplog.messages
    assert "tool 'guess' has no docstring and no type for 'city'. The model sees only: " in warning
    assert '"name": "guess"' in warning
    assert missing_parts(weather.spec) == []


def test_no_tool_of_the_library_leaves_gaps(tmp_path):
    from arborl.tools import TOOLS, Tool
    from arborl.tools.core.toolbox import missing_parts

    assert all(missing_parts(TOOLS[name].spec) == [] for name in TOOLS if isinstance(TOOLS[name], Tool))


def test_a_port_that_is_taken_is_one_line():
    import socket

    from typer.testing import CliRunner

    from arborl.cli.main import app

    pytest.importorskip("fastapi", reason="the extra 'serve'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        received = CliRunner().invoke(app, ["tools", "serve", "--tools", "calculator", "--port", str(port)])
    assert received.exit_code == 2
    assert "cannot listen there (Address already in use)" in received.stderr
    assert received.stderr.count("\n") == 1
