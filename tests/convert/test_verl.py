"""verl's scripts become runs that do the same, or are refused with a word on what to do; no key is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert import Draft, convert
from arborl.convert.verl.verl_keys import DEFAULTS, TABLE
from arborl.errors import ConfigError
from arborl.registry import call_checked
from arborl.rewards import REWARDS

A, R, T = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.rollout.multi_turn."
PLAIN = "python3 -m verl.trainer.main_ppo data.train_files=rows.parquet "
GRPO = f"{PLAIN} algorithm.adv_estimator=grpo {R}n=8 "

MIXED = """
MODEL_PATH="/models/base"
TRAIN_FILES=("/data/one.parquet" "/data/two.parquet")
TACO_RATIO=0.4    # code
NQ_RATIO=0.3
MATH_RATIO=0.3
RATE_LIMIT_PER_MINUTE=60000
WORKER_NODES=(
    "10.0.0.1"
    "10.0.0.2"
)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo data.train_batch_size=256 \\
    +data.mixed_dataset.enabled=true \\
    +data.mixed_dataset.agent_mapping.taco=code_execution_agent \\
    +data.mixed_dataset.agent_mapping.nq=tool_agent \\
    actor_rollout_ref.rollout.multi_turn.enable=True \\
    actor_rollout_ref.rollout.multi_turn.tool_config.code_start_tag="<custom_code>" \\
    actor_rollout_ref.rollout.multi_turn.tool_config.code_end_tag="</custom_code>" \\
    actor_rollout_ref.actor.clip_ratio=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.top_k=-1
"""


def converted(tmp_path, text: str) -> Draft:
    (tmp_path / "run.sh").write_text(text)
    return convert("verl", [tmp_path / "run.sh"])


def ours(draft: Draft, path: str):
    """What our key was given, also where this version does not have it."""
    found = [line.ours for line in draft.lines if line.path == path]
    return draft.settings.get(path, found[-1] if found else None)


def config_of(draft: Draft) -> RunConfig:
    return validate(RunConfig, draft.tree())


def test_tags_belong_to_the_sources_that_write_code_and_files_may_be_several(tmp_path):
    draft = converted(tmp_path, MIXED)
    config = config_of(draft)
    assert {name: source.ratio for name, source in config.data.sources.items()} == {"taco": 0.4, "nq": 0.3, "math": 0.3}
    agents = {name: source.agent.name for name, source in config.data.sources.items()}
    assert agents == {"taco": "code", "nq": "tool", "math": "chat"}
    tags = {"code_start_tag": "<custom_code>", "code_end_tag": "</custom_code>"}
    results = {"result_start_tag": "<execution_results>", "result_end_tag": "</execution_results>"}
    assert config.data.sources["taco"].agent.args == tags | results | {"max_tool_rounds": 64}
    assert [tool.name for tool in config.data.sources["nq"].tools] == ["search"]
    assert not any("tag" in name for name in config.agent.args)
    assert [str(path) for path in config.data.files] == ["/data/one.parquet", "/data/two.parquet"]
    assert (config.model.name, config.algorithm.clip_low, config.algorithm.clip_high) == ("/models/base", 0.2, 0.28)
    (server,) = config.data.sources["taco"].tools
    assert (server.protocol, server.limit.per_minute) == ("execute", 60000)
    assert [line.why for line in draft.unmapped if line.key == "WORKER_NODES"] == [
        "of the cluster: arborl convert cluster SCRIPT"
    ]
    assert set(draft.source) == {line.key for line in draft.lines if line.explicit}


@pytest.mark.parametrize("name", ["reinforce", "grpo", "rloo", "remax", "opo", "reinforce_plus_plus", "gae"])
def test_an_advantage_is_never_another_one(name, tmp_path):
    config = config_of(converted(tmp_path, f"{PLAIN} {R}n=4 algorithm.adv_estimator={name}")).algorithm
    assert config.advantage == name
    assert (config.loss, config.aggregation, config.options.dual_clip, config.anchor) == (
        "ppo",
        "token",
        3.0,
        "proximal",
    )


def test_one_episode_a_task_is_compared_with_nothing_as_there(tmp_path):
    config = config_of(converted(tmp_path, f"{PLAIN} algorithm.adv_estimator=grpo"))
    assert (config.rollout.group_size, config.algorithm.options.baseline, config.algorithm.std) == (1, "none", "none")
    assert config_of(converted(tmp_path, f"{PLAIN} algorithm.adv_estimator=rloo")).algorithm.advantage == "reinforce"


def test_what_verl_does_without_a_word_is_written_out_where_arbor_would_do_something_else(tmp_path):
    draft = converted(tmp_path, GRPO)
    config = config_of(draft)
    assert (config.learner.weight_decay, config.learner.betas, config.learner.decay) == (0.01, (0.9, 0.999), "none")
    assert (config.learner.lr, config.learner.minibatches, config.rollout.tasks_per_step) == (1e-6, 4, 1024)
    algorithm = config.algorithm
    assert (config.model.dtype, algorithm.std, algorithm.skip_zero_variance) == ("bfloat16", "group", False)
    assert (config.sampling.max_tokens, config.sampling.max_context, config.data.overlong) == (512, 1024, "refuse")
    assert (config.evaluation.temperature, config.evaluation.greedy) == (0.0, False)
    assert [reward.name for reward in config.rewards] == ["data_source"]
    assert ours(draft, "trainer.epochs") == 30
    written = {line.path for line in draft.lines if not line.explicit}
    assert "algorithm.args.dual_clip" in written
    assert "algorithm.clip_low" not in written  # 0.2 there, 0.2 here


def test_ppo_has_a_critic_of_its_own_and_gae_by_token(tmp_path):
    draft = converted(tmp_path, f"{PLAIN} critic.model.path=/models/rm algorithm.lam=0.97 {A}optim.lr=2e-6")
    config = config_of(draft)
    algorithm = config.algorithm
    assert (algorithm.options.gae_level, algorithm.whiten) == ("token", "token")
    assert (
        algorithm.options.gae_lambda,
        algorithm.gamma,
        algorithm.options.value_clip,
        algorithm.options.value_coef,
    ) == (
        0.97,
        1.0,
        0.5,
        1.0,
    )
    assert (config.learner.critic, config.learner.critic_lr) == ("separate", 1e-5)
    assert ours(draft, "learner.critic_from") == "/models/rm"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (f"{A}loss_agg_mode=seq-mean-token-mean", {"algorithm.aggregation": "episode"}),
        (f"{A}loss_agg_mode=seq-mean-token-sum", {"algorithm.aggregation": "fixed", "algorithm.args.fixed_length": 1}),
        (
            f"{A}loss_agg_mode=seq-mean-token-sum-norm data.max_response_length=99",
            {"algorithm.aggregation": "fixed", "algorithm.args.fixed_length": 99},
        ),
        (f"{A}policy_loss.loss_mode=gspo {A}clip_ratio_low=3e-4 {A}clip_ratio_high=4e-4",
         {"algorithm.loss": "gspo", "algorithm.aggregation": "episode", "algorithm.clip_low": 3e-4,
          "algorithm.args.dual_clip": None}),
        (f"{A}policy_loss.loss_mode=sapo {A}tau_neg=1.2",
         {"algorithm.loss": "sapo", "algorithm.args.tau_negative": 1.2}),
        (f"{A}policy_loss.loss_mode=cispo {A}clip_ratio_low=10 {A}clip_ratio_high=0.2", {"algorithm.clip_high": 0.2}),
        (f"{A}clip_ratio=0.1", {"algorithm.clip_low": None}),  # verl reads clip_ratio_low, which is 0.2
        (f"{A}clip_ratio=0.1 {A}clip_ratio_low=null", {"algorithm.clip_low": 0.1}),
        (f"{A}clip_ratio_high=4.0", {"algorithm.clip_high": 4.0, "algorithm.args.dual_clip": 3.0}),
        (f"{A}use_kl_loss=True", {"algorithm.kl.coef": 0.001, "algorithm.kl.where": None}),
        (f"{A}use_kl_loss=True {A}kl_loss_type=mse {A}kl_loss_coef=0.1",
         {"algorithm.kl.coef": 0.1, "algorithm.kl.estimator": "mse"}),
        ("algorithm.use_kl_in_reward=True",
         {"algorithm.kl.coef": 0.001, "algorithm.kl.where": "reward", "algorithm.kl.estimator": "k1"}),
        ("algorithm.kl_ctrl.kl_coef=0.5", {"algorithm.kl.coef": None}),
        ("algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=3",
         {"algorithm.importance_weights.kind": "tis", "algorithm.importance_weights.high": 3}),
        ("algorithm.rollout_correction.bypass_mode=True", {"algorithm.anchor": "rollout"}),
        ("algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.loss_type=reinforce "
         "algorithm.rollout_correction.rollout_is=token",
         {"algorithm.loss": "pg", "algorithm.importance_weights.kind": "tis", "algorithm.args.dual_clip": None}),
        ("algorithm.filter_groups.enable=True data.train_batch_size=512 data.gen_batch_size=1536",
         {"rollout.group_filter": "varied", "rollout.spare_groups": 1024}),
        ("reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
         "+reward_model.reward_kwargs.overlong_buffer_cfg.len=40 data.max_response_length=90 "
         "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
         {"algorithm.overlong.buffer": 40, "algorithm.overlong.max_tokens": 90, "algorithm.overlong.penalty": 0.5}),
        (f"data.train_batch_size=64 {A}ppo_mini_batch_size=16 {A}ppo_epochs=2 {A}optim.lr_warmup_steps=10",
         {"learner.minibatches": 4, "learner.epochs": 2, "learner.warmup": 80}),
        (f"{A}optim.lr_warmup_steps_ratio=0.1", {"learner.warmup": 0.1}),
        (f"{A}optim.betas=[0.9,0.98] {A}optim.weight_decay=0.1 {A}grad_clip=0.5",
         {"learner.betas": [0.9, 0.98], "learner.weight_decay": 0.1, "learner.max_grad_norm": 0.5}),
        (f"{A}use_dynamic_bsz=True {A}ppo_max_token_len_per_gpu=9000", {"learner.micro_batch_tokens": 9000}),
        (f"{A}ppo_max_token_len_per_gpu=9000", {"learner.micro_batch_tokens": None}),
        (f"{A}fsdp_config.dtype=fp32 {A}fsdp_config.model_dtype=bf16",
         {"model.dtype": "float32", "learner.master": "none"}),
        ("actor_rollout_ref.model.lora_rank=32", {"model.lora.rank": 32, "model.lora.alpha": 16}),
        ("actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.target_modules=[q_proj,v_proj]",
         {"model.lora.target": ["q_proj", "v_proj"]}),
        (f"{R}temperature=0.7 {R}top_p=0.9 {R}top_k=20",
         {"sampling.temperature": 0.7, "sampling.top_p": 0.9, "sampling.top_k": 20}),
        (f"{R}val_kwargs.do_sample=True {R}val_kwargs.temperature=0.6 {R}val_kwargs.n=4 {R}val_kwargs.top_k=5",
         {"evaluation.sampling.temperature": 0.6, "evaluation.group_size": 4, "evaluation.sampling.top_k": 5}),
        (f"{R}val_kwargs.temperature=0.6", {"evaluation.sampling.temperature": 0.0}),
        ("data.filter_overlong_prompts=True", {"data.overlong": "drop"}),
        ("data.truncation=left", {"data.overlong": "cut"}),
        ("data.max_prompt_length=100 data.max_response_length=50",
         {"data.max_prompt_tokens": 100, "sampling.max_tokens": 50, "sampling.max_context": 150}),
        ("trainer.total_epochs=3", {"trainer.epochs": 3, "trainer.steps": None}),
        ("trainer.total_epochs=3 trainer.total_training_steps=40", {"trainer.epochs": None, "trainer.steps": 40}),
        ("trainer.logger=[console,wandb,mlflow] trainer.project_name=p trainer.experiment_name=e-$(date)",
         {"track.trackers": [{"name": "wandb", "args": {"project": "p", "name": "e"}}, {"name": "mlflow", "args": {
             "uri": "sqlite:////tmp/mlruns.db", "experiment": "p", "name": "e"}}], "name": "e",
          "track.tensorboard": False}),
        ("trainer.logger=tensorboard trainer.save_freq=20 trainer.test_freq=5 trainer.val_before_train=False",
         {"track.tensorboard": True, "trainer.save_every": 20, "evaluation.every": 5, "evaluation.before": False}),
        ("trainer.default_local_dir=out/x trainer.max_actor_ckpt_to_keep=3",
         {"output_dir": "out/x", "trainer.keep": 3}),
        ("trainer.default_local_dir=out/$(date)", {"output_dir": None}),
        ("data.apply_chat_template_kwargs.enable_thinking=False", {"model.chat_args.enable_thinking": False}),
        ("custom_reward_function.path=my/fn.py custom_reward_function.name=score",
         {"rewards": [{"name": "score_function", "args": {"function": "my/fn.py:score"}}]}),
        ("custom_reward_function.path=pkg://mine.fn custom_reward_function.reward_kwargs.x=2",
         {"rewards": [{"name": "score_function", "args": {"function": "mine.fn:compute_score", "kwargs": {"x": 2}}}]}),
        ("reward_model.enable=True reward_model.model.path=/models/rm",
         {"rewards": [{"name": "reward_model", "args": {"path": "/models/rm"}}]}),
        (f"{R}agent.default_agent_loop=single_turn_agent", {"agent.name": "chat"}),
    ],
)  # fmt: skip
def test_a_key_means_the_same_here(overrides, expected, tmp_path):
    draft = converted(tmp_path, GRPO + overrides)
    assert {path: ours(draft, path) for path in expected} == expected
    assert set(draft.source) <= draft.accounted()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("algorithm.adv_estimator=gpg", {"algorithm.std": "none", "algorithm.skip_zero_variance": None}),
        ("algorithm.adv_estimator=grpo_passk", {"algorithm.name": "pass_k", "algorithm.std": "group"}),
        ("algorithm.adv_estimator=grpo_passk algorithm.norm_adv_by_std_in_grpo=False", {"algorithm.std": "none"}),
        (f"{A}policy_loss.loss_mode=gpg", {"algorithm.loss": "pg"}),
        (f"{A}policy_loss.loss_mode=geo_mean {A}clip_ratio_low=0.4 {A}clip_ratio_high=0.3",
         {"algorithm.loss": "gmpo", "algorithm.aggregation": "episode", "algorithm.clip_low": 0.4,
          "algorithm.clip_high": 0.3, "algorithm.anchor": "proximal"}),
        (f"{T}enable=True {T}interaction_config_path=$PWD/i.yaml {T}max_user_turns=5",
         {"agent.name": "chat", "env.name": "question", "env.args.attempts": 6}),
        (f"{T}enable=True {T}interaction_config_path=$PWD/i.yaml {T}max_user_turns=5 {T}max_assistant_turns=3",
         {"env.args.attempts": 3}),
        (f"{A}fsdp_config.full_determinism=True", {"deterministic": True}),
        (f"{A}optim.lr_decay_style=cosine {A}optim.min_lr=1e-7", {"learner.decay": "cosine", "learner.min_lr": 1e-7}),
        (f"{A}optim.override_optimizer_config.optimizer_cpu_offload=True", {"learner.offload": "optimizer"}),
        ("actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.target_modules=[linear_qkv,linear_proj]",
         {"model.lora.rank": 8, "model.lora.target": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
        ("reward_model.enable=True reward_model.model.path=org/rm reward_model.max_length=512",
         {"rewards": [{"name": "reward_model", "args": {"path": "org/rm", "max_tokens": 512}}]}),
        ("actor_rollout_ref.model.path=''", {"model.name": "${oc.env:MODEL_PATH}"}),
        (f"{A}use_dynamic_bsz=True {A}ppo_max_token_len_per_gpu=$(((a + b) / c))",
         {"learner.micro_batch_tokens": None}),
        (f"{A}use_dynamic_bsz=True {A}ppo_max_token_len_per_gpu=$(((SIZE + 4) / 2))",
         {"learner.micro_batch_tokens": 10}),
    ],
)  # fmt: skip
def test_more_keys_mean_the_same_here(overrides, expected, tmp_path):
    interaction = {
        "interaction": [{"name": "gsm8k", "class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction"}]
    }
    (tmp_path / "i.yaml").write_text(yaml.safe_dump(interaction))
    draft = converted(tmp_path, f"SIZE=16\n{GRPO}{overrides}")
    assert {path: ours(draft, path) for path in expected} == expected
    assert set(draft.source) <= draft.accounted()


def test_a_function_of_a_file_near_the_script_is_named_by_its_path_and_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "repo" / "rewards").mkdir(parents=True)
    (tmp_path / "repo" / "rewards" / "mine.py").write_text("def score(solution_str, ground_truth, **more): return 1.0")
    key = "custom_reward_function.path=$PROJECT/rewards/mine.py custom_reward_function.name=score"
    (tmp_path / "repo" / "run.sh").write_text(GRPO + key)
    draft = convert("verl", [tmp_path / "repo" / "run.sh"])
    (reward,) = config_of(draft).rewards
    assert reward.args["function"] == f"{tmp_path}/repo/rewards/mine.py:score"
    assert call_checked(REWARDS[reward.name], reward.args, "rewards.0.args").function("", "") == 1.0
    assert all(line.kind == "mapped" for line in draft.lines if line.key.startswith("custom_reward_function"))
    (tmp_path / "repo" / "rewards" / "mine.py").unlink()
    (line,) = [line for line in convert("verl", [tmp_path / "repo" / "run.sh"]).lines
               if line.key == "custom_reward_function.path"]  # fmt: skip
    assert "$PROJECT is only known when the script runs: correct the path" in line.why


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ("algorithm.adv_estimator=mine", "no such advantage here.*algorithm.advantage=package.module:function"),
        ("actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct", "models that see are not trained here"),
        ("reward_manager.module.path=a.py", "a class of rewards.*rewards=.package.module:function"),
        (f"{A}policy_loss.loss_mode=clip_cov", "no 'clip_cov' here.*algorithm.loss=package.module:function"),
        (f"{A}policy_loss.loss_mode=kl_cov", "no 'kl_cov' here"),
        ("algorithm.adv_estimator=optimal_token_baseline", "no such advantage here"),
        ("reward_model.enable=True", "reward_model.model.path does not say which"),
        ("reward_model.reward_manager=mine", "no such manager of rewards here.*rewards="),
        (f"{R}agent.default_agent_loop=mine", "no agent is called so here.*docs/agents.md"),
        (f"{T}enable=True", "with which tools.*arborl convert verl SCRIPT TOOLS.yaml"),
        (
            f"{T}enable=True {T}tool_config_path=away.yaml",
            "the tools are unknown.*arborl convert verl SCRIPT TOOLS.yaml",
        ),
        (f"{T}interaction_config_path=a.yaml", "is an environment here.*env=package.module:Class"),
        ("data.image_key=images", "pictures.*rows of text"),
        ("data.custom_cls.path=a.py", "data.rows=package.module:function"),
        ("agent_loops.mine._target_=a.b.C", "no agent here.*--use mine=package.module:Class"),
        ("--config-name=mine", "what it says would be lost.*arborl convert verl FILE.yaml SCRIPT"),
        (f"data.train_batch_size=$SIZE {A}use_kl_loss=True", "data.train_batch_size=.*without running the script"),
        ("trainer.val_only=True", "arborl evaluate"),
    ],
)
def test_what_cannot_be_mapped_is_an_error_with_a_remedy(overrides, why, tmp_path):
    with pytest.raises(ConfigError, match=f"(?s){why}"):
        converted(tmp_path, GRPO + overrides)


def test_trainings_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="a trainer of its own"):
        converted(tmp_path, "python3 -m recipe.spin.main_spin data.train_files=a.parquet")


TOOLS = {
    "code": {"class_name": "verl.tools.sandbox_fusion_tools.SandboxFusionTool", "config": {"type": "native"}},
    "grade": {
        "class_name": "verl.tools.gsm8k_tool.Gsm8kTool",
        "config": {"type": "native"},
        "tool_schema": {"type": "function", "function": {"name": "calc_reward", "description": "Grades."}},
    },
    "search": {"class_name": "verl.tools.search_tool.SearchTool", "config": {"retrieval_service_url": "http://x"}},
    "mcp": {"class_name": "a.MCPTool", "config": {"type": "mcp"}, "mcp": {"mcp_servers_config_path": "servers.json"}},
}


SERVERS = {"mcpServers": {"a": {"url": "http://x/mcp"}, "b": {"command": "uvx", "args": ["server", "--here"]}}}


def with_tools(tmp_path, *names: str) -> Draft:
    (tmp_path / "conf").mkdir(exist_ok=True)
    (tmp_path / "conf" / "tools.yaml").write_text(yaml.safe_dump({"tools": [TOOLS[name] for name in names]}))
    (tmp_path / "conf" / "servers.json").write_text(json.dumps(SERVERS))
    keys = f"{T}enable=True {T}max_assistant_turns=5 {T}tool_config_path=$PWD/conf/tools.yaml"
    return converted(tmp_path, f"{GRPO} {keys}")


def test_the_file_of_tools_says_what_the_agent_calls(tmp_path):
    config = config_of(draft := with_tools(tmp_path, "code", "grade"))
    assert (config.agent.name, [tool.name for tool in config.tools]) == ("tool", ["python", "check"])
    assert config.agent.args == {"max_tool_rounds": 4, "max_calls": 1}
    assert config.agent.tool_args["check"] == {"name": "calc_reward", "description": "Grades."}
    assert any("Arbor's own sandbox" in line.why for line in draft.lines)
    config = config_of(draft := with_tools(tmp_path, "search"))
    assert [(tool.name, tool.args) for tool in config.tools] == [("search", {"corpus": "corpus.jsonl"})]
    assert any("here a file with one document per line" in line.why for line in draft.lines)
    config = config_of(with_tools(tmp_path, "mcp"))
    assert [tool.origin for tool in config.tools] == ["http://x/mcp", "uvx server --here"]


def test_tools_may_be_given_as_a_file_beside_the_script(tmp_path):
    (tmp_path / "t.yaml").write_text(yaml.safe_dump({"tools": [TOOLS["code"]]}))
    (tmp_path / "run.sh").write_text(f"{GRPO} {T}enable=True")
    config = config_of(convert("verl", [tmp_path / "run.sh", tmp_path / "t.yaml"]))
    assert [tool.name for tool in config.tools] == ["python"]


def test_every_default_has_a_rule_and_no_rule_leaves_a_key_without_a_word():
    assert set(DEFAULTS) <= set(TABLE)
    for key, rule in TABLE.items():
        for value in (True, False, None, 1, 0.5, "name", ["a"], {}):
            rule(Draft(source={key: value}, defaults=DEFAULTS), key, value)  # none may break


SECTIONS = """
data data.mixed_dataset data.sampler algorithm algorithm.kl_ctrl algorithm.filter_groups algorithm.pf_ppo
algorithm.rollout_correction actor_rollout_ref actor_rollout_ref.actor actor_rollout_ref.actor.optim
actor_rollout_ref.actor.fsdp_config actor_rollout_ref.actor.megatron actor_rollout_ref.actor.policy_loss
actor_rollout_ref.actor.checkpoint actor_rollout_ref.actor.megatron.override_transformer_config
actor_rollout_ref.actor.optim.override_optimizer_config actor_rollout_ref.ref actor_rollout_ref.ref.fsdp_config
actor_rollout_ref.ref.megatron actor_rollout_ref.ref.model actor_rollout_ref.model actor_rollout_ref.model.lora
actor_rollout_ref.model.mtp actor_rollout_ref.model.override_config actor_rollout_ref.rollout
actor_rollout_ref.rollout.val_kwargs actor_rollout_ref.rollout.agent actor_rollout_ref.rollout.engine_kwargs.vllm
actor_rollout_ref.rollout.multi_turn actor_rollout_ref.rollout.multi_turn.tool_config critic critic.optim critic.model
critic.megatron critic.model.fsdp_config critic.checkpoint reward_model reward_model.model reward_model.rollout
reward_model.reward_kwargs reward_model.reward_kwargs.overlong_buffer_cfg reward_model.sandbox_fusion reward_manager
reward_manager.module custom_reward_function trainer trainer.checkpoint ray_kwargs ray_kwargs.ray_init ray_init
transfer_queue rollout async_training brand_new
"""


@pytest.mark.parametrize(
    "more", ["", "algorithm.adv_estimator=gae reward_model.enable=True reward_model.model.path=a/rm"]
)
def test_an_unknown_key_in_any_section_is_lost_and_never_passed_over(more, tmp_path):
    keys = {f"{section}.some_unknown_key" for section in SECTIONS.split()}
    draft = converted(tmp_path, f"{GRPO} {more} " + " ".join(f"+{key}=1" for key in keys))
    assert {line.key for line in draft.lines if line.kind == "lost"} >= keys
    assert not keys & {line.key for line in draft.lines if line.kind != "lost"}


def verl_defaults() -> dict[str, str]:
    """Keys of verl's `ppo_trainer` and `ppo_megatron_trainer` (b178a3c, January 2026) as overrides with their defaults;
    a key whose default is a reference is null."""
    lines = (Path(__file__).parent / "verl_keys.txt").read_text().split()
    return {line.partition("=")[0]: line if "=" in line else f"{line}=null" for line in lines}


@pytest.mark.parametrize(
    "more", ["algorithm.adv_estimator=grpo", "algorithm.adv_estimator=gae", f"{A}use_kl_loss=True"]
)
def test_verls_whole_configuration_at_its_defaults_converts_and_no_key_is_unknown(more, tmp_path):
    every = verl_defaults()
    assert len(every) == 714
    changed = more.partition("=")[0]
    overrides = " ".join(text for key, text in every.items() if key not in (changed, f"{R}name"))
    draft = converted(tmp_path, f"{PLAIN} {overrides} {R}n=4 {R}name=vllm {more}")
    assert set(every) <= draft.accounted()
    assert not {line.key for line in draft.lines if line.why in ("unknown key", "no rule reads it")}
    lost = {line.key: line.why for line in draft.lines if line.kind == "lost"}
    assert set(lost) == {"data.image_key", "data.video_key"}
    assert all(len(line.why) > 5 for line in draft.lines if line.kind == "idle")


@pytest.mark.parametrize(
    ("overrides", "ours"),
    [
        (f"{A}use_kl_loss=True {A}fsdp_config.param_offload=True", "mapped"),
        (f"{A}use_kl_loss=True {A}fsdp_config.optimizer_offload=True", "lost"),
        (f"{A}use_kl_loss=True", "lost"),
        ("", "idle"),
    ],
)
def test_offload_of_the_reference_is_kept_where_it_moves_and_called_lost_where_it_does_not(overrides, ours, tmp_path):
    key = "actor_rollout_ref.ref.fsdp_config.param_offload"
    draft = converted(tmp_path, f"{GRPO} {overrides} {key}=True")
    (line,) = [line for line in draft.lines if line.key == key]
    assert line.kind == ours
    assert (line.path == "learner.offload") == (ours == "mapped")


def test_the_critic_and_the_reward_model_say_where_they_are(tmp_path):
    keys = {"critic.strategy": "fsdp", "critic.megatron.tensor_model_parallel_size": 2,
            "reward_model.n_gpus_per_node": 4, "reward_model.model.fsdp_config.param_offload": True}  # fmt: skip
    text = " ".join(f"{key}={value}" for key, value in keys.items())
    without = {line.key: line.why for line in converted(tmp_path, f"{GRPO} {text}").lines}
    assert "there is a critic with algorithm.adv_estimator=gae only" in without["critic.strategy"]
    assert without["reward_model.n_gpus_per_node"] == "there is no reward model"
    both = f"{PLAIN} reward_model.enable=True reward_model.model.path=a/rm {text}"
    found = {line.key: line for line in converted(tmp_path, both).lines}
    assert "sharded as the policy" in found["critic.strategy"].why
    assert "placement.reward_workers" in found["reward_model.n_gpus_per_node"].why
    assert found["reward_model.model.fsdp_config.param_offload"].kind == "lost"


def test_a_converted_script_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": [{"role": "user", "content": f"{n} + 1?"}], "data_source": "openai/gsm8k",
         "agent_name": "single_turn_agent", "reward_model": {"style": "rule", "ground_truth": str(n + 1)}}
        for n in range(8)
    ]  # fmt: skip
    for name in ("a", "b", "test"):
        (tmp_path / f"{name}.json").write_text(json.dumps([row | {"extra_info": {"of": name}} for row in rows]))
    script = GRPO.replace("rows.parquet", "\"['a.json', 'b.json']\"")
    (tmp_path / "run.sh").write_text(
        f"{script} data.val_files=test.json trainer.total_training_steps=1 data.train_batch_size=4 "
        f"{A}ppo_mini_batch_size=2"
    )
    done = CliRunner().invoke(app, ["convert", "verl", "run.sh", "--out", "run.yaml"])
    assert done.exit_code == 0, done.output
    more = ["model=seedling", "model.dtype=float32", "output_dir=out", "evaluation.tasks=2"]
    more += ["sampling.max_tokens=8", "sampling.max_context=128", "data.max_prompt_tokens=64", "rollout.group_size=2"]
    done = CliRunner().invoke(
        app, ["train", "run.yaml", *more, "engine=scripted", 'engine.args.replies=["so","#### 3"]']
    )
    assert done.exit_code == 0, done.output
    line = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line
