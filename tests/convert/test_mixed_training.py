"""Scripts and configurations of the mixed-training fork of verl, as its document describes them, become a run of
several sources with code agents and a tool server, and a cluster's file."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.cluster.launcher.cluster_spec import read_cluster_spec
from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert import convert
from arborl.convert.cluster_files import convert_cluster
from arborl.errors import ConfigError

TOOL = "actor_rollout_ref.rollout.multi_turn.tool_config."
STABLE = {
    "defaults": ["ppo_trainer", "_self_"],
    "data": {"shuffle": True, "seed": 1, "filter_overlong_prompts": True,
             "mixed_dataset": {"enabled": True, "precompute_batches": True, "sampler_type": "efficient"}},
    "actor_rollout_ref": {"rollout": {"name": "vllm", "multi_turn": {
        "enable": True, "format": "hermes",
        "tool_config": {"enable_global_rate_limit": True, "code_start_tag": "<code>", "code_end_tag": "</code>",
                        "answer_start_tag": "<answer>", "answer_end_tag": "</answer>", "state_masking": True,
                        "start_state_marker": "<output>", "end_state_marker": "</output>"}}}},
    "algorithm": {"adv_estimator": "grpo"},
    "agent_loops": {"code_execution_agent": {"_target_": "verl.experimental.agent_loop.CodeExecutionAgentLoop"},
                    "tool_agent": {"_target_": "verl.experimental.agent_loop.ToolAgentLoop"}},
}  # fmt: skip
"""The document's `config/mixed_dataset_grpo.yaml`."""
VARIABLES = """#!/bin/bash
MASTER_IP="172.26.81.88"
MODEL_PATH="/models/base-7B"
TRAIN_FILES="/data/mixed/train.parquet"
VAL_FILES="/data/mixed/val.parquet"
TACO_RATIO=0.4    # 40% code execution
NQ_RATIO=0.3      # 30% search tasks
MATH_RATIO=0.3    # 30% math problems
LEARNING_RATE=5e-7
TRAIN_BATCH_SIZE=256
TOOL_SERVER_URL="http://172.26.81.88:30003"
RATE_LIMIT_PER_MINUTE=60000
TOOL_MAX_WORKERS=100
TOOL_REQUEST_INTERVAL=0.005
"""
OVERRIDES = f"""python3 -m verl.trainer.main_ppo \\
  --config-path=$(pwd)/config --config-name=mixed_dataset_grpo \\
  data.train_files=$TRAIN_FILES data.val_files=$VAL_FILES data.train_batch_size=$TRAIN_BATCH_SIZE \\
  +data.mixed_dataset.dataset_ratios.taco=$TACO_RATIO +data.mixed_dataset.dataset_ratios.nq=$NQ_RATIO \\
  +data.mixed_dataset.dataset_ratios.math=$MATH_RATIO \\
  +data.mixed_dataset.agent_mapping.taco=code_execution_agent +data.mixed_dataset.agent_mapping.nq=tool_agent \\
  +data.mixed_dataset.agent_mapping.math=code_execution_agent \\
  actor_rollout_ref.model.path=$MODEL_PATH actor_rollout_ref.actor.optim.lr=$LEARNING_RATE \\
  actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
  {TOOL}server_url=$TOOL_SERVER_URL {TOOL}max_workers=$TOOL_MAX_WORKERS \\
  {TOOL}rate_limit_per_minute=$RATE_LIMIT_PER_MINUTE {TOOL}request_interval=$TOOL_REQUEST_INTERVAL"""
DIRECT = f"{VARIABLES}\n{OVERRIDES}\n"
OVER_SSH = f"""{VARIABLES}
TRAIN_CMD="{OVERRIDES}"
ssh $MASTER_IP "tmux new-session -d -s verl_training '$TRAIN_CMD 2>&1 | tee train_1.log'"
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mixed_dataset_grpo.yaml").write_text(yaml.safe_dump(STABLE))
    return tmp_path


@pytest.mark.parametrize("script", [DIRECT, OVER_SSH], ids=["a command", "a command for tmux over ssh"])
def test_the_documents_script_becomes_a_mixture_with_its_agents_tools_and_limits(script, folder):
    (folder / "run_mixed_training.sh").write_text(script)
    draft = convert("verl", [folder / "run_mixed_training.sh"])
    config = validate(RunConfig, draft.tree())
    sources = config.data.sources
    assert {name: source.ratio for name, source in sources.items()} == {"taco": 0.4, "nq": 0.3, "math": 0.3}
    assert {name: source.agent.name for name, source in sources.items()} == {
        "taco": "code",
        "nq": "tool",
        "math": "code",
    }
    assert (config.data.by, str(config.data.evaluation_path)) == ("data_source", "/data/mixed/val.parquet")
    assert (config.model.name, config.learner.lr, config.rollout.tasks_per_step) == ("/models/base-7B", 5e-7, 256)
    tags = sources["taco"].agent.args
    assert (tags["code_start_tag"], tags["answer_end_tag"]) == ("<code>", "</answer>")
    assert (tags["result_start_tag"], tags["result_end_tag"]) == ("<output>", "</output>")
    (server,) = sources["math"].tools
    assert (server.server, server.protocol) == ("http://172.26.81.88:30003", "execute")
    assert (server.concurrency, server.limit.per_minute, server.retries, server.timeout) == (100, 12000.0, 3, 60.0)
    assert [(tool.name, tool.args) for tool in sources["nq"].tools] == [("search", {"corpus": "corpus.jsonl"})]
    assert config.data.agents["code_execution_agent"].name == "code"
    assert [reward.name for reward in config.rewards] == ["data_source"]
    why = {line.key: line.why for line in draft.lines}
    assert "for all processes together" in why[f"{TOOL}rate_limit_per_minute"]
    assert "arborl convert cluster" in why["MASTER_IP"]
    assert set(draft.source) <= draft.accounted()


def test_variables_alone_are_read_beside_the_stable_configuration(folder):
    """The document's custom model training: the variables are edited, and the overrides are made of them elsewhere."""
    (folder / "edits.sh").write_text(VARIABLES + "./run_mixed_training.sh\n")
    draft = convert("verl", [folder / "config" / "mixed_dataset_grpo.yaml", folder / "edits.sh"])
    config = validate(RunConfig, draft.tree())
    assert {name: source.ratio for name, source in config.data.sources.items()} == {"taco": 0.4, "nq": 0.3, "math": 0.3}
    assert (config.model.name, config.learner.lr, config.rollout.tasks_per_step) == ("/models/base-7B", 5e-7, 256)
    assert config.agent.name == "code"
    (server,) = config.tools
    assert (server.server, server.limit.per_minute, server.concurrency) == ("http://172.26.81.88:30003", 12000.0, 100)
    assert {"MODEL_PATH", "TACO_RATIO", "TOOL_MAX_WORKERS"} <= {line.key for line in draft.mapped}


def test_the_stable_configuration_alone_has_the_code_agent_and_their_default_tool_server(folder):
    config = validate(RunConfig, convert("verl", [folder / "config" / "mixed_dataset_grpo.yaml"]).tree())
    assert (config.agent.name, config.agent.args["result_start_tag"]) == ("code", "<output>")
    assert [tool.server for tool in config.tools] == ["http://127.0.0.1:30003"]


def test_an_example_that_nests_the_section_below_the_trainer_is_read_where_it_is(tmp_path):
    example = {
        "model_path": "/models/mine",
        "trainer": {"actor_rollout_ref": {"rollout": {"temperature": 0.7, "multi_turn": {
            "max_user_turns": 3, "max_assistant_turns": 5, "tool_config": {"server_url": "http://h:1", "timeout": 9},
        }}}},
        "agent_loops": {"code_execution_agent": {"_target_": "verl.experimental.agent_loop.CodeExecutionAgentLoop"}},
        "data": {"mixed_dataset": {"enabled": True, "dataset_ratios": {"taco": 0.5, "math": 0.5},
                                   "agent_mapping": {"taco": "code_execution_agent", "math": "code_execution_agent"}}},
        "validation": {"actor_rollout_ref": {"rollout": {"multi_turn": {"max_user_turns": 2}}}},
        "global_rate_limiter": {"lock_file": "/tmp/x.lock"},
        "logging": {"level": "INFO"},
    }  # fmt: skip
    (tmp_path / "example_config.yaml").write_text(yaml.safe_dump(example))
    draft = convert("verl", [tmp_path / "example_config.yaml"])
    config = validate(RunConfig, draft.tree())
    assert (config.model.name, config.sampling.temperature) == ("/models/mine", 0.7)
    assert config.data.sources["taco"].agent.args["max_tool_rounds"] == 3
    (server,) = config.data.sources["taco"].tools
    assert (server.server, server.timeout) == ("http://h:1", 9)
    lost = {line.key for line in draft.lines if line.kind == "lost"}
    assert lost == {"validation.actor_rollout_ref.rollout.multi_turn.max_user_turns"}
    assert "trainer.actor_rollout_ref.rollout.temperature" in draft.accounted()


def test_an_agent_of_ones_own_takes_the_place_of_a_loop(folder):
    own = {**STABLE, "agent_loops": {"custom_agent": {"_target_": "your.custom.AgentLoop"}}}
    (folder / "config" / "mixed_dataset_grpo.yaml").write_text(yaml.safe_dump(own))
    (folder / "run.sh").write_text(DIRECT.replace("agent_mapping.math=code_execution", "agent_mapping.math=custom"))
    with pytest.raises(ConfigError, match=r"custom_agent.*--use custom_agent=package\.module:Class"):
        convert("verl", [folder / "run.sh"])
    draft = convert("verl", [folder / "run.sh"], {"custom_agent": "arborl.agents.chat_agents:ChatAgent"})
    config = validate(RunConfig, draft.tree())
    assert config.data.sources["math"].agent.name == "arborl.agents.chat_agents:ChatAgent"
    assert config.data.agents["custom_agent"].name == "arborl.agents.chat_agents:ChatAgent"
    assert config.data.sources["taco"].agent.name == "code"


def test_a_source_that_calls_tools_which_nothing_names_is_refused(folder):
    script = DIRECT.replace("agent_mapping.math=code_execution_agent", "agent_mapping.math=tool_agent")
    (folder / "run.sh").write_text(script)
    with pytest.raises(ConfigError, match=r"agent_mapping\.math=.*nothing says which.*SCRIPT TOOLS\.yaml"):
        convert("verl", [folder / "run.sh"])


@pytest.mark.parametrize(
    "text",
    [
        "echo hello\n",
        VARIABLES,  # no word of the trainer
        'MODEL_PATH=/m\necho "python3 -m verl.trainer.main_ppo"\n',  # and no rows
        "python3 -m verl.trainer.main_ppo\n",
        "MASTER_IP=10.0.0.1\nray start --head\n",
    ],
)
def test_a_script_that_starts_no_training_is_refused_with_what_was_looked_for(text, tmp_path):
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(ConfigError, match=r"starts no training of verl.*main_ppo.*MODEL_PATH and TRAIN_FILES"):
        convert("verl", [tmp_path / "run.sh"])


def test_the_converted_mixture_passes_the_documented_check(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "run_mixed_training.sh").write_text(DIRECT)
    done = CliRunner().invoke(app, ["convert", "verl", "run_mixed_training.sh", "--out", "run.yaml"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(
        app, ["train", "run.yaml", "model=seedling", "trainer.steps=1", "--stub", "output_dir=out"]
    )
    assert done.exit_code == 0, done.output
    line = json.loads((folder / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {f"data/{name}/share" for name in ("taco", "nq", "math")} <= line.keys()


# ------------------------------------------------------------------------------------------------ the cluster

CLUSTER = """#!/bin/bash
MASTER_IP="172.26.81.88"
WORKER_NODES=(
    "172.26.81.89"
    "172.26.81.90"
)
CONDA_ENV="verl"
WANDB_DIR="/data/wandb"
CONDA_PATH="/opt/miniconda3/bin/activate"
RAY_TEMP_DIR="/data/ray"
RAY_DASHBOARD_PORT=8266
export WANDB_API_KEY=abcdef
SSH_OPTIONS="-o StrictHostKeyChecking=no"
setup() {
  ssh $MASTER_IP "tmux new-session -d -s head 'ray start --head --port=6380 --dashboard-port=$RAY_DASHBOARD_PORT'"
  for i in "${!WORKER_NODES[@]}"; do
    ssh ${WORKER_NODES[$i]} "tmux new-session -d -s node$i 'ray start --address=$MASTER_IP:6380'"
  done
}
case "$1" in
  setup) setup ;;
  status) ssh $MASTER_IP 'ray status' ;;
esac
"""


def test_the_script_that_starts_a_cluster_becomes_a_file_of_arborl_cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup_cluster.sh").write_text(CLUSTER)
    done = CliRunner().invoke(app, ["convert", "cluster", "setup_cluster.sh", "--out", "cluster.yaml"])
    assert done.exit_code == 0, done.output
    assert "abcdef" not in done.output + (tmp_path / "cluster.yaml").read_text()
    spec = read_cluster_spec(tmp_path / "cluster.yaml")
    assert [host.address for host in spec.hosts] == ["172.26.81.88", "172.26.81.89", "172.26.81.90"]
    assert (spec.python, spec.temp) == ("/opt/miniconda3/envs/verl/bin/python", "/data/ray")
    assert (spec.ports.dashboard, spec.ports.gcs) == (8266, 6380)
    assert (spec.env, spec.secrets) == ({"WANDB_DIR": "/data/wandb"}, ("WANDB_API_KEY",))
    assert "SSH_OPTIONS" in done.output


def test_commands_of_ray_are_read_too(tmp_path):
    head = "--num-cpus=16 --dashboard-port=8265 --dashboard-host=0.0.0.0 --dashboard-agent-listen-port=59323"
    (tmp_path / "a.sh").write_text(
        f"ray start --head --node-ip-address=10.0.0.1 {head}\n"
        "ray start  --address=10.0.0.1:6379 --node-ip-address=10.0.0.2 --num-gpus=8\n"
    )
    draft = convert_cluster([tmp_path / "a.sh"])
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(draft.tree()))
    spec = read_cluster_spec(tmp_path / "c.yaml")
    assert (spec.head.address, spec.head.num_cpus, spec.num_gpus) == ("10.0.0.1", 16, 8)
    assert [host.address for host in spec.workers] == ["10.0.0.2"]
    assert (spec.ports.agent, spec.ports.gcs) == (59323, 6379)
    assert [line.key for line in draft.lines if line.kind == "lost"] == ["ray start --head --dashboard-host"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo hello", "names no head of a cluster. Looked for the variables MASTER_IP"),
        ("MASTER_IP=$(hostname)", "names no head of a cluster"),
        ("MASTER_IP=10.0.0.1\nWORKER_NODES=(10.0.0.1)", "10.0.0.1 is named twice"),
        ("MASTER_IP=10.0.0.1\nRAY_TEMP_DIR=tmp", "temp=tmp must be an absolute path"),
    ],
)
def test_a_cluster_that_cannot_be_started_is_refused(text, why, tmp_path):
    (tmp_path / "a.sh").write_text(text)
    with pytest.raises(ConfigError, match=why):
        convert_cluster([tmp_path / "a.sh"])


def test_a_conda_environment_without_the_path_of_conda_is_lost_with_what_to_write(tmp_path):
    (tmp_path / "a.sh").write_text("MASTER_IP=10.0.0.1\nCONDA_ENV=verl\n")
    draft = convert_cluster([tmp_path / "a.sh"])
    assert "python" not in draft.settings
    assert any("write python=/PATH" in line.why for line in draft.lines if line.key == "CONDA_ENV")
