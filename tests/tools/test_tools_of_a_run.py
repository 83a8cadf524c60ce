"""From a configuration to tools and their format."""

import pytest

from arborl.build import Workshop
from arborl.config.load import load
from arborl.errors import ConfigError
from arborl.tools.library.search import Search


def tools(*settings):
    workshop = Workshop(load(None, ["agent=tool", *settings]), {})
    (seat,) = workshop.seats().values()
    return workshop.tools(seat, seat.tools)


def test_tools_are_made_with_their_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "docs.jsonl").write_text('{"text": "a frozen lake"}\n')
    made = tools("tools=[calculator,search]", f"agent.tool_args.search.corpus={tmp_path}/docs.jsonl")
    assert [one.name for one in made] == ["calculator", "search"]
    assert isinstance(made[1], Search)
    assert "[[lake]]" in made[1].search("lake")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["tools=[search]"], "agent.tool_args.search: .*corpus"),
        (["tools=[search]", "agent.tool_args.search.korpus=x"], r"agent.tool_args.search.korpus: unknown argument"),
        (["tools=[search]", "agent.tool_args.search.corpus=nowhere.jsonl"], "nowhere.jsonl: no corpus there"),
        (["tools=[calculator]", "agent.tool_args.calculator.x=1"], "takes no arguments"),
        (
            ["tools=[calculator]", "agent.tool_args.search.corpus=x"],
            r"no such tool here. Write tools=\[search\]",
        ),
        (["tools=[calculater]"], "Did you mean 'calculator'"),
    ],
)
def test_mistakes_say_where_and_what(settings, said):
    with pytest.raises(ConfigError, match=said):
        tools(*settings)
