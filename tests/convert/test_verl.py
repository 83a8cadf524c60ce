"""verl's scripts become runs that do the same, or are refused with a word on what to do; no key is lost on the way."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert import Draft, convert
from arborl.convert.verl.verl_keys import DEFAULTS, TABLE
from arborl.errors import ConfigError

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
    assert config.data.sources["taco"].agent.args == tags
    assert not any("tag" in name for name in config.agent.args)
    assert [str(path) for path in config.data.files] == ["/data/one.parquet", "/data/two.parquet"]
    assert (config.model.name, config.algorithm.clip_low, config.algorithm.clip_high) == ("/models/base", 0.2, 0.28)
    assert {"RATE_LIMIT_PER_MINUTE", "WORKER_NODES"} <= {line.key for line in draft.dropped}
    assert set(draft.source) <= draft.accounted()


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
         {"rewards": [{"name": "score_function", "args": {"function": "fn:score"}}]}),
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
    ("overrides", "why"),
    [
        ("algorithm.adv_estimator=gpg", "no such advantage here.*algorithm.advantage=package.module:function"),
        (f"{A}policy_loss.loss_mode=clip_cov", "no 'clip_cov' here.*algorithm.loss=package.module:function"),
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
        ("agent_loops.mine._target_=a.b.C", "no agent here.*data.agents.mine=package.module:Class"),
        ("--config-name=mine", "what it says would be lost.*arborl convert verl FILE.yaml SCRIPT"),
        (f"data.train_batch_size=$SIZE {A}use_kl_loss=True", "data.train_batch_size=.*without running the script"),
        ("trainer.val_only=True", "arborl evaluate"),
    ],
)
def test_what_cannot_be_mapped_is_an_error_with_a_remedy(overrides, why, tmp_path):
    with pytest.raises(ConfigError, match=f"(?s){why}"):
        converted(tmp_path, GRPO + overrides)


def test_trainings_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="arborl train algorithm=sft"):
        converted(tmp_path, "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet")
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


def with_tools(tmp_path, *names: str) -> Draft:
    (tmp_path / "conf").mkdir(exist_ok=True)
    (tmp_path / "conf" / "tools.yaml").write_text(yaml.safe_dump({"tools": [TOOLS[name] for name in names]}))
    (tmp_path / "conf" / "servers.json").write_text(json.dumps({"mcpServers": {"a": {"url": "http://x/mcp"}}}))
    keys = f"{T}enable=True {T}max_assistant_turns=5 {T}tool_config_path=$PWD/conf/tools.yaml"
    return converted(tmp_path, f"{GRPO} {keys}")


def test_the_file_of_tools_says_what_the_agent_calls(tmp_path):
    config = config_of(draft := with_tools(tmp_path, "code", "grade"))
    assert (config.agent.name, [tool.name for tool in config.tools]) == ("tool", ["python", "check"])
    assert config.agent.args == {"max_tool_rounds": 4, "max_calls": 1}
    assert config.agent.tool_args["check"] == {"name": "calc_reward", "description": "Grades."}
    assert any("Arbor's own sandbox" in line.why for line in draft.lines)
    with pytest.raises(ConfigError, match=r"search.*agent\.tool_args\.search\.corpus"):
        with_tools(tmp_path, "search")


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


def test_an_unknown_key_is_reported_as_unknown(tmp_path):
    draft = converted(tmp_path, f"{GRPO} trainer.brand_new=1 data.odd=2 {A}odd=3 {R}odd=4")
    unknown = {line.key for line in draft.dropped if line.why == "unknown key"}
    assert unknown == {"trainer.brand_new", "data.odd", f"{A}odd", f"{R}odd"}


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
