"""AgentFly's agents, tools and rewards are ours by another name, or are refused with what to do."""

from __future__ import annotations

import pytest

from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert import convert
from arborl.errors import ConfigError
from arborl.training_run.build import check

COMMON = """
data.train_files=rows.json data.train_batch_size=16 actor_rollout_ref.model.path=some/model
agent.run_config.num_chains=8 agent.run_config.max_turns=4 agent.init_config.max_model_len=2048
agent.run_config.generation_config.max_tokens=300 trainer.total_training_steps=20
actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.response_length=512
"""


@pytest.fixture
def read(tmp_path):
    def reading(uses=None, **agent):
        keys = " ".join(f"agent.init_config.{key}={value}" for key, value in agent.items())
        (tmp_path / "fly.txt").write_text(f"{COMMON}\n{keys}\n")
        draft = convert("agentfly", [tmp_path / "fly.txt"], uses)
        assert set(draft.source) <= draft.accounted()
        config = validate(RunConfig, draft.tree())
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
        ({"agent_type": "hf", "tools": "[alfworld_step]", "reward_name": "qa_em_reward"}, "ALFWorld is not here"),
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
