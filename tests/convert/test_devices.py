"""GPUs, strategies and engines of other systems become learner, placement and engine."""

import pytest

from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert import convert
from arborl.convert.roll.roll_learner import gpu_numbers

SCRIPT = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=rows.parquet \\
 actor_rollout_ref.model.path={model} actor_rollout_ref.rollout.name={engine} \\
 actor_rollout_ref.rollout.tensor_model_parallel_size={split} actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
 trainer.n_gpus_per_node={gpus} trainer.nnodes={nodes} {more}
"""


@pytest.fixture
def read(tmp_path):
    def from_script(model="Qwen/Qwen2.5-7B", engine="vllm", split=1, gpus=8, nodes=1, more="", asked=None):
        text = SCRIPT.format(model=model, engine=engine, split=split, gpus=gpus, nodes=nodes, more=more)
        (tmp_path / "run.sh").write_text(text)
        draft = convert("verl", [tmp_path / "run.sh"], gpus=asked)
        return draft, validate(RunConfig, draft.tree())

    return from_script


def test_gpus_that_sample_and_learn_in_turns_are_divided_by_the_planner(read):
    draft, config = read()
    assert config.placement.name == "ray"
    assert config.placement.engines + config.learner.ranks == 8
    assert config.placement.device_mapping.engines == tuple(range(config.learner.ranks, 8))
    assert config.learner.strategy == "fsdp2"
    (planned,) = (note for note in draft.notes if note.startswith("planned for 8 × H100"))
    assert "with rollout.max_lag=1" in planned  # the estimate is of engines and learner that work at once
    changed = {line.key for line in draft.lines if line.kind == "changed"}
    assert {"trainer.n_gpus_per_node", "actor_rollout_ref.rollout.name"} <= changed


def test_one_gpu_is_one_process(read):
    _, config = read(gpus=1)
    assert (config.placement.name, config.learner.ranks, config.engine.name) == ("local", 1, "local")


def test_gpus_of_the_users_machine_replace_theirs_and_the_planner_decides_what_is_offloaded(read):
    draft, config = read(asked=1)
    assert (config.placement.name, config.learner.ranks, config.learner.strategy) == ("local", 1, "single")
    assert config.learner.offload == "all"  # all weights of 7B do not fit on one GPU of 80 GB otherwise
    assert all("--gpus" in line.why for line in draft.lines if line.key == "trainer.n_gpus_per_node")


def test_a_model_that_one_gpu_does_not_hold_is_sampled_by_their_engine(read):
    _, config = read(model="Qwen/Qwen2.5-72B", engine="vllm", split=4, gpus=8)
    assert (config.engine.name, config.learner.ranks) == ("vllm", 4)
    assert config.engine.args == {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.6}


def test_sglang_for_such_a_model_is_a_server_with_the_command_that_starts_it(read):
    draft, config = read(model="Qwen/Qwen2.5-72B", engine="sglang", split=4, gpus=8)
    assert (config.engine.name, config.engine.args["urls"]) == ("sglang", ("http://localhost:30000",))
    lines = {line.key: line for line in draft.lines}
    assert "sglang.launch_server --model-path MODEL --tp-size 4" in lines["actor_rollout_ref.rollout.name"].why


def test_a_model_that_one_gpu_holds_is_sampled_by_replicas_whatever_their_tensor_parallel_size(read):
    _, config = read(split=4)
    assert (config.engine.name, config.placement.engines > 0) == ("local", True)


def test_a_model_of_unknown_shape_is_planned_by_the_size_in_its_name(read):
    draft, _ = read(model="deepseek-ai/deepseek-llm-7b-chat")
    assert "the shape of deepseek-ai/deepseek-llm-7b-chat is not known: planned as 7b" in draft.notes
    draft, _ = read(model="/models/mine")
    assert any(note.startswith("not planned: model.name=/models/mine") for note in draft.notes)


def test_megatron_becomes_fsdp2_and_says_so(read):
    at = "actor_rollout_ref.actor."
    draft, config = read(more=f"{at}strategy=megatron {at}megatron.tensor_model_parallel_size=2")
    assert config.learner.strategy == "fsdp2"
    lines = {line.key: line for line in draft.lines}
    assert "in place of Megatron" in lines[f"{at}megatron.tensor_model_parallel_size"].why


@pytest.mark.parametrize(("keys", "ours"), [("param", "all"), ("optimizer", "optimizer"), ("grad", "all")])
def test_offload_is_kept(read, keys, ours):
    _, config = read(more=f"actor_rollout_ref.actor.fsdp_config.{keys}_offload=True")
    assert config.learner.offload == ours


def test_nodes_multiply_the_ranks_and_need_a_cluster(read):
    _, config = read(gpus=8, nodes=2)
    assert config.placement.name == "ray"
    assert config.learner.ranks + config.placement.engines == 16


@pytest.mark.parametrize(
    ("mapping", "numbers"),
    [
        ("list(range(0,4))", [0, 1, 2, 3]),
        ("list(range(2)) + [6, 7]", [0, 1, 6, 7]),
        ("list(range(0, 8, 2))", [0, 2, 4, 6]),
        ("[3]", [3]),
        ([0, 1], [0, 1]),
        (None, []),
        ("__import__('os')", []),
        ("list(range(0,4)) * 2", []),
    ],
)
def test_a_device_mapping_is_read_without_running_it(mapping, numbers):
    assert gpu_numbers(mapping) == numbers
