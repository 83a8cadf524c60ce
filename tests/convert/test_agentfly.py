"""AgentFly's agents, tools and rewards are ours by another name, or are refused with what to do."""

from __future__ import annotations

import asyncio
import itertools
import re

import pytest

from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert import convert
from arborl.errors import ConfigError
from arborl.rewards import find_reward
from arborl.training_run.build import check
from arborl.types import Call, Completion, Episode, FinishReason, Message, Task, Turn

COMMON = """
data.train_files=rows.json data.train_batch_size=16 actor_rollout_ref.model.path=some/model
agent.run_config.num_chains=8 agent.run_config.max_turns=4 agent.init_config.max_model_len=2048
agent.run_config.generation_config.max_tokens=300 trainer.total_training_steps=20
actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.response_length=512
"""


@pytest.fixture
def read(tmp_path):
    def reading(uses=None, checked=True, **agent):
        keys = " ".join(f"agent.init_config.{key}={value}" for key, value in agent.items())
        (tmp_path / "fly.txt").write_text(f"{COMMON}\n{keys}\n")
        draft = convert("agentfly", [tmp_path / "fly.txt"], uses)
        assert set(draft.source) <= draft.accounted()
        config = validate(RunConfig, draft.tree())
        if checked:  # needs the packages of the environment
            check(config)
        return config

    return reading


def test_chains_turns_and_lengths_are_read_from_the_later_layout(read):
    config = read(agent_type="hf", tools="[calculator]", reward_name="math_equal_reward_tool")
    assert (config.rollout.group_size, config.sampling.max_tokens) == (8, 300)
    assert config.agent.args == {"max_tool_rounds": 3}
    assert config.sampling.max_context == 2048  # and not what verl's lengths add up to
    assert config.learner.minibatches == 2  # 16 tasks x 8 chains by 64 rows: chains are verl's rows there


def test_the_shop_is_an_environment_and_its_moves_are_messages(read):
    config = read(agent_type="action", tools="[webshop_browser_action]", reward_name="webshop_reward")
    assert (config.env.name, config.env.args, config.agent.name) == ("shop", {"max_steps": 4}, "chat")
    assert ([reward.name for reward in config.rewards], config.data.path) == (["env"], None)


def test_groups_of_chains_have_a_baseline_in_every_layout(read):
    config = read(agent_type="hf", tools="[calculator]", reward_name="math_equal_reward")
    assert "baseline" not in config.algorithm.args


def test_alfworld_is_an_environment_whose_rows_select_the_games(read):
    game = {"tools": "[alfworld_step,alfworld_get_admissible_commands,alfworld_get_task_objective]"}
    told = {"agent_type": "action", "system_prompt": "Act.", "template": "action-agent"}
    config = read(checked=False, reward_name="alfworld_episode_reward", **game, **told)
    assert (config.env.name, config.env.args, config.agent.name) == ("alfworld", {"max_steps": 4}, "chat")
    assert str(config.data.path) == "rows.json"
    prompt = config.env.prompt
    assert re.search(prompt.action_pattern, "<think>a</think><Action> go to bed 1\n</action>")[1] == "go to bed 1"
    assert (prompt.instruction, config.agent.system) == ("", "Act.")
    assert prompt.observation == "<observation>{observation}</observation>"
    listed = read(checked=False, agent_type="hf", reward_name="alfworld_episode_reward", **game)
    assert (listed.env.args["list_actions"], listed.agent.name, listed.env.prompt.is_set) == (True, "chat", False)


def test_scienceworld_gives_ten_for_a_finished_task_without_simplifications(read):
    parts = {"tools": "[scienceworld_explorer]", "reward_name": "scienceworld_reward"}
    config = read(checked=False, agent_type="action", **parts)
    args = {"tasks": [], "simplifications": "", "intermediate": False, "max_steps": 4}
    assert (config.env.name, config.env.args) == ("scienceworld", args)
    assert [(reward.name, reward.weight) for reward in config.rewards] == [("env", 10.0)]


def test_chess_puzzles_are_rows_and_their_moves_are_messages(read):
    game = {"agent_type": "react", "tools": "[chess_move,chess_get_state,chess_get_legal_moves]"}
    config = read(checked=False, reward_name="chess_puzzle_reward", **game)
    assert (config.env.name, config.agent.name, str(config.data.path)) == ("chess", "chat", "rows.json")
    assert config.env.args == {"dense": True, "engine": "stockfish", "max_steps": 4}
    assert read(checked=False, reward_name="chess_puzzle_reward_simple", **game).env.args == {"max_steps": 4}


def test_a_length_that_the_script_leaves_open_is_lost_and_said(tmp_path):
    keys = (
        "agent.agent_type=hf agent.tools=[answer] agent.reward_name=qa_em_reward agent.generation_config.max_tokens=$n"
    )
    (tmp_path / "fly.sh").write_text(f"python3 -m agentfly.cli train {COMMON.replace(chr(10), ' ')} {keys}\n")
    draft = convert("agentfly", [tmp_path / "fly.sh"])
    assert [line.kind for line in draft.lines if line.key == "agent.generation_config.max_tokens"] == ["lost"]


def test_queries_between_tags_are_our_code_agent_with_a_search(read):
    config = read(agent_type="searchr1", tools="[search]", reward_name="qa_em_reward")
    assert (config.agent.name, config.agent.args["code_start_tag"]) == ("code", "<search>")
    assert [tool.name for tool in config.tools] == ["search"]
    assert config.agent.tool_args["search"] == {"corpus": "corpus.jsonl"}
    assert config.rewards[0].args["field"] == "golden_answers"


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ({"agent_type": "gui", "tools": "[answer]", "reward_name": "qa_em_reward"}, "gui: no such agent here"),
        ({"agent_type": "hf", "tools": "[alfworld_reset]", "reward_name": "qa_em_reward"}, "an episode has one game"),
        ({"agent_type": "hf", "tools": "[answer]", "reward_name": "scienceworld_reward"}, "no tool names one"),
        (
            {"agent_type": "hf", "tools": "[shell]", "reward_name": "qa_em_reward"},
            "shell: no such tool here.*--use shell=",
        ),
        ({"agent_type": "hf", "tools": "[answer]", "reward_name": "fake_reward"}, "fake_reward: no such reward here"),
        ({"agent_type": "hf", "tools": "[answer]"}, "names no reward"),
        ({"agent_type": "action", "tools": "[answer]", "reward_name": "qa_em_reward"}, "acts in an environment"),
        ({"agent_type": "hf", "tools": "[answer]", "reward_name": "webshop_reward"}, "no tool names one"),
    ],
)
def test_parts_without_counterpart_are_errors(read, agent, says):
    with pytest.raises(ConfigError, match=says):
        read(**agent)


def test_a_name_of_theirs_can_be_given_one_of_ours_or_be_left_out(read):
    uses = {"shell": "python", "summarize": "none", "fake_reward": "exact", "gui": "tool"}
    config = read(uses, agent_type="gui", tools="[shell,summarize]", reward_name="fake_reward")
    assert [part.name for part in (*config.tools, config.agent, *config.rewards)] == ["python", "tool", "exact"]


# ------------------------------------------------------------------------------------------------ rewards as AgentFly's


def tool_shaped(right, tools, texts):
    """math_equal_reward_tool, math_string_equal_reward_tool and math_reward_string_equal."""
    return 0.0 if tools < 1 else 1.0 if right else 0.1


def think_shaped(right, tools, texts):
    """math_equal_reward_think: every message of the assistant has its thinking closed."""
    return tool_shaped(right, tools, texts) if all("</think>" in text for text in texts) else 0.0


def thought_shaped(right, tools, texts):
    """math_reward_thought_with_tool."""
    return tool_shaped(right, tools, texts) if all(t.strip().lower().startswith("thought") for t in texts) else 0.0


def format_shaped(right, tools, texts):
    """qa_em_format_reward, by its docstring: earlier messages think, the last has the tags of an answer."""
    thinks = all("<think>" in text and "</think>" in text for text in texts[:-1] if text)
    has_answer = "<answer>" in texts[-1] and "</answer>" in texts[-1]
    return tool_shaped(right, tools, texts) if thinks and has_answer else 0.0


def f1_shaped(right, tools, texts):
    """qa_f1_reward_tool; the answers here share no word with the gold, or all."""
    return float(right) if tools > 1 else 0.0


def alone(right, tools, texts):
    return float(right)


FORMULAS = {
    "math_reward_string_equal": tool_shaped, "math_string_equal_reward_tool": tool_shaped,
    "math_equal_reward_tool": tool_shaped, "math_equal_reward_think": think_shaped,
    "math_reward_thought_with_tool": thought_shaped, "qa_em_format_reward": format_shaped,
    "qa_f1_reward_tool": f1_shaped, "qa_f1_reward": alone, "qa_em_reward": alone, "math_equal_reward": alone,
}  # fmt: skip
EARLIER = ("", "plain", "<think>so</think> call", "so</think> call", " Thought: call", "</think>then<think>")
LAST = ("{}", "<think>so</think>\n<answer>{}</answer>", "so</think><answer>{}</answer>", "thought: it is\n{}")


@pytest.mark.parametrize("name", FORMULAS)
def test_converted_rewards_are_agentflys_formulas_for_every_combination(read, name):
    tool, *_ = read(agent_type="hf", tools="[calculator]", reward_name=name).rewards
    reward = find_reward(tool.name, tool.args, "rewards.0.args")

    def ours(answer, tools, texts):
        replies = [Message("assistant", text) for text in texts]
        completion = Completion((2,), (-1.0,), FinishReason.STOP)
        return Episode(
            "e",
            Task("t", fields={"answer": "42", "golden_answers": ["42"]}),
            turns=[Turn(replies[-1])],
            calls=[Call((1,), completion, 0, reply=reply) for reply in replies],
            metrics={"tool/calls": float(tools), "tool/used": float(tools > 0)},
        )

    cases = itertools.product(("42", "7"), (0, 1, 2, 3), [(), *((one,) for one in EARLIER), EARLIER[2:4]], LAST)
    for answer, tools, earlier, last in cases:
        texts = [*earlier, last.format(answer)]
        value = asyncio.run(reward(ours(answer, tools, texts)))
        assert value == FORMULAS[name](answer == "42", tools, texts), (answer, tools, texts)


def test_a_call_that_reached_no_tool_is_not_a_tool_call(read):
    (tool,) = read(agent_type="hf", tools="[calculator]", reward_name="math_equal_reward_tool").rewards
    reward = find_reward(tool.name, tool.args, "rewards.0.args")
    one = Episode("e", Task("t", fields={"answer": "42"}), turns=[Turn(Message("assistant", "41"))])
    one.metrics |= {"tool/calls": 2.0, "tool/malformed": 1.0, "tool/unknown_tool": 1.0}
    assert asyncio.run(reward(one)) == 0.0
    one.metrics["tool/calls"] = 3.0
    assert asyncio.run(reward(one)) == 0.1


@pytest.mark.parametrize(
    ("template", "model", "outcome"),
    [
        ("qwen2.5", "Qwen/Qwen2.5-3B-Instruct", ("idle", "the model's own chat template")),
        ("qwen3", "/models/Qwen3-8B", ("idle", "the model's own chat template")),
        ("qwen2.5-no-system-tool", "Qwen/Qwen2.5-3B-Instruct", ("lost", "a variant of qwen2.5")),
        ("qwen2.5", "meta-llama/Llama-3.2-3B", ("lost", "not the model's own chat template")),
        ("search-r1", "Qwen/Qwen2.5-3B-Instruct", ("lost", "not the model's own chat template")),
    ],
)
def test_a_template_is_kept_only_where_it_is_the_models_own(template, model, outcome, tmp_path):
    (tmp_path / "fly.txt").write_text(
        f"{COMMON} agent.agent_type=hf agent.tools=[calculator] agent.reward_name=math_equal_reward "
        f"agent.template={template} agent.model_name_or_path={model}"
    )
    draft = convert("agentfly", [tmp_path / "fly.txt"])
    (line,) = [line for line in draft.lines if line.key == "agent.template"]
    assert line.kind == outcome[0]
    assert line.why.startswith(outcome[1])
