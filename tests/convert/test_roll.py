"""ROLL's files become runs of the same environments, groups and algorithm, or are refused with what to do."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
import yaml
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.config.config_base import validate
from arborl.config.load_config import load
from arborl.config.run_config import RunConfig
from arborl.convert import convert
from arborl.convert.conversion_report import as_yaml
from arborl.convert.roll.roll_pipelines import pipeline
from arborl.errors import ConfigError
from arborl.training_run import train
from arborl.training_run.build import build, check

GAMES = """
pattern: <answer>(.*?)</answer>
tokens: 128
turns: 9
manager: roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager
own_env:
  Puzzle:
    env_type: sokoban
    max_steps: ${turns}
    max_tokens_per_step: ${tokens}
    env_manager_cls: ${manager}
    use_thread_lock: true
    agent_system_template: ${words}
    agent_template: "Turn {turn_idx}: {observation}"
    env_config:
      {action_pattern: '${pattern}', max_steps: '${turns}', format_penalty: -0.15, dim_room: [6, 6], num_boxes: 1}
  Ice:
    env_type: frozen_lake
    max_steps: ${turns}
    max_tokens_per_step: ${tokens}
    env_manager_cls: ${manager}
    env_config: {format_penalty: -0.02, is_slippery: false}
  Market:
    env_type: webshop
    max_steps: ${turns}
    max_tokens_per_step: ${tokens}
    env_manager_cls: ${manager}
    env_config: {observation_mode: text, format_penalty: -0.05}
words: You play well.
"""

BASE = yaml.safe_load("""
defaults: [../config/games@_here_]
hydra: {run: {dir: .}, output_subdir: null}
exp_name: play
seed: 7
output_dir: ./output
logging_dir: ./logs
render_save_dir: ./render
track_with: tensorboard
tracker_kwargs: {log_dir: /somewhere}
num_gpus_per_node: 8
max_steps: 100
save_steps: 50
eval_steps: 10
resume_from_checkpoint: false
rollout_batch_size: 32
val_batch_size: 24
sequence_length: 1024
adv_estimator: grpo
ppo_epochs: 2
whiten_advantages: true
advantage_clip: 0.2
init_kl_coef: 0.0
pretrain: some/model
reward_pretrain: some/critic
reward_normalization: {grouping: traj_group_id, method: mean_std}
tokens: 64
actor_train:
  model_args: {dtype: fp32, disable_gradient_checkpointing: true}
  training_args:
    {learning_rate: 1.0e-6, per_device_train_batch_size: 2, gradient_accumulation_steps: 4, warmup_steps: 3,
     lr_scheduler_type: constant}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(0,4))
train_env_manager:
  {num_env_groups: 4, group_size: 8, tags: [Ice], num_groups_partition: [4], max_env_num_per_worker: 16,
   generating_args: {max_new_tokens: 100, top_p: 0.99, top_k: 100, temperature: 0.99}}
val_env_manager:
  {num_env_groups: 12, group_size: 2, tags: [Puzzle, Ice], num_groups_partition: [8, 4],
   generating_args: {max_new_tokens: 100, top_p: 0.9, top_k: 100, temperature: 0.2}}
custom_envs: {Puzzle: "${own_env.Puzzle}", Ice: "${own_env.Ice}", Market: "${own_env.Market}"}
""")


def changed(**more):
    """`BASE` with other values, dotted keys as `a__b`; None takes a key out."""
    tree = copy.deepcopy(BASE)
    for key, value in more.items():
        *above, last = key.split("__")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    return tree


@pytest.fixture
def read(tmp_path):
    """Converts `BASE` with changes: in one file, or through a `defaults` list as ROLL's examples are."""

    def reading(uses=None, composed=False, **more):
        tree = changed(**more)
        if composed or "defaults" in more:
            (tmp_path / "config").mkdir(exist_ok=True)
            (tmp_path / "config" / "games.yaml").write_text(GAMES)
        else:
            tree = yaml.safe_load(GAMES) | tree
            del tree["defaults"]
        file = tmp_path / "run" / "play.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(yaml.safe_dump(tree, sort_keys=False))
        draft = convert("roll", [file], uses)
        assert set(draft.source) <= draft.accounted()
        return draft

    return reading


def config_of(draft) -> RunConfig:
    return validate(RunConfig, draft.tree())


def why(draft) -> dict[str, str]:
    return {line.key: line.why for line in draft.lines}


@pytest.mark.parametrize(("tag", "env"), [("Ice", "frozen_lake"), ("Puzzle", "sokoban"), ("Market", "shop")])
def test_the_environment_is_the_one_its_tag_leads_to(read, tag, env):
    """Through a defaults list and a reference: once, all of these became FrozenLake."""
    config = config_of(read(composed=True, train_env_manager__tags=[tag]))
    source = config.data.sources[tag]
    assert source.env.name == env
    assert source.ratio == 1
    assert (source.rollout, source.env.args["max_steps"], source.sampling) == ({"max_turns": 9}, 9, {"max_tokens": 64})


def test_sampling_of_the_environment_managers_is_read_for_training_and_validation(read):
    draft = read()
    config = config_of(draft)
    drawn = config.sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.max_tokens) == (0.99, 0.99, 100, 100)
    assert config.evaluation.temperature == 0.2
    lines = {line.key: line.path for line in draft.lines}
    assert lines["val_env_manager.generating_args.top_p"] == "evaluation.sampling.top_p"
    over = read(actor_infer={"generating_args": {"max_new_tokens": 50, "temperature": 0.7}})
    drawn = config_of(over).sampling
    theirs = (0.7, 50, 0.7, 50)  # their defaults where left out
    assert (drawn.temperature, drawn.max_tokens, drawn.top_p, drawn.top_k) == theirs
    assert config_of(over).evaluation.temperature == 0.7  # it goes before validation's own there
    assert config_of(over).data.sources["Ice"].sampling["max_tokens"] == 50


def test_groups_validation_and_rendering_are_theirs(read):
    config = config_of(read())
    assert (config.rollout.tasks_per_step, config.rollout.group_size, config.rollout.concurrency) == (4, 8, 32)
    assert config.data.evaluation_counts == {"Puzzle": 8, "Ice": 4}
    assert [config.data.sources[name].ratio for name in ("Ice", "Puzzle")] == [1, 0]
    assert (config.evaluation.tasks, config.evaluation.group_size, config.evaluation.every) == (12, 2, 10)
    assert (config.rollout.envs_per_process, config.rollout.workers) == (16, "process")
    assert (config.track.render_every, str(config.output_dir)) == (10, "output/play")


def test_several_tags_share_the_batch_as_their_groups_do(read):
    more = {"train_env_manager__tags": ["Ice", "Puzzle"], "train_env_manager__num_groups_partition": [3, 1]}
    draft = read(**more, rollout_batch_size=64)
    config = config_of(draft)
    assert [config.data.sources[name].ratio for name in ("Ice", "Puzzle")] == [0.75, 0.25]
    tree = draft.tree() | {"model": {"name": "seedling"}, "engine": {"name": "scripted"}}
    tree["learner"] |= {"strategy": "single", "ranks": 1}
    parts = build(validate(RunConfig, tree))
    assert sorted(task.source for task in parts.source.take(0, 8)) == ["Ice"] * 6 + ["Puzzle"] * 2
    asyncio.run(parts.close())


def test_what_they_do_without_a_word_is_written_out(read):
    config = config_of(read())
    algorithm = config.algorithm
    assert (algorithm.std, algorithm.options.baseline, algorithm.aggregation) == ("group", "mean", "episode")
    assert (algorithm.anchor, algorithm.skip_zero_variance, algorithm.options.dual_clip) == ("proximal", False, None)
    assert (algorithm.advantage_clip, config.learner.betas, config.learner.decay) == (0.2, (0.9, 0.999), "none")
    assert (config.model.dtype, config.learner.recompute, config.learner.epochs) == ("float32", False, 2)
    assert config.learner.minibatches == 2  # 32 episodes by 2 rows x 4 times x (4 devices / 2)
    assert (config.rollout.episode_seconds, config.seed) == (3600, 7)
    ice = {"Ice": {"env_type": "frozen_lake", "max_steps": 5}}
    plain = config_of(read(actor_train=None, seed=None, custom_envs=ice, val_env_manager=None))
    assert (plain.model.dtype, plain.learner.lr, plain.learner.decay, plain.seed) == ("bfloat16", 5e-5, "linear", 42)
    ours = {"size": 4, "frozen": 0.8, "slippery": True, "format_penalty": 0.0, "max_steps": 5}
    assert plain.env.args == ours
    assert plain.evaluation.tasks == 0


BY_GROUP = {"grouping": "traj_group_id"}


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (
            {"reward_normalization": BY_GROUP | {"method": "mean"}, "whiten_advantages": False},
            {"name": "grpo", "std": "none", "baseline": "mean"},
        ),
        (
            {"reward_normalization": BY_GROUP | {"method": "mean"}},
            {"name": "reinforce_plus_plus_baseline", "whiten": "token"},
        ),
        (
            {"adv_estimator": "reinforce", "reward_normalization": {"grouping": "batch", "method": "mean_std"}},
            {"name": "reinforce_plus_plus"},
        ),
        ({"adv_estimator": "reinforce", "reward_normalization": None}, {"name": "reinforce_plus_plus"}),
        (
            {"reward_normalization": None, "whiten_advantages": False},
            {"name": "grpo", "std": "none", "baseline": "none"},
        ),
        (
            {"reward_normalization": BY_GROUP | {"norm_mean_type": "group", "norm_std_type": "batch"}},
            {"name": "grpo", "std": "batch"},
        ),
        ({"adv_estimator": "agentic_reinforce", "gamma": 0.8}, {"name": "turn_discounted", "gamma": 0.8}),
        ({"adv_estimator": "step_reinforce"}, {"name": "step_reinforce", "loss": "ppo", "gamma": 0.95}),
        (
            {"adv_estimator": "gigpo", "step_reward_weight": 0.5, "episode_reward_weight": 2.0},
            {"name": "gigpo", "step_weight": 0.25, "gamma": 0.95, "std": "group"},
        ),
        ({"use_kl_loss": True, "kl_loss_coef": 0.01}, {"kl": {"coef": 0.01, "where": "loss", "estimator": "k3"}}),
        ({"init_kl_coef": 0.1}, {"kl": {"coef": 0.0}}),  # measured there, and not taken off anything
        (
            {"init_kl_coef": 0.1, "add_token_level_kl": True, "kl_penalty": "mse"},
            {"kl": {"coef": 0.1, "where": "reward", "estimator": "mse"}},
        ),
        (
            {"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.3, "dual_clip_loss": True},
            {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.4},
        ),
        ({"loss_agg_mode": "token-mean", "entropy_loss_coef": 0.01}, {"aggregation": "token", "entropy_coef": 0.01}),
        ({"loss_agg_mode": "seq-mean-token-sum"}, {"aggregation": "fixed", "fixed_length": 1}),
        ({"ratio_type": "segment"}, {"loss": "gspo", "sequence": "call", "clip_high": 0.2}),
        (
            {"train_infer_correction": {"is_weight": {"enabled": True, "weight_type": "token", "upper_bound": 1.5}}},
            {"importance_weights": {"kind": "tis", "high": 1.5}},
        ),
    ],
    ids=str,
)
def test_the_algorithm_is_what_estimator_normalisation_and_whitening_come_to(read, given, ours):
    found = config_of(read(**given)).algorithm
    for name, value in ours.items():
        got = getattr(found if hasattr(found, name) else found.options, name)
        if isinstance(value, dict):
            assert {key: getattr(got, key) for key in value} == value
        else:
            assert got == value


def test_gae_brings_a_critic_of_its_own_and_values_by_token(read):
    draft = read(adv_estimator="gae", lambd=0.9, value_clip=0.5, critic={"training_args": {"learning_rate": 1e-5}})
    config = config_of(draft)
    assert (config.algorithm.name, config.algorithm.options.gae_level, config.algorithm.options.gae_lambda) == (
        "ppo",
        "token",
        0.9,
    )
    assert (config.learner.critic, config.learner.critic_lr, config.algorithm.options.value_clip) == (
        "separate",
        1e-5,
        0.5,
    )
    assert (config.algorithm.whiten, config.algorithm.aggregation) == ("token", "episode")
    assert {line.key: line.path for line in draft.lines}["reward_pretrain"] == "learner.critic_from"


def test_steps_as_rows_are_our_step_agent(read):
    ice = yaml.safe_load("""
env_type: frozen_lake
max_steps: 9
max_tokens_per_step: 64
env_manager_cls: roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager
history_length: 5
agent_template: "The last {history_length}: {history}. Now: {current_observation}"
""")
    draft = read(adv_estimator="gigpo", custom_envs__Ice=ice)
    assert "they are messages here" in why(draft)["custom_envs.Ice.agent_template"]
    config = config_of(draft)
    assert (config.agent.name, config.agent.args) == ("step", {"history_length": 4})
    assert (config.algorithm.aggregation, config.learner.minibatches) == ("call", 1)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"custom_envs__Ice": {"env_type": "sokoban_mcp"}}, r"sokoban_mcp: .*Write env_type: sokoban"),
        ({"custom_envs__Ice": {"env_type": "rock_tb_native_env"}}, r"ROCK service.*--use rock_tb_native_env="),
        ({"custom_envs__Ice": {"env_type": "chess"}}, r"no such environment here. Known: frozen_lake"),
        ({"custom_envs__Ice": {"env_type": "sokoban", "env_config": {"dim_room": [6, 8]}}}, r"rooms are square"),
        (
            {"custom_envs__Ice": {"env_type": "frozen_lake", "env_manager_cls": "x.VLTrajEnvManager"}},
            r"VLTrajEnvManager.*shows images",
        ),
        (
            {"custom_envs__Ice": {"env_type": "frozen_lake", "agent_runner_cls": "x.MyRunner"}},
            r"--use MyRunner=package",
        ),
        ({"custom_envs__Ice": {"env_type": "roll_math"}}, r"dataset_name.*names no dataset"),
        ({"custom_envs__Ice": "${nowhere.Ice}"}, r"custom_envs.Ice=\$\{nowhere.Ice\}: leads nowhere"),
        ({"train_env_manager__tags": ["Icy"]}, r"custom_envs has no such entry. Did you mean 'Ice'"),
        ({"train_env_manager__tags": []}, r"names no environment"),
        ({"rollout_batch_size": 33}, r"does not divide by train_env_manager.group_size=8. Write 32"),
        ({"adv_estimator": "grop"}, r"no such estimator in ROLL"),
        (
            {"actor_train__pg_variant": "kimi15", "actor_train__worker_cls": "x.agentic_actor_pg_worker.ActorWorker"},
            r"kimi15: no such loss",
        ),
        ({"pretrain": None}, r"pretrain: names no model"),
        ({"train_env_manager__group_size": "many"}, r"train_env_manager.group_size='many': must be a number"),
        ({"train_env_manager__tags": ["a.b"], "custom_envs__a.b": {"env_type": "frozen_lake"}}, r"a.b: is no name"),
        ({"defaults": ["../config/elsewhere@_here_"]}, r"there is no such file"),
    ],
)
def test_parts_without_counterpart_are_errors_with_advice(read, more, says):
    with pytest.raises(ConfigError, match=says):
        read(**more)


def test_a_name_of_theirs_can_be_given_one_of_ours(read):
    ice = {"env_type": "chess", "max_steps": 4, "max_tokens_per_step": 8, "env_config": {"boxes": 1}}
    config = config_of(read({"chess": "sokoban"}, custom_envs__Ice=ice, val_env_manager=None))
    assert (config.env.name, config.env.args) == ("sokoban", {"boxes": 1})


def test_questions_of_a_dataset_are_rows_with_a_reward_and_a_tool_is_an_agent(read):
    ice = yaml.safe_load("""
env_type: roll_math
max_steps: 3
max_tokens_per_step: 64
agent_system_template: Think.
tool_wrapper:
  tool_configs: [{tool_id: python_code, tool_args: {timeout: 5}}]
  wrapper_args: {max_tool_uses: 3, tool_reward: 0}
env_config: {dataset_name: some/rows, question_key: prompt, answer_key: solution}
""")
    draft = read(custom_envs__Ice=ice, val_env_manager__tags=["Ice"], val_env_manager__num_groups_partition=[12])
    config = config_of(draft)
    data = config.data
    assert (data.hub, data.question, data.fields) == ("some/rows", "prompt", {"answer": "solution"})
    assert ([reward.name for reward in config.rewards], config.env.name) == (["equal"], "question")
    assert (config.agent.name, config.agent.args) == ("code", {"max_tool_rounds": 3})
    assert (config.rollout.tasks_per_step, config.rollout.group_size, config.sampling.max_tokens) == (4, 8, 64)
    tags = {"train_env_manager__tags": ["Ice", "Puzzle"], "train_env_manager__num_groups_partition": [3, 1]}
    both = config_of(read(custom_envs__Ice=ice, **tags))
    assert {name: source.ratio for name, source in both.data.sources.items()} == {"Ice": 0.75, "Puzzle": 0.25}
    assert (both.data.sources["Ice"].agent.name, both.data.sources["Puzzle"].agent.name) == ("code", "chat")


def test_asynchronous_rollout_becomes_max_lag(read):
    assert read(async_generation_ratio=1).settings["rollout.max_lag"] == 1


def test_keys_and_passwords_are_not_shown(read):
    draft = read(track_with="wandb", tracker_kwargs={"api_key": "topsecret", "project": "p"})
    assert "topsecret" not in draft.report() + as_yaml(draft.tree()) + json.dumps(draft.tree())


def test_a_variable_of_the_environment_stays_one(read):
    draft = read(pretrain="${oc.env:MODEL_HOME}/base")
    assert "${oc.env:MODEL_HOME}/base" in as_yaml(draft.tree())
    assert "set MODEL_HOME" in why(draft)["pretrain"]


def test_the_report_is_a_table_and_the_same_as_json(read, tmp_path):
    draft = read()
    text = draft.report(150)
    assert "Mapped (" in text
    assert "Changed in meaning (" in text
    assert "algorithm.whiten=token" in text
    file, out = tmp_path / "run" / "play.yaml", tmp_path / "ours.yaml"
    done = CliRunner().invoke(app, ["convert", "roll", str(file), "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    lines = {line["key"]: line for line in report["lines"]}
    assert set(lines["exp_name"]) == {"kind", "key", "value", "our_key", "our_value", "reason", "explicit"}
    batch = lines["rollout_batch_size"]
    assert (batch["our_key"], batch["our_value"]) == ("rollout.tasks_per_step", 4)
    assert lines["whiten_advantages"]["our_value"] == "token"
    assert load(out) == validate(RunConfig, report["config"])


def test_a_converted_file_trains(read, tmp_path):
    few = {"val_env_manager__num_env_groups": 2, "val_env_manager__num_groups_partition": [1, 1], "val_batch_size": 4}
    draft = read(**few, rollout_batch_size=8)
    (tmp_path / "ours.yaml").write_text(as_yaml(draft.tree()))
    more = ["model=seedling", f"output_dir={tmp_path / 'out'}", "trainer.steps=1", "learner.epochs=1", "track.gifs=0"]
    more += ["rollout.workers=auto", "rollout.envs_per_process=0", "track.render_every=0"]
    more += ["evaluation.greedy=false"]
    assert train(load(tmp_path / "ours.yaml", more), stub=True).summary["steps"] == 1


RLVR = yaml.safe_load("""
exp_name: verified
rollout_batch_size: 8
prompt_length: 100
response_length: 200
max_steps: 5
num_return_sequences_in_group: 4
adv_estimator: reinforce
pretrain: some/model
max_len_mask: true
difficulty_mask: true
difficulty_low_threshold: 0.1
difficulty_high_threshold: 0.95
norm_mean_type: null
actor_train:
  data_args:
    {file_name: [data/a.jsonl, data/b.jsonl], messages: messages,
     domain_interleave_probs: {math_rule: 0.6, crossthinkqa: 0.4}}
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 1, gradient_accumulation_steps: 16}
  device_mapping: list(range(0,2))
actor_infer: {generating_args: {max_new_tokens: 200, temperature: 0.99}}
rewards:
  math_rule: {worker_cls: roll.x.MathRuleRewardWorker, tag_included: [deep, aime]}
  crossthinkqa: {worker_cls: roll.x.CrossThinkQARuleRewardWorker, tag_included: [cross], reward_type: soft}
  ifeval: {worker_cls: roll.x.GeneralRuleRewardWorker, tag_included: [if]}
""")


def rlvr(tmp_path, uses=None, **more):
    (tmp_path / "rlvr.yaml").write_text(yaml.safe_dump({**copy.deepcopy(RLVR), **more}))
    draft = convert("roll", [tmp_path / "rlvr.yaml"], uses)
    assert set(draft.source) <= draft.accounted()
    return draft


def test_rewards_by_domain_are_sources_by_tag(tmp_path):
    config = config_of(rlvr(tmp_path))
    assert (config.data.by, config.data.fields) == ("tag", {"answer": "ground_truth"})
    assert [str(file) for file in config.data.files] == ["data/a.jsonl", "data/b.jsonl"]
    ratios = {name: source.ratio for name, source in config.data.sources.items()}
    assert ratios == {"deep": 0.3, "aime": 0.3, "cross": 0.4}
    assert [reward.name for reward in config.data.sources["cross"].rewards or ()] == ["choice", "repetition"]
    assert (config.rollout.tasks_per_step, config.rollout.group_size, config.learner.minibatches) == (8, 4, 1)
    assert (config.sampling.max_context, config.sampling.max_tokens, config.data.max_prompt_tokens) == (300, 200, 100)
    assert (config.algorithm.overlong.filter, config.algorithm.skip_zero_variance) == (True, True)
    check(config)


def test_a_domain_without_a_reward_here_is_refused_given_one_or_left_out(tmp_path):
    data = {**RLVR["actor_train"]["data_args"], "domain_interleave_probs": {"math_rule": 0.5, "ifeval": 0.5}}
    train_ = {**RLVR["actor_train"], "data_args": data}
    own = {**RLVR["rewards"], "ifeval": {"worker_cls": "mine.OwnRewardWorker", "tag_included": ["if"]}}
    with pytest.raises(ConfigError, match=r"OwnRewardWorker: no such reward here.*--use ifeval=none"):
        rlvr(tmp_path, actor_train=train_, rewards=own)
    images = {**RLVR["rewards"], "ifeval": {"worker_cls": "roll.x.DetectionRewardWorker"}}
    with pytest.raises(ConfigError, match="scores boxes in images, and models see text only"):
        rlvr(tmp_path, actor_train=train_, rewards=images)
    ours = config_of(rlvr(tmp_path, actor_train=train_)).data.sources["if"].rewards or ()
    assert [(reward.name, reward.weight) for reward in ours] == [("ifeval", 1.0), ("repetition", 0.5)]
    given = config_of(rlvr(tmp_path, {"ifeval": "exact"}, actor_train=train_))
    assert [reward.name for reward in given.data.sources["if"].rewards or ()] == ["exact"]
    left = config_of(rlvr(tmp_path, {"ifeval": "none"}, actor_train=train_))
    assert left.data.sources == {}
    assert [reward.name for reward in left.rewards] == ["equal"]


def test_grpo_by_domain_divides_by_the_groups_deviation(tmp_path):
    assert config_of(rlvr(tmp_path, adv_estimator="grpo")).algorithm.std == "group"


SFT = """
sft_train: {data_args: {file_name: d.json}, training_args: {num_train_epochs: 2}, device_mapping: "[0]"}
pretrain: m
prompt_key: ask
response_key: say
"""
DPO = """
actor_train:
  data_args: {file_name: [p.json]}
  training_args: {per_device_train_batch_size: 4}
  device_mapping: list(range(0,2))
pretrain: m
beta: 0.2
chosen_key: good
rejected_key: rejected
max_steps: 9
"""
DISTILL = """
student: {data_args: {file_name: d.json}}
student_pretrain: small
teacher_pretrain: large
"""


@pytest.mark.parametrize(
    ("text", "kind", "ours"),
    [
        (SFT, "sft", "data.path=d.json data.question=ask data.fields.completion=say trainer.epochs=2"),
        (DPO, "dpo", "algorithm.args.beta=0.2 data.fields.chosen=good rollout.tasks_per_step=8 trainer.steps=9"),
        (DISTILL, "distill", "algorithm.args.teacher=large model.name=small"),
    ],
    ids=["sft", "dpo", "distill"],
)
def test_learning_from_given_data_has_the_algorithms_name_and_its_rows(text, kind, ours, tmp_path):
    (tmp_path / "given.yaml").write_text(f"{text}sequence_length: 512\n")
    draft = convert("roll", [tmp_path / "given.yaml"])
    assert pipeline(draft.source) == kind
    assert {f"{key}={value}" for key, value in draft.settings.items()} >= {f"algorithm.name={kind}", *ours.split()}
    config = config_of(draft)
    assert config.data.offline == (kind != "distill")
    assert config.evaluation.tasks == RunConfig().evaluation.tasks


def test_given_answers_in_their_columns_are_learned_from(tmp_path):
    """Of two files: an instruction with its input beside it would be two columns, which the report states."""
    for name in "ab":
        rows = [{"question": f"{n}{name}?", "output": str(n), "input": ""} for n in range(8)]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    (tmp_path / "sft.yaml").write_text(f"""
sft_train: {{data_args: {{file_name: [{tmp_path}/a.json, {tmp_path}/b.json]}},
            training_args: {{per_device_train_batch_size: 4}}, device_mapping: "[0]"}}
pretrain: seedling
prompt_key: question
query_key: input
sequence_length: 128
""")
    draft = convert("roll", [tmp_path / "sft.yaml"])
    assert "join them" in why(draft)["query_key"]
    (tmp_path / "ours.yaml").write_text(as_yaml(draft.tree()))
    more = [f"output_dir={tmp_path / 'out'}", "trainer.steps=1", "~trainer.epochs", "model.dtype=float32"]
    assert train(load(tmp_path / "ours.yaml", more)).summary["steps"] == 1
