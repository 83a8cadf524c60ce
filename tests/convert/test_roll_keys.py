"""Every key of a ROLL file is in the report, and a key that nobody knows is never called unnecessary."""

from __future__ import annotations

import copy
import json
import random

import pytest
import yaml
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert import convert
from arborl.convert.roll.roll_key_table import PREFIXES, REWARD, TABLE
from arborl.errors import ConfigError

WORKER = {
    "model_args": {"dtype": "bf16", "attn_implementation": "fa2", "disable_gradient_checkpointing": True},
    "training_args": {"learning_rate": 1e-6, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "data_args": {"template": "qwen2_5"},
    "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 1}},
    "system_envs": {"NCCL_ALGO": "Ring"},
    "device_mapping": "list(range(0,2))",
    "infer_batch_size": 2,
}
SAMPLER = {
    **WORKER,
    "generating_args": {"max_new_tokens": 64, "temperature": 0.99, "top_p": 0.99, "top_k": 100, "num_beams": 1},
    "strategy_args": {"strategy_name": "vllm", "strategy_config": {"gpu_memory_utilization": 0.8, "block_size": 16}},
}
COMMON = {
    "exp_name": "x", "seed": 1, "pretrain": "some/model", "max_steps": 5, "sequence_length": 512, "prompt_length": 128,
    "output_dir": "./output", "logging_dir": "./logs", "num_gpus_per_node": 8, "adv_estimator": "gae",
    "checkpoint_config": {"type": "file_system", "output_dir": "/big/disk"},
    "system_envs": {"USE_MODELSCOPE": "1"}, "track_with": "wandb", "tracker_kwargs": {"project": "p"},
    "rollout_mock": {"enable": False}, "router_args": {"router_name": "EnvAffinityRouter"},
    "train_infer_correction": {"is_weight": {"enabled": True}},
    "actor_train": WORKER, "actor_infer": SAMPLER, "reference": WORKER, "critic": WORKER,
}  # fmt: skip
MANAGER = {"num_env_groups": 4, "group_size": 2, "tags": ["Ice"], "num_groups_partition": [4], "llm_proxy": {}}
LAKE = {"env_type": "frozen_lake", "max_steps": 5, "max_tokens_per_step": 32, "env_config": {"size": 4}}
AGENTIC = {
    **COMMON, "rollout_batch_size": 8, "val_batch_size": 8, "train_env_manager": MANAGER, "val_env_manager": MANAGER,
    "reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"}, "env_monitor": {"hung_timeout": 60},
    "custom_envs": {"Ice": {**LAKE, "tool_wrapper": {"wrapper_args": {}}}},
}  # fmt: skip
ROWS = {**WORKER, "data_args": {"file_name": ["rows.json"], "domain_interleave_probs": {"math": 0.5, "if": 0.5}}}
RLVR = {
    **COMMON, "rollout_batch_size": 8, "num_return_sequences_in_group": 4, "actor_train": ROWS, "validation": SAMPLER,
    "reward_model": SAMPLER,
    "rewards": {
        "math": {**WORKER, "worker_cls": "roll.x.MathRuleRewardWorker", "tag_included": ["deep"]},
        "if": {"worker_cls": "roll.x.GeneralRuleRewardWorker", "tag_included": ["ifeval"], "query_filter_config": {}},
    },
}  # fmt: skip
GIVEN = {**WORKER, "data_args": {"file_name": ["rows.json"]}}
SFT = {"pretrain": "m", "sequence_length": 64, "sft_train": GIVEN, "validation": WORKER, "checkpoint_config": {}}
DPO = {"pretrain": "m", "sequence_length": 64, "beta": 0.1, "actor_train": GIVEN, "reference": WORKER}
DISTILL = {
    "student_pretrain": "small", "teacher_pretrain": "large", "sequence_length": 64, "student": GIVEN,
    "teacher": {**WORKER, "opd_kl_coef": 1.0},
}  # fmt: skip
FILES = {"agentic": AGENTIC, "rlvr": RLVR, "sft": SFT, "dpo": DPO, "distill": DISTILL}
UNKNOWN = "some_unknown_key"


def sections(tree, above=()):
    """Paths of all mappings of a tree, the tree itself included."""
    yield above
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from sections(value, (*above, key))


def unshared(tree):
    return {key: unshared(value) if isinstance(value, dict) else copy.deepcopy(value) for key, value in tree.items()}


def put(tree, path, value):
    """The tree with a value at a path; sections that are equal are no longer the same."""
    tree = unshared(tree)
    node = tree
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    return tree


@pytest.fixture
def read(tmp_path):
    def from_tree(tree, uses=None):
        (tmp_path / "given.yaml").write_text(yaml.safe_dump(unshared(tree), sort_keys=False))
        return convert("roll", [tmp_path / "given.yaml"], uses)

    return from_tree


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_file_has_an_outcome(name, read):
    draft = read(FILES[name])
    assert set(draft.source) <= draft.accounted()
    assert {line.kind for line in draft.lines} <= {"mapped", "changed", "lost", "idle"}
    validate(RunConfig, draft.tree())


PLACES = [(name, path) for name, tree in FILES.items() for path in sections(tree)]


@pytest.mark.parametrize(("name", "path"), PLACES, ids=[".".join((name, *path)) for name, path in PLACES])
def test_a_key_that_nobody_knows_is_lost_in_every_section(name, path, read):
    key = ".".join((*path, UNKNOWN))
    try:
        draft = read(put(FILES[name], (*path, UNKNOWN), 7))
    except ConfigError as error:
        assert UNKNOWN in str(error)  # noqa: PT017
        return
    outcomes = [line for line in draft.lines if line.key == key]
    assert {line.kind for line in outcomes} == {"lost"}
    assert all(line.why for line in outcomes)


def test_a_section_that_others_refer_to_has_no_unknown_definitions(read):
    """`${actor_train.infer_batch_size}` makes nothing else in actor_train a definition."""
    tree = put(AGENTIC, ("reference", "infer_batch_size"), "${actor_train.infer_batch_size}")
    lines = read(put(tree, ("actor_train", UNKNOWN), 7)).lines
    assert [line.kind for line in lines if line.key == f"actor_train.{UNKNOWN}"] == ["lost"]


def test_any_choice_of_known_keys_has_outcomes(read):
    """Known keys in random numbers, with values that may be wrong: each is reported, or the file is refused."""
    rng = random.Random(0)
    values = (True, False, None, 1, 0.5, "x", [], ["a"])
    roles = tuple(f"{name}." for name in ("actor_train", "actor_infer", "reference", "critic", "val_env_manager"))
    keys = sorted(key for key in TABLE if key.startswith(roles))
    converted = 0
    for _ in range(40):
        tree = unshared(AGENTIC)
        for key in rng.sample(keys, 15):
            *above, last = key.split(".")
            node = tree
            for part in above:
                node = node.setdefault(part, {})
                if not isinstance(node, dict):
                    break
            else:
                node.setdefault(last, rng.choice(values))
        try:
            draft = read(tree)
        except ConfigError:
            continue
        converted += 1
        assert set(draft.source) <= draft.accounted()
    assert converted > 10


def test_the_json_of_the_report_has_each_key(tmp_path):
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(AGENTIC))
    done = CliRunner().invoke(app, ["convert", "roll", str(tmp_path / "given.yaml"), "--json"])
    assert done.exit_code == 0, done.output
    lines = json.loads(done.stdout)["lines"]
    keys = {line["key"] for line in lines}
    assert {".".join(path) for path in leaves(AGENTIC)} <= keys
    assert all(line["reason"] for line in lines if line["kind"] != "mapped")


def leaves(tree, above=()):
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*above, key))
        elif not isinstance(value, dict):
            yield (*above, key)


def test_unnecessary_keys_are_listed_by_name():
    """A rule for a prefix never calls a key unnecessary that it has not heard of."""
    from arborl.convert.draft import Draft

    for prefix, rule in PREFIXES.items():
        draft = Draft()
        rule(draft, f"{prefix}{UNKNOWN}", 7)
        assert [line.kind for line in draft.lines] == ["lost"], prefix
    assert len(REWARD) > 100  # all of WorkerConfig, and of RewardConfig


ELSEWHERE = {"checkpoint_config": {"type": "oss", "output_dir": "oss://x"}}


@pytest.mark.parametrize(
    ("more", "key", "kind", "says"),
    [
        ({"resume_from_checkpoint": True}, "resume_from_checkpoint", "lost", "--resume latest"),
        ({"resume_from_checkpoint": "/no/where"}, "resume_from_checkpoint", "lost", "cannot be read"),
        ({"resume_from_checkpoint": False}, "resume_from_checkpoint", "idle", "off"),
        (ELSEWHERE, "checkpoint_config.output_dir", "lost", "type=oss"),
        (ELSEWHERE, "checkpoint_config.type", "lost", "folder"),
        ({}, "checkpoint_config.output_dir", "changed", "name of the run"),
        ({}, "logging_dir", "changed", "run's folder"),
        ({}, "system_envs.USE_MODELSCOPE", "lost", "ModelScope"),
        ({}, "actor_train.system_envs.NCCL_ALGO", "lost", "NCCL_ALGO=Ring arborl train"),
        ({"system_envs": {"DETERMINISTIC_MODE": "1"}}, "system_envs.DETERMINISTIC_MODE", "changed", "seed"),
        ({"system_envs": {"NVTE_FLASH_ATTN": "1"}}, "system_envs.NVTE_FLASH_ATTN", "idle", "Transformer Engine"),
        ({}, "reference.device_mapping", "idle", "the reference policy is on the learner's GPUs"),
        ({}, "critic.device_mapping", "idle", "the critic is on the learner's GPUs"),
        ({"adv_estimator": "grpo"}, "critic.device_mapping", "idle", "no critic"),
        ({"user_defined_rollout_loop_cls": "mine.Loop"}, "user_defined_rollout_loop_cls", "refused", "class of yours"),
        ({"env_monitor": {"hung_timeout": 60}}, "env_monitor.hung_timeout", "changed", "an episode ends"),
        ({"logging_steps": 5}, "logging_steps", "lost", "every step"),
    ],
)  # fmt: skip
def test_keys_with_a_rule_of_their_own(more, key, kind, says, read):
    tree = {**AGENTIC, **more}
    if kind == "refused":
        with pytest.raises(ConfigError, match=says):
            read(tree)
        return
    line = next(line for line in read(tree).lines if line.key == key)
    assert (line.kind, says in line.why) == (kind, True), line


def test_a_hugging_face_folder_to_resume_from_is_the_initial_model(read, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "config.json").write_text("{}")
    draft = read({**AGENTIC, "resume_from_checkpoint": str(tmp_path / "saved")})
    assert draft.settings["model.name"] == str(tmp_path / "saved")


def test_folders_for_checkpoints_and_a_model_of_a_worker(read):
    draft = read(AGENTIC)
    config = validate(RunConfig, draft.tree())
    assert (str(config.trainer.checkpoint_dir), str(config.output_dir)) == ("/big/disk", "output/x")
    one = put(AGENTIC, ("actor_train", "model_args", "model_name_or_path"), "another/model")
    assert read(one).settings["model.name"] == "some/model"  # pretrain counts unless all of them name a model
    for role in ("actor_infer", "reference"):
        one = put(one, (role, "model_args", "model_name_or_path"), "another/model")
    assert read(one).settings["model.name"] == "another/model"


def test_strategies_that_only_speed_up_are_named_and_those_that_change_the_result_are_lost(read):
    at = ("actor_train", "strategy_args", "strategy_config")
    tree = put(put(AGENTIC, (*at, "moe_grouped_gemm"), True), (*at, "moe_aux_loss_coeff"), 0.01)
    tree = put(put(tree, (*at, "recompute_granularity"), "full"), ("actor_train", "logits_in_fp32"), True)
    draft = read(tree)
    kinds = {line.key.rpartition(".")[2]: line.kind for line in draft.lines}
    assert (kinds["moe_grouped_gemm"], kinds["moe_aux_loss_coeff"]) == ("idle", "lost")
    assert kinds["recompute_granularity"] == "idle"
    assert draft.settings["model.head"] == "float32"


def test_sokoban_in_another_vocabulary_is_shown_in_it(read):
    lookup = dict(enumerate("W.GCBA@"))
    words = dict(zip("W.GCBA@", ("wall", "empty", "target", "box on", "box", "player", "player on"), strict=True))
    puzzle = {
        **LAKE, "env_type": "sokoban",
        "env_config": {"dim_room": [6, 6], "num_boxes": 1, "grid_lookup": lookup, "grid_vocab": words,
                       "action_lookup": {1: "Up", 2: "North"}, "env_instruction": "Push."},
    }  # fmt: skip
    draft = read(put(AGENTIC, ("custom_envs", "Ice"), puzzle))
    config = validate(RunConfig, draft.tree())
    assert config.env.args["symbols"]["wall"] == "W"
    assert config.env.args["border"] is True
    assert "Push." in str(config.env.prompt.instruction)
    assert "W wall" in str(config.env.prompt.instruction)
    kinds = {line.key.removeprefix("custom_envs.Ice.env_config."): line.kind for line in draft.lines}
    assert (kinds["grid_lookup.0"], kinds["grid_vocab.."]) == ("mapped", "changed")
    assert (kinds["action_lookup.1"], kinds["action_lookup.2"]) == ("idle", "lost")


@pytest.mark.parametrize("kind", ["sokoban_native_env", "sokoban_sandbox"])
def test_the_same_puzzle_of_other_classes_is_sokoban(kind, read):
    manager = "roll.x.AgentNativeStepEnvManager" if "native" in kind else "roll.x.TrajEnvManager"
    puzzle = {**LAKE, "env_type": kind, "env_manager_cls": manager, "env_config": {"base_url": "http://x"}}
    draft = read({**put(AGENTIC, ("custom_envs", "Ice"), puzzle), "adv_estimator": "grpo"})
    config = validate(RunConfig, draft.tree())
    assert (config.env.name, config.env.args["size"], config.agent.name) == ("sokoban", 6, "chat")
    assert config.algorithm.aggregation == ("call" if "native" in kind else "episode")
    assert next(line for line in draft.lines if line.key.endswith("env_type")).kind == "changed"


def test_a_second_clip_is_not_given_to_a_loss_that_has_none(read):
    worker = "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker"
    tree = {**put(AGENTIC, ("actor_train", "worker_cls"), worker), "dual_clip_loss": True, "adv_estimator": "reinforce"}
    draft = read(put(tree, ("actor_train", "pg_variant"), "topr"))
    assert (draft.settings["algorithm.loss"], "algorithm.args.dual_clip" in draft.settings) == ("topr", False)
    sequences = read({**tree, "ratio_type": "segment"})
    assert next(line for line in sequences.lines if line.key == "dual_clip_loss").kind == "lost"


@pytest.mark.parametrize(
    ("fragment", "strategy", "offload"),
    [
        ("deepspeed_zero2", "zero2", "none"),
        ("deepspeed_zero3_cpuoffload", "fsdp2", "all"),
        ("deepspeed_zero", "ddp", "none"),
    ],
)
def test_fragments_of_deepspeed_that_are_not_there_are_known_by_their_names(fragment, strategy, offload, read):
    tree = put(AGENTIC, ("actor_train", "strategy_args"), {"strategy_name": "deepspeed_train"})
    tree = put(tree, ("actor_train", "strategy_args", "strategy_config"), f"${{{fragment}}}")
    tree = put(tree, ("actor_infer", "device_mapping"), "list(range(2,3))")
    draft = read({"defaults": [f"../config/{fragment}@_here_"], **tree})
    assert draft.settings["learner.strategy"] == strategy
    assert draft.settings.get("learner.offload", "none") == offload
    assert next(line for line in draft.lines if line.key == "defaults").kind == "lost"
    with pytest.raises(ConfigError, match="there is no such file"):
        read({"defaults": ["../config/other@_here_"], **tree})


def test_products_of_a_file_are_those_of_its_folder(read):
    shop = {**LAKE, "env_type": "webshop", "env_config": {"file_path": "/data/webshop/items_shuffle_1000.json"}}
    draft = read(put(AGENTIC, ("custom_envs", "Ice"), shop))
    assert draft.settings["env.args.data"] == "/data/webshop"
