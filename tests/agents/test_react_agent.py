import pytest
from scripted_model import Heard, double, play

from arborl.agents import AGENTS
from arborl.agents.tool_agents import ReactAgent, ToolAgent
from arborl.tools import TOOLS
from arborl.types import Message, ToolCall


class NeverOver(Heard):
    async def step(self, action):
        step = await super().step(action)
        return type(step)(step.observation)


def test_actions_are_answered_and_the_final_answer_is_what_the_environment_hears():
    model, heard = play(
        ReactAgent([double]),
        'Thought: double it.\nAction: double\nAction Input: {"x": 21}\nObservation:',
        "Thought: I know the answer\nFinal Answer: 42",
    )
    assert heard == "42"
    system = model.prompts[0][0]
    assert system.content.startswith("Be brief.\n\n")
    assert "Action: one of double" in system.content
    assert "double: Double a number." in system.content
    assert model.prompts[1][-1] == Message("user", "Observation: 42")
    assert model.stops == [("\nObservation:",)] * 2
    assert model.counts == {"tool/used": 1, "tool/calls": 1}


def test_mistakes_are_observations_and_counted():
    model, heard = play(
        ReactAgent([double], max_tool_rounds=3),
        "Action: duble\nAction Input: {}",
        "Action: double\nAction Input: many",
        "Just thinking.",
        "Action: double",
    )
    reported = [prompt[-1].content for prompt in model.prompts[1:]]
    assert "Did you mean 'double'?" in reported[0]
    assert "not valid JSON" in reported[1]
    assert reported[2] == "Observation: write either an Action with its Action Input, or a Final Answer"
    assert heard == "Action: double"  # the rounds are used up
    assert model.counts == {
        "tool/used": 1,
        "tool/calls": 3,
        "tool/failed": 3,
        "tool/unknown_tool": 1,
        "tool/malformed": 2,
    }


@pytest.mark.parametrize("rounds", [8, 0])
def test_a_terminal_tool_ends_the_episode_with_its_answer_whatever_the_environment_says(rounds):
    finish = TOOLS["finish"]
    call = Message("assistant", "raw text", tool_calls=(ToolCall("1", "finish", {"answer": "42"}),), sampled=True)
    model, heard = play(ToolAgent([finish, double], max_tool_rounds=rounds), call, env=NeverOver())
    assert heard == "42"
    assert len(model.prompts) == 1
    if rounds:
        _, heard = play(ReactAgent([finish]), 'Action: finish\nAction Input: {"answer": "42"}', env=NeverOver())
        assert heard == "42"


def test_failed_terminal_calls_are_answered_and_bad_roles_refused():
    wrong = Message("assistant", "", tool_calls=(ToolCall("1", "finish", {}),), sampled=True)
    model, heard = play(ToolAgent([TOOLS["finish"]]), wrong, "42")
    assert "argument 'answer' is missing" in model.prompts[1][-1].content
    assert heard == "42"
    assert AGENTS["react"] is ReactAgent
    with pytest.raises(ValueError, match="result_role"):
        ReactAgent(result_role="system")
