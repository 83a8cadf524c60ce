import asyncio

import pytest
from scripted_model import Script, double

from arborl.agents.tool_agents import ToolAgent
from arborl.envs.env import Env, Observation, Step
from arborl.types import Call, Completion, Episode, FinishReason, Message, Task, ToolCall, Turn


class TwoAnswers(Env):
    async def reset(self, task, seed):
        self.heard = []
        return Observation((Message("system", "Be brief."), Message("user", "first?")))

    async def step(self, action):
        self.heard.append(action)
        return Step(Observation((Message("user", "second?"),)), terminated=len(self.heard) == 2)


def call(id, x, name="double", error=None):
    return ToolCall(id, name, {"x": x}, error)


def says(text, *calls):
    return Message("assistant", text, tool_calls=calls, sampled=True)


def test_calls_are_answered_by_tools_and_the_rest_by_the_environment():
    model = Script(says("let me see", call("1", 2), call("2", 3)), says("4 and 6"), says("done"))
    env = TwoAnswers()
    asyncio.run(ToolAgent([double]).run(Task("t"), env, model))
    assert [message.content for message in env.heard] == ["4 and 6", "done"]
    assert [message.content for message in model.prompts[0]] == ["Be brief.", "first?"]
    assert model.prompts[1][-2:] == [
        Message("tool", "4", tool_call_id="1", name="double"),
        Message("tool", "6", tool_call_id="2", name="double"),
    ]
    assert [message.content for message in model.prompts[2]][-2:] == ["4 and 6", "second?"]
    for before, after in zip(model.prompts, model.prompts[1:], strict=False):
        assert after[: len(before)] == before
    assert all(tools == (double.spec,) for tools in model.tools)
    assert model.counts == {"tool/used": 1, "tool/calls": 2}


def test_failures_are_counted_by_kind_and_read_by_the_model():
    calls = call("1", 2, "dubble"), call("2", "two"), call("3", 1, error="bad JSON")
    model = Script(says("", *calls), says("a"), says("b"))
    asyncio.run(ToolAgent([double]).run(Task("t"), TwoAnswers(), model))
    assert model.counts == {
        "tool/used": 1,
        "tool/calls": 3,
        "tool/failed": 3,
        "tool/unknown_tool": 1,
        "tool/arguments": 1,
        "tool/malformed": 1,
    }
    assert "Did you mean 'double'?" in model.prompts[1][-3].content


def test_rounds_are_limited():
    again = says("again", call("1", 1))
    model = Script(*[again] * 6)
    env = TwoAnswers()
    asyncio.run(ToolAgent([double], max_tool_rounds=2).run(Task("t"), env, model))
    assert env.heard == [again, again]
    assert len(model.prompts) == 6
    assert model.counts == {"tool/used": 1, "tool/calls": 4}
    model = Script(says("a", call("1", 1)), says("b"))
    asyncio.run(ToolAgent([double], max_tool_rounds=0).run(Task("t"), TwoAnswers(), model))
    assert not model.counts
    with pytest.raises(ValueError, match="max_tool_rounds=-1"):
        ToolAgent(max_tool_rounds=-1)


def test_an_episode_lists_the_tool_calls_of_all_replies_although_a_turn_has_only_the_last():
    replies = [says("", call("1", 2), call("2", 3)), says("", call("3", 1)), says("four")]
    calls = [Call([1], Completion([2], [0.0], FinishReason.STOP), turn=0, reply=reply) for reply in [*replies, None]]
    episode = Episode("e", Task("t"), turns=[Turn(replies[-1])], calls=calls)
    assert [one.id for one in episode.tool_calls] == ["1", "2", "3"]
    assert Episode("e", Task("t")).tool_calls == []
