import asyncio
import contextlib
import io
from typing import Annotated

import pytest
from scripted_model import TASK, play

from arborl.agents import AGENTS
from arborl.agents.tool_agents import CodeAgent, text_between
from arborl.engines.scripted import ScriptedEngine
from arborl.envs.games.question import Question
from arborl.errors import ConfigError
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.tools import EpisodeState, tool
from arborl.types import Message, Sampling


@tool(stateful=True)
def interpreter(code: str, names: Annotated[dict, EpisodeState(dict)]) -> str:
    """Run trusted code of a test, here."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue().rstrip("\n") or "(nothing printed)"


def test_code_is_run_and_its_result_shown_and_names_last_the_episode():
    agent = CodeAgent([interpreter])
    output = "I set <code>\nx = 6\n</code>", "<code>print(x * 7)</code>", "<answer>42</answer>"
    model, heard = play(agent, *output)
    assert heard == "<answer>42</answer>"
    assert model.prompts[1][-2:] == [
        Message("assistant", output[0], sampled=True),
        Message("tool", "<result>\n(nothing printed)\n</result>", name="interpreter"),
    ]
    assert model.prompts[2][-1].content == "<result>\n42\n</result>"
    assert model.stops == [("</code>",)] * 3
    assert model.counts == {"tool/used": 1, "tool/calls": 2}
    _, heard = play(agent, "<code>print(x)</code>", "gone")  # another episode knows nothing of x
    assert heard == "gone"


def test_a_failed_execution_is_shown_to_the_model_and_counted():
    model, heard = play(CodeAgent([interpreter]), "<code>print(1 / 0)</code>", "<code>print(2", "I give up")
    assert "ZeroDivisionError: division by zero" in model.prompts[1][-1].content
    assert "not closed" in model.prompts[2][-1].content
    assert "End it with </code>" in model.prompts[2][-1].content
    assert heard == "I give up"
    assert model.counts == {"tool/used": 1, "tool/calls": 2, "tool/failed": 2, "tool/exception": 1, "tool/malformed": 1}


def test_answers_and_messages_after_the_last_round_are_not_run():
    model, heard = play(CodeAgent([interpreter]), "<answer>print(1)</answer> <code>print(2)</code>")
    assert heard == "<answer>print(1)</answer> <code>print(2)</code>"
    assert not model.counts
    model, heard = play(CodeAgent([interpreter], max_tool_rounds=1), "<code>1</code>", "<code>2</code>")
    assert heard == "<code>2</code>"
    assert model.counts["tool/calls"] == 1


def test_every_tag_can_be_another():
    agent = CodeAgent(
        [interpreter],
        code_start_tag="```python\n",
        code_end_tag="```",
        answer_start_tag="\\boxed{",
        answer_end_tag="}",
        result_start_tag="[out]",
        result_end_tag="[/out]",
        result_role="user",
    )
    model, heard = play(agent, "So:\n```python\nprint(6 * 7)\n```", "It is \\boxed{42}.")
    assert model.prompts[1][-1] == Message("user", "[out]\n42\n[/out]")
    assert heard == "<answer>42</answer>"
    assert model.stops == [(), ()]  # the end tag is part of the start tag, so it must not stop the sampling


def test_arguments_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="code_end_tag is empty"):
        CodeAgent([interpreter], code_end_tag="")
    with pytest.raises(ValueError, match="both begin with '<answer>'"):
        CodeAgent([interpreter], code_start_tag="<answer>")
    with pytest.raises(ValueError, match="result_role"):
        CodeAgent([interpreter], result_role="system")
    with pytest.raises(ConfigError, match="with one tool"):
        CodeAgent([interpreter, interpreter])
    with pytest.raises(ConfigError, match="one required argument"):
        CodeAgent([lambda a, b: 0])
    assert AGENTS["code"] is CodeAgent


@pytest.mark.parametrize(
    ("text", "inside"),
    [("a[b]c", "b"), ("[b", None), ("b]", None), ("]a[b]", "b"), ("[a][b]", "a"), ("[]", ""), ("", None)],
)
def test_what_stands_between_two_tags(text, inside):
    assert text_between(text, "[", "]") == inside


def test_results_are_no_sampled_tokens_and_sampling_stops_at_the_end_tag(seedling):
    """Through the real recorder: what is trained on is exactly what the model wrote, up to the end of the code."""
    _, renderer = seedling
    texts = ["<code>print('<answer>no</answer>')</code> and then some", "<answer>42</answer>"]
    replies = [[*renderer.tokenizer.encode(text), renderer.stop[0]] for text in texts]
    turns = iter([0, 1])
    engine = ScriptedEngine(replies, choose=lambda prompt, session: next(turns), decode=renderer.tokenizer.decode)
    episode_factories = EpisodeFactories(lambda task: CodeAgent([interpreter]), lambda task: Question())
    rollout = Rollout(engine, renderer, episode_factories, Sampling(64), EpisodeLimits(), concurrency=1)
    episode = asyncio.run(rollout.play(TASK, 0, "e"))
    assert episode.failure is None
    first, second = episode.calls
    assert renderer.tokenizer.decode(first.completion.tokens) == "<code>print('<answer>no</answer>')</code>"
    assert renderer.tokenizer.decode(second.completion.tokens) == "<answer>42</answer><|im_end|>"
    assert second.prompt[: len(first.prompt) + len(first.completion.tokens)] == (
        *first.prompt,
        *first.completion.tokens,
    )
    shown = renderer.tokenizer.decode(second.prompt[len(first.prompt) + len(first.completion.tokens) :])
    assert "<result>\n<answer>no</answer>\n</result>" in shown
    assert episode.answer == "<answer>42</answer>"
    assert episode.metrics["tool/calls"] == 1


def test_code_runs_in_the_sandbox_by_default():
    pytest.importorskip("arborl.tools.library.python")
    model, heard = play(CodeAgent(), "<code>print(6 * 7)</code>", "<code>open('/none')</code>", "<answer>42</answer>")
    assert "42" in model.prompts[1][-1].content
    assert "FileNotFoundError" in model.prompts[2][-1].content
    assert heard == "<answer>42</answer>"


def test_output_limits_are_counted_by_the_models_own_tokenizer(seedling):
    _, renderer = seedling

    @tool(max_tokens=6)
    def talk(code: str) -> str:
        """Say much."""
        return "one two three " * 100

    texts = ["<code>go</code>", "<answer>42</answer>"]
    replies = [[*renderer.tokenizer.encode(text), renderer.stop[0]] for text in texts]
    turns = iter([0, 1])
    engine = ScriptedEngine(replies, choose=lambda prompt, session: next(turns), decode=renderer.tokenizer.decode)
    episode_factories = EpisodeFactories(lambda task: CodeAgent([talk]), lambda task: Question())
    rollout = Rollout(engine, renderer, episode_factories, Sampling(64), EpisodeLimits(), concurrency=1)
    episode = asyncio.run(rollout.play(TASK, 0, "e"))
    shown = text_between(renderer.tokenizer.decode(episode.calls[1].prompt), "<result>\n", "\n</result>")
    kept, _, rest = shown.partition("… [cut: ")
    assert 0 < len(renderer.tokenizer.encode(kept)) <= 6
    assert rest.endswith(" more characters]")
