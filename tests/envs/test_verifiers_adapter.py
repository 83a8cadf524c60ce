"""verifiers in both directions: with the package where it is installed, otherwise with a stand-in of the same shape.

The versions with environments need `mcp<2`, so they cannot be installed by `make setup`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from arborl.envs import ENVS
from arborl.envs.adapters import verifiers_adapter
from arborl.envs.checker import check_env
from arborl.errors import ConfigError
from arborl.registry import load
from arborl.rollout.env_processes import ProcessEnv, ProcessPool
from arborl.types import Message, Task, ToolCall

EXAMPLES = Path(__file__).with_name("verifiers_examples.py")
HELD_OUT = {"split": "held_out"}


def is_installed():
    try:
        import verifiers
    except ImportError:
        return False
    return hasattr(verifiers, "MultiTurnEnv")


@pytest.fixture
def vf(monkeypatch):
    """The package, or the stand-in."""
    if not is_installed():
        import verifiers_stand_in

        for name, module in verifiers_stand_in.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(verifiers_adapter, "_LOADED", {})


@pytest.fixture
def real():
    if not is_installed():
        pytest.skip("needs pip install 'arborl[verifiers]', a version before 0.4")


def make(name, **more):
    return ENVS.build("verifiers", {"environment": f"{EXAMPLES}:{name}"} | more, "env.args")


def play(env, *texts, task=None):
    """The first messages and the steps that answer these messages; texts are messages of the agent."""

    async def run():
        opening = await env.reset(task or Task("t", seed=3), 0)
        steps = [await env.step(text if isinstance(text, Message) else Message("assistant", text)) for text in texts]
        numbers = env.metrics()
        await env.close()
        return opening.messages, steps, numbers

    return asyncio.run(run())


def said(step):
    return [message.content for message in step.observation.messages]


@pytest.mark.parametrize("name", ["sums", "guess", "tools", "ledger"])
def test_environments_of_verifiers_keep_our_contract(vf, name):
    assert check_env(lambda: make(name), Task("t", seed=3)) == []


def test_the_rubric_is_the_reward_and_its_functions_are_metrics(vf):
    (system, question), _, _ = play(make("sums"))
    assert (system.role, system.content) == ("system", "Add.")
    answer = str(int(question.content.split()[0]) + 1)
    _, (step,), numbers = play(make("sums"), f" {answer}")
    assert (step.reward, step.terminated, step.truncated) == (pytest.approx(1.1), True, False)
    assert numbers == {"right": 1.0, "short": 1.0, "success": 1.0, "num_turns": 1.0}
    _, (step,), numbers = play(make("sums"), "no idea at all")
    assert (step.reward, numbers["success"], numbers["right"]) == (0.0, 0.0, 0.0)
    assert play(make("sums", success=0.05), "no")[2]["success"] == 1.0


def test_held_out_rows_are_never_trained_on_and_an_eval_dataset_is_used(vf):
    def questions(env, fields, count=60):
        return {play(env, task=Task("t", seed=seed, fields=fields))[0][-1].content for seed in range(count)}

    for args in ({"count": 40}, {"count": 2}):  # of two rows, one is held out
        train, held_out = questions(make("sums", args=args), {}), questions(make("sums", args=args), HELD_OUT)
        assert train
        assert held_out
        assert not train & held_out
    only = questions(make("sums", args={"eval_count": 3}), HELD_OUT)
    assert only == {"1000 + 1?", "1001 + 1?", "1002 + 1?"}
    with pytest.raises(ValueError, match="none can be held out"):
        play(make("sums", args={"count": 1}), task=Task("t", fields=HELD_OUT))
    with pytest.raises(ValueError, match="index=40: the data set has rows 0 to 39"):
        play(make("sums"), task=Task("t", fields={"index": 40}))
    assert play(make("sums"), task=Task("t", fields={"index": 7}))[0][-1].content == "7 + 1?"


def test_several_messages_end_with_the_environments_last_one_or_at_its_limit(vf):
    task = Task("t", fields={"index": 2})
    _, steps, numbers = play(make("guess"), "1", "9", "3", task=task)
    assert [said(step) for step in steps] == [["Higher."], ["Not higher."], ["Right."]]
    assert [(step.reward, step.terminated) for step in steps] == [(0.0, False), (0.0, False), (1.0, True)]
    assert (numbers["right_guess"], numbers["guesses"]) == (1.0, 3.0)
    _, steps, numbers = play(make("guess"), "9", "9", "9", "9", task=task)
    assert (steps[-1].truncated, steps[-1].terminated, numbers["success"]) == (True, False, 0.0)


def test_tools_are_described_called_inside_the_environment_and_answered_as_tools(vf):
    call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
    opening, steps, numbers = play(make("tools"), f"I call it.\n{call}", "42")
    assert '"name": "double"' in opening[0].content
    assert "<tool_call>" in opening[0].content
    answer = steps[0].observation.messages[0]
    assert (answer.role, answer.content, answer.name) == ("tool", "42", "double")
    assert (steps[1].reward, steps[1].terminated, numbers["double_calls"]) == (1.0, True, 1.0)
    parsed = Message("assistant", "as the model writes it", (ToolCall("c", "double", {"number": 21}),))
    assert said(play(make("tools"), parsed)[1][0]) == ["42"]
    broken = play(make("tools"), '<tool_call>{"name": "double"</tool_call>')[1][0]
    assert "is not valid JSON" in said(broken)[0] or "JSON" in said(broken)[0]
    assert not broken.over
    assert "<tool_call>" not in play(make("tools", list_tools=False))[0][0].content


def test_tools_with_a_state_see_the_state_of_their_own_episode(vf):
    call = '<tool_call>{"name": "add", "arguments": {"number": 4}}</tool_call>'

    async def together():
        envs = [make("ledger"), make("ledger")]
        for env in envs:
            await env.reset(Task("t", seed=1), 0)
        heard = [said(await env.step(Message("assistant", call))) for env in (*envs, envs[0])]
        last = [await env.step(Message("assistant", "done")) for env in envs]
        return heard, [step.reward for step in last]

    assert asyncio.run(together()) == ([["now 4"], ["now 4"], ["now 8"]], [0.8, 0.4])


def test_the_player_of_the_tool_recipe_solves_orders_of_products_that_no_transcript_mentions(vf):
    file = Path(__file__).parents[2] / "recipes" / "smollm2-verifiers-tools" / "orders.py"
    names = ("play", "transcripts", "products_of")
    recipe = SimpleNamespace(**{name: load(f"{file}:{name}", "recipe") for name in names})
    solved = asyncio.run(recipe.play(20, seed=0, skill=1.0, split="held_out"))
    assert {row["metrics"]["success"] for row in solved} == {1.0}
    assert {row["metrics"]["right_total"] for row in solved} == {row["metrics"]["looked_up"] for row in solved} == {1.0}
    rows = recipe.transcripts(60, seed=0, skill=0.6)
    assert 0 < sum(row["metrics"]["success"] for row in rows) < 30
    texts = [message["content"] for row in rows for message in row["messages"][1:]]
    assert not [text for text in texts for product in recipe.products_of("held_out") if product in text]
    assert {message["role"] for row in rows for message in row["messages"]} == {"system", "user", "assistant", "tool"}
    assert rows == recipe.transcripts(60, seed=0, skill=0.6)
    assert {row["metrics"]["success"] for row in recipe.transcripts(10, seed=0, skill=0.0)} == {0.0}


def test_what_cannot_be_played_is_said_at_once(vf):
    with pytest.raises(ConfigError, match="reward functions of whole groups"):
        make("group")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'colour'"):
        make("sums", args={"colour": "red"})
    with pytest.raises(ConfigError, match="no-such-environment"):
        ENVS.build("verifiers", {"environment": "no-such-environment"}, "env.args")
    with pytest.raises(ConfigError, match=r"is not a verifiers\.MultiTurnEnv"):
        ENVS.build("verifiers", {"environment": "arborl.types:Task", "args": {"id": "t"}}, "env.args")
    with pytest.raises(ValueError, match="edits earlier messages"):
        play(make("rewriting"), "1")


def test_an_object_is_played_too_and_signals_stay_as_they_were(vf):
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    first = ENVS.build("verifiers", {"environment": f"{EXAMPLES}:sums"}, "env.args")
    env = ENVS["verifiers"](first._get().env)
    with ThreadPoolExecutor(1) as thread:  # environments are made in threads, too
        thread.submit(make, "guess", args={"count": 7}).result()
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
    assert (first.isolated, env.isolated) == (True, False)
    assert play(env, "1")[1][0].terminated


def test_a_killed_process_costs_no_other_episode(real):
    async def episodes():
        pool = ProcessPool(most=2)
        envs = [ProcessEnv(make("guess"), pool, "guess", 120.0) for _ in range(2)]
        for env in envs:
            await env.reset(Task("t", fields={"index": 2}), 0)
        first = [await env.step(Message("assistant", "1")) for env in envs]
        killed = pool.alive[0]
        os.killpg(killed.child.pid, signal.SIGKILL)
        last = [await env.step(Message("assistant", "3")) for env in envs]
        for env in envs:
            await env.close()
        pool.close()
        return [said(step) for step in first], [(step.reward, step.terminated) for step in last], killed.lost

    assert asyncio.run(episodes()) == ([["Higher."]] * 2, [(1.0, True)] * 2, True)


# ------------------------------------------------------------------------------------------------ to verifiers


def rollouts(env, replies, count=2):
    """Roll out the first rows by verifiers' own loop, with a client that gives these replies."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class Scripted(Client):
        def setup_client(self, config): ...
        async def to_native_tool(self, tool): ...
        async def to_native_prompt(self, messages):
            return messages, {}

        async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            turn = sum(message.role == "assistant" for message in prompt)
            return replies[min(turn, len(replies) - 1)]

        async def raise_from_native_response(self, response): ...
        async def from_native_response(self, response):
            message = ResponseMessage(content=response, finish_reason="stop", is_truncated=False)
            return Response(id="x", created=0, model="m", message=message)

        async def close(self): ...

    async def run():
        rows = env.get_eval_dataset(n=count)
        return [await env._run_rollout_state(dict(row), Scripted(object()), "m", {"temperature": 1.0}) for row in rows]

    return asyncio.run(run())


def test_an_environment_of_arbor_is_rolled_out_by_verifiers(real):
    env = verifiers_adapter.as_verifiers("countdown", {"tries": 2}, train_tasks=20, held_out_tasks=4)
    assert (len(env.get_dataset()), len(env.get_eval_dataset())) == (20, 4)
    one, other = rollouts(env, ["<answer>1</answer>"])
    assert one["prompt"] != other["prompt"]
    assert [message.role for message in one["completion"]] == ["assistant", "user", "assistant", "user"]
    assert (one["reward"], one["metrics"]["success"], one["metrics"]["num_turns"]) == (-0.1, 0.0, 2)
    assert "arborl_env" not in one  # closed

    held_out = json.loads(env.get_eval_dataset()[0]["info"])
    countdown = ENVS.build("countdown", {"tries": 2}, "args")
    task = Task("t", seed=held_out["seed"], fields={"split": held_out["split"]})
    opening = asyncio.run(countdown.reset(task, 0))
    assert [message.content for message in one["prompt"]] == [message.content for message in opening.messages]
    solved = rollouts(env, [countdown.oracle()], count=1)[0]
    assert (solved["reward"], solved["metrics"]["success"]) == (1.0, 1.0)


def test_the_default_environment_is_one_of_arbors_in_both_directions(vf):
    lake = ENVS.build("verifiers", {}, "env.args")
    assert check_env(lambda: lake, Task("t", seed=3)) == []
    converted = play(lake, "<answer>Left</answer>", task=Task("t", seed=3))[1][0]
    assert converted.observation.messages[0].content


# ------------------------------------------------------------------------------------------------ without the package


def test_a_version_without_environments_is_named(monkeypatch):
    package = ModuleType("verifiers")
    vars(package)["__version__"] = "0.4.0"
    monkeypatch.setitem(sys.modules, "verifiers", package)
    with pytest.raises(ConfigError, match=r"verifiers 0.4.0 has no MultiTurnEnv.*pip install 'arborl\[verifiers\]'"):
        ENVS.build("verifiers", {"args": {"train_tasks": 7}}, "env.args")
