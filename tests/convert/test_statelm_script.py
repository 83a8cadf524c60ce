"""StateLM's script, its tools and its rows become a run of `agent=statelm`."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert import convert
from arborl.errors import ConfigError

TOOLS = ("readChunk", "note", "deleteContext", "finish")
SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
ROOT=$(git rev-parse --show-toplevel)
CONF=$ROOT/conf
DATE=$(date +%Y%m%d)
EXPERIMENT="state-${DATE}"
BATCH=4
DUMP=${DUMP:-true}  # whether episodes are kept
OPENAI_API_KEY=none
OPENAI_BASE_URL=http://10.0.0.9:8080/v1
OPENAI_MODEL=gpt-oss-120b

ray job submit --address="http://127.0.0.1:8265" \
  --runtime-env-json='{
  "env_vars": {
      "TOKEN": "$TOKEN",
      "NO_PROXY": "localhost,127.0.0.1"
  },
  "working_dir": "./"
  }' -- PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \
        --config-path="$CONF" \
        --config-name="statelm_grpo" \
        algorithm.adv_estimator=grpo \
        data.train_batch_size=${BATCH} \
        data.max_prompt_length=300 \
        data.max_response_length=200 \
        actor_rollout_ref.rollout.prompt_length=700 \
        actor_rollout_ref.rollout.response_length=300 \
        +actor_rollout_ref.rollout.multi_turn.single_turn_max_tokens=96 \
        +actor_rollout_ref.rollout.multi_turn.max_samples_per_trajectory=2 \
        +actor_rollout_ref.rollout.multi_turn.downsample_mode=random \
        +actor_rollout_ref.rollout.multi_turn.model_type=qwen3 \
        +actor_rollout_ref.rollout.multi_turn.exceed_length_penalty=-2.0 \
        +actor_rollout_ref.rollout.multi_turn.dump_trajectories_enabled=$DUMP \
        +actor_rollout_ref.rollout.multi_turn.dump_trajectories_freq=80 \
        actor_rollout_ref.rollout.multi_turn.max_assistant_turns=80 \
        actor_rollout_ref.rollout.multi_turn.enable=True \
        actor_rollout_ref.rollout.multi_turn.tool_config_path="$CONF/statelm_tools.yaml" \
        actor_rollout_ref.rollout.max_model_len=1800 \
        actor_rollout_ref.rollout.n=2 \
        actor_rollout_ref.actor.ppo_mini_batch_size=${BATCH} \
        custom_reward_function.path=verl/utils/reward_score/statelm_qa.py \
        custom_reward_function.name=compute_score \
        data.train_files="rows.json" data.val_files="rows.json" \
        trainer.experiment_name="$EXPERIMENT" trainer.total_training_steps=1 \
    2>&1 | tee -a "$LOG_FILE"
"""


@pytest.fixture
def repo(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run.sh").write_text(SCRIPT)
    base = {"defaults": ["ppo_trainer", "_self_"], "data": {"apply_chat_template_kwargs": {"enable_thinking": False}}}
    (tmp_path / "conf" / "statelm_grpo.yaml").write_text(yaml.safe_dump(base))
    tools = [
        {"class_name": "verl.tools.statelm_tools.Some", "tool_schema": {"function": {"name": name}}} for name in TOOLS
    ]
    (tmp_path / "conf" / "statelm_tools.yaml").write_text(yaml.safe_dump({"tools": tools}))
    rows = [
        {
            "data_source": "long_context_mcq",
            "agent_name": "statelm_tool_agent",
            "prompt": [{"role": "system", "content": "Take notes."}, {"role": "user", "content": f"Which, {n}?"}],
            "ability": "long_context_reasoning",
            "reward_model": {"style": "rule", "ground_truth": "B"},
            "document_content": f"The answer to {n} is B. " * 30,
            "extra_info": {"index": n, "need_tools_kwargs": False},
        }
        for n in range(6)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return tmp_path


def test_the_script_is_the_agent_that_edits_its_context(repo):
    draft = convert("verl", [repo / "scripts" / "run.sh"])
    config = validate(RunConfig, draft.tree())
    assert (config.agent.name, config.tools) == ("statelm", ())
    assert config.agent.args["toolset"] == list(TOOLS)
    assert (config.agent.args["max_assistant_turns"], config.agent.args["dump_trajectories_freq"]) == (80, 80)
    assert (config.sampling.max_tokens, config.sampling.max_context) == (96, 1800)
    assert config.data.max_prompt_tokens == 300  # of rows; 700 there is of a training row
    assert (config.learner.max_samples_per_trajectory, config.learner.downsample_mode) == (2, "random")
    (reward,) = config.rewards
    judge = {"fallback": "exact", "model": "gpt-oss-120b", "base_url": "http://10.0.0.9:8080/v1"}
    assert reward.name == "choice"
    assert reward.args == {"letters": "ABCD", "exceeded": -2.0, "open": {"name": "judge", "args": judge}}
    assert config.name == "state"
    assert any(line.path == "model.chat_args.enable_thinking" and line.ours is False for line in draft.lines)
    assert set(draft.source) <= draft.accounted()
    assert not any("TOKEN" in str(line.value) for line in draft.lines)


def test_the_documented_check_runs_without_a_hand_edit(repo, monkeypatch):
    monkeypatch.chdir(repo)
    (repo / "rows.json").unlink()
    done = CliRunner().invoke(app, ["convert", "statelm", "scripts/run.sh", "--out", "run.yaml"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["train", "run.yaml", "model=seedling", "trainer.steps=1", "--stub"])
    assert done.exit_code == 0, done.output


def test_the_converted_script_starts_on_rows_as_they_are(repo, monkeypatch):
    monkeypatch.chdir(repo)
    done = CliRunner().invoke(app, ["convert", "verl", "scripts/run.sh", "--out", "run.yaml"])
    assert done.exit_code == 0, done.output
    answer = '<tool_call>{"name": "finish", "arguments": {"answer": "B"}}</tool_call>'
    more = ["model=seedling", "model.dtype=float32", "output_dir=out", "evaluation.tasks=2"]
    more += ["engine=scripted", f"engine.args.replies={json.dumps([answer, 'C'])}"]
    done = CliRunner().invoke(app, ["train", "run.yaml", *more])
    assert done.exit_code == 0, done.output
    played = [json.loads(line) for file in (repo / "out" / "episodes").glob("step-*") for line in file.open()]
    assert {episode["rewards"]["choice"] for episode in played} == {1.0, -1.0}


def test_without_its_file_of_tools_the_agent_has_its_usual_ones(repo):
    (repo / "conf" / "statelm_tools.yaml").unlink()
    config = validate(RunConfig, convert("verl", [repo / "scripts" / "run.sh"]).tree())
    assert config.agent.name == "statelm"
    assert "toolset" not in config.agent.args
    (repo / "conf" / "statelm_grpo.yaml").unlink()
    with pytest.raises(ConfigError, match=r"--config-name=statelm_grpo: .* would be lost"):
        convert("verl", [repo / "scripts" / "run.sh"])


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"max_samples_per_trajectory": 2, "downsample_mode": "random"}, (2, "random")),
        ({"max_samples_per_trajectory": 8}, (8, "last")),  # their default
        ({"downsample_mode": "anything"}, (1, "random")),  # theirs again, and all that is not last
        ({"max_samples_per_trajectory": None}, (None, "random")),
    ],
)
def test_the_branches_statelm_trains_on_are_those_trained_here(given, ours, tmp_path):
    script = {"actor_rollout_ref": {"rollout": {"n": 8, "multi_turn": given}}, "algorithm": {"adv_estimator": "grpo"}}
    (tmp_path / "statelm.yaml").write_text(yaml.safe_dump(script))
    draft = convert("verl", [tmp_path / "statelm.yaml"])
    learner = validate(RunConfig, draft.tree()).learner
    assert (learner.max_samples_per_trajectory, learner.downsample_mode) == ours
    script["actor_rollout_ref"]["actor"] = {"policy_loss": {"loss_mode": "gspo"}}
    (tmp_path / "statelm.yaml").write_text(yaml.safe_dump(script))
    assert validate(RunConfig, convert("verl", [tmp_path / "statelm.yaml"]).tree()).algorithm.loss == "gspo"
