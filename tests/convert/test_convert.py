"""Other systems' scripts and files become configurations that start, and no key is lost on the way."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.config.config_base import setting_paths, validate
from arborl.config.load_config import load
from arborl.config.run_config import RunConfig
from arborl.convert import SYSTEMS, Draft, agentfly, convert
from arborl.errors import ConfigError
from arborl.registry import call_checked
from arborl.rewards import REWARDS
from arborl.training_run import train

AGENTFLY = r"""
#!/bin/bash
export WANDB_API_KEY="secret"   # for logging
set -x
head_node_ip=$(hostname --ip-address)
ray start --head --node-ip-address="$head_node_ip" --num-gpus 1
policy=Qwen/Qwen2.5-3B-Instruct
rate=5e-7
rows=32
chains=8
# adv=rloo
adv=grpo
kl=0.001
tools="[calculator]"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=$adv \
    data.train_files="./gsm8k_train.json" data.val_files="./gsm8k_test.json" \
    data.train_batch_size=$rows \
    agent.agent_type=hf agent.tools=$tools agent.template=qwen2.5 \
    agent.model_name_or_path=$policy agent.max_turns=${turns:-3} agent.backend=async_verl \
    agent.reward_name=math_reward_string_equal agent.num_chains=${chains} agent.use_agent=True \
    actor_rollout_ref.actor.optim.lr=$rate \
    actor_rollout_ref.model.path=${policy} \
    actor_rollout_ref.actor.ppo_mini_batch_size=${rows} \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=$kl \
    actor_rollout_ref.actor.kl_loss_type=mse \
    actor_rollout_ref.actor.entropy_coeff=0.001 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.response_length=256 \
    algorithm.kl_ctrl.kl_coef=$kl \
    trainer.logger=['console','wandb'] \
    trainer.experiment_name=test_gsm8k \
    trainer.n_gpus_per_node=1 \
    trainer.save_freq=50 trainer.test_freq=10 \
    trainer.total_training_steps=200 \
    trainer.brand_new_key=7
"""


@pytest.fixture
def written(tmp_path):
    (tmp_path / "fly.sh").write_text(AGENTFLY)
    return tmp_path


def keys(draft):
    return {line.key for line in draft.lines if line.explicit}


def test_a_script_of_agentfly_becomes_a_run_that_starts(written, monkeypatch):
    monkeypatch.chdir(written)
    monkeypatch.setenv("COLUMNS", "200")
    draft = convert("agentfly", [written / "fly.sh"])
    config = validate(RunConfig, draft.tree())
    assert (config.algorithm.name, config.algorithm.kl.coef, config.algorithm.kl.estimator) == ("grpo", 0.001, "mse")
    assert (config.rollout.tasks_per_step, config.rollout.group_size, config.trainer.steps) == (32, 8, 200)
    assert (config.agent.name, config.agent.args) == ("tool", {"max_tool_rounds": 2})
    assert [tool.name for tool in config.tools] == ["calculator"]
    assert (config.learner.lr, config.sampling.max_tokens, config.model.name) == (5e-7, 256, "Qwen/Qwen2.5-3B-Instruct")
    why = {line.key: line.what for line in draft.unmapped}
    assert why["algorithm.kl_ctrl.kl_coef"] == "not read without use_kl_in_reward"
    assert why["trainer.brand_new_key"] == "unknown key"
    assert keys(draft) >= set(draft.source)
    for name in ("gsm8k_train.json", "gsm8k_test.json"):
        (written / name).write_text(json.dumps([{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(40)]))
    done = CliRunner().invoke(app, ["convert", "agentfly", "fly.sh", "--out", "run.yaml"])
    assert done.exit_code == 0, done.output
    assert re.search(r"algorithm\.adv_estimator=grpo +algorithm\.name=grpo", done.output)
    more = ["model=seedling", "output_dir=out", "evaluation.tasks=2", "rollout.group_size=2", "trainer.steps=1"]
    more += ["rollout.tasks_per_step=2", "learner.minibatches=1", "track.trackers=[]"]
    assert train(load(written / "run.yaml", more), stub=True).summary["steps"] == 1


@pytest.mark.parametrize("name", agentfly.REWARDS)
def test_every_reward_of_agentfly_becomes_one_that_is_there(name, tmp_path):
    moves = {"webshop": "webshop_browser", "alfworld": "alfworld_step", "scienceworld": "scienceworld_explorer"}
    tools = f"[{(moves | {'chess': 'chess_move'}).get(name.partition('_')[0], 'calculator')}]"
    (tmp_path / "fly.txt").write_text(
        f"agent.reward_name={name} data.train_files=rows.json agent.agent_type=hf agent.tools={tools}"
    )
    (reward,) = validate(RunConfig, convert("agentfly", [tmp_path / "fly.txt"]).tree()).rewards
    assert call_checked(REWARDS[reward.name], reward.args, "rewards") if reward.args else REWARDS[reward.name]
    assert (reward.args.get("match") == "f1") == ("f1" in name)


@pytest.mark.parametrize(
    ("system", "name", "text", "says"),
    [
        ("verl", "none.sh", None, "no such file"),
        ("verl", "empty.sh", "echo hello\n", "starts no training of verl. Looked for a command"),
        ("verl", "bad.yaml", "a: [", "not valid YAML"),
        ("verl", "list.yaml", "- a\n", "must be keys with values"),
        ("nemo", "x.sh", "a.b=c", "unknown system 'nemo'"),
        ("verl", "quote.sh", 'python x "a.b=c', "cannot read"),
    ],
)
def test_conversion_errors_are_one_line(system, name, text, says, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    done = CliRunner().invoke(app, ["convert", system, str(tmp_path / name)])
    assert done.exit_code == 2
    assert says in done.output


ROLL = """exp_name: a
pretrain: m
sequence_length: 2048
actor_train: {model_args: {}}
rollout_batch_size: 8
train_env_manager: {num_env_groups: 4, group_size: 2, tags: [Lake]}
val_env_manager: {num_env_groups: 4, group_size: 1, tags: [Lake]}
custom_envs: {Lake: {env_type: frozen_lake, max_steps: 10, max_tokens_per_step: 64, env_config: {max_steps: 10}}}
"""
VERL = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m "
FLY = "agent.agent_type=hf agent.tools=[calculator] agent.reward_name=math_equal_reward data.train_files=r.json "
WHOLE = "must be a whole number >= 1"


@pytest.mark.parametrize(
    ("system", "text", "says"),
    [
        ("roll", ROLL.replace("group_size: 2", "group_size: 0"), f"train_env_manager.group_size=0: {WHOLE}"),
        ("roll", ROLL.replace("group_size: 2", "group_size: -2"), f"train_env_manager.group_size=-2: {WHOLE}"),
        ("roll", ROLL.replace("group_size: 2", "group_size: many"), "group_size='many': must be a number"),
        ("roll", ROLL.replace("group_size: 2", "group_size: '${gone}'"), "refers to a key that is not there"),
        ("roll", ROLL.replace("groups: 4", "groups: -4"), f"train_env_manager.num_env_groups=-4: {WHOLE}"),
        ("roll", ROLL.replace("size: 8", "size: 0"), f"rollout_batch_size=0: {WHOLE}"),
        ("roll", ROLL.replace(" max_steps: 10,", " max_steps: many,"), "custom_envs.Lake.max_steps='many': must be a"),
        ("roll", ROLL.replace("step: 64", "step: []"), "custom_envs.Lake.max_tokens_per_step=[]: must be a number"),
        ("roll", ROLL + "max_steps: -4\n", f"max_steps=-4: trainer.steps: {WHOLE}"),
        ("roll", ROLL + "max_grad_norm: [1]\n", "max_grad_norm=[1]: must be a number"),
        ("roll", "exp_name: a\npretrain: m\n", "sequence_length: is not there"),
        ("verl", VERL + "actor_rollout_ref.rollout.n=0", f"rollout.n=0: rollout.group_size: {WHOLE}"),
        ("verl", VERL + "data.train_batch_size=-1", f"data.train_batch_size=-1: rollout.tasks_per_step: {WHOLE}"),
        ("verl", VERL + "trainer.n_gpus_per_node=0", f"trainer.n_gpus_per_node=0: {WHOLE}"),
        ("verl", VERL + "trainer.nnodes=two", f"trainer.nnodes='two': {WHOLE}"),
        ("agentfly", FLY + "agent.num_chains=-1", f"agent.num_chains=-1: rollout.group_size: {WHOLE}"),
        ("agentfly", FLY + "agent.max_turns=0", f"agent.max_turns=0: {WHOLE}"),
    ],
)
def test_an_impossible_value_is_reported_with_its_file_and_key(system, text, says, tmp_path):
    file = tmp_path / ("run.yaml" if system == "roll" else "run.sh")
    file.write_text(text)
    done = CliRunner().invoke(app, ["convert", system, str(file)])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    said = " ".join(done.output.split())
    assert f"{file}: " in said
    assert says in said


def test_files_that_do_not_fit_together_and_scripts_without_arguments_are_errors_too(tmp_path):
    (tmp_path / "a.yaml").write_text(ROLL + "steps: [1, 2]\n")
    (tmp_path / "b.yaml").write_text("steps: {a: 1}\n")
    with pytest.raises(ConfigError, match=r"b\.yaml: steps has keys in one file, and a list in another"):
        convert("roll", [tmp_path / "a.yaml", tmp_path / "b.yaml"])
    (tmp_path / "run.sh").write_text("python examples/start_agentic_pipeline.py\n")
    with pytest.raises(ConfigError, match=r"run\.sh: .* without --config_name"):
        convert("roll", [tmp_path / "run.sh"])


FREE = ("agent.args.", "engine.args.", "data.sources.", "data.agents.", "env.")
"""Sections with any keys."""


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_rule_leads_to_a_key_that_does_not_exist(system):
    """Each rule alone, on a value of some kind it takes, sets only keys that the configuration has."""
    table = SYSTEMS[system].table
    samples = [True, 1, 0.5, "grpo", "name", "hermes", "mse"]
    known = set(setting_paths(RunConfig))
    for key, rule in table.items():
        for value in samples:
            draft = Draft(source={"actor_rollout_ref.actor.use_kl_loss": True}, defaults=SYSTEMS[system].defaults)
            try:
                rule(draft, key, value)
            except (TypeError, ValueError):
                continue
            for path in draft.settings:
                assert path in known or path.startswith(FREE), path
