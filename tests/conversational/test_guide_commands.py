"""Blocks 33 to 46 of the StateSet guide: commands, troubleshooting and examples. `test_guide_blocks.py` has the others.

Substitutions: `stateset-agents` is `arborl`; runs have two or three small steps; the port is any free one.

What the guide uses and never defines is defined here: the agent's settings and the first arguments of the trainer in
block 40. Blocks 43 to 46 are comments that name files.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from arborl.stateset.core.agent import AgentConfig
from arborl.stateset.core.reward import CompositeReward, SafetyReward
from arborl.stateset.core.trajectory import ConversationTurn
from arborl.stateset.training.config import TrainingConfig
from guide_parts import HELLO, SMALL, TALK, bakery, config_of, stub
from small_runs import invoke

from arborl.conversational.agent_training import resolve_config
from arborl.stateset import HelpfulnessReward, MultiTurnAgent


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------------------------------ command line

QUICK = ["trainer.steps=2", "trainer.save_every=1", "rollout.tasks_per_step=2", "rollout.group_size=2",
         "evaluation.tasks=2", "track.gifs=0", "threads=1", "sampling.max_tokens=8"]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """The folder `checkpoints` of a finished run, beside its configuration."""
    home = tmp_path_factory.mktemp("cli")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert invoke("init", "--path", "./config.yaml").exit_code == 0
        done = invoke("train", "--config", "./config.yaml", "--save", "./checkpoints", *QUICK)
        assert done.exit_code == 0, done.output
    return home / "checkpoints"


@pytest.fixture
def beside_checkpoints(checkpoints, monkeypatch) -> Path:
    monkeypatch.chdir(checkpoints.parent)
    return checkpoints


def test_block_33_doctor():
    done = invoke("doctor", "--json")
    assert done.exit_code == 0, done.output
    checked = {row["name"] for row in json.loads(done.stdout)}
    assert {"python", "torch", "transformers", "extras", "gpu", "memory"} <= checked


def test_block_34_init(here):
    assert invoke("init", "--path", "./config.yaml").exit_code == 0
    assert yaml.safe_load((here / "config.yaml").read_text())["model"] == "seedling"


def test_block_35_train(beside_checkpoints):
    assert (beside_checkpoints / "summary.json").is_file()  # --config and --save
    done = invoke("train", "--config", "./config.yaml", "--stub", *QUICK)
    assert done.exit_code == 0, done.output
    more = ["trainer.steps=3", *QUICK[1:]]
    done = invoke("train", "--config", "./config.yaml", "--resume", "./checkpoints/step_2", *more)
    assert done.exit_code == 0, done.output
    assert json.loads((beside_checkpoints / "summary.json").read_text())["steps"] == 3
    refused = invoke("train", "--config", "./config.yaml", "--resume", "./checkpoints/step_1000")
    assert "step-001000" in refused.stderr


def test_block_36_evaluate(beside_checkpoints):
    done = invoke("evaluate", "--checkpoint", "./checkpoints/final", "--episodes", "2")
    assert "success" in done.stdout
    done = invoke("evaluate", "--checkpoint", "./checkpoints/final", "--message", "Hello!", "--json")
    assert [row["fields"]["question"] for row in json.loads(done.stdout)] == ["Hello!"]
    Path("test_prompts.json").write_text(json.dumps(["Good morning!", "Rye?"]))
    done = invoke("evaluate", "--checkpoint", "./checkpoints/final", "--input", "./test_prompts.json")
    assert [line for line in done.stdout.splitlines() if line.startswith("> ")] == ["> Good morning!", "> Rye?"]


@pytest.mark.slow
def test_block_37_serve(beside_checkpoints):
    import httpx

    words = ["serve", "--checkpoint", "./checkpoints/final", "--port", "0", "--api-key", "rye-and-wheat"]
    child = subprocess.Popen([sys.executable, "-m", "arborl", *words], stderr=subprocess.PIPE, text=True)
    try:
        line = child.stderr.readline()
        url = re.search(r"http://[\d.:]+", line)
        assert url, line + child.stderr.read()
        body = {"model": "final", "messages": HELLO, "max_tokens": 4}
        body["model"] = httpx.get(f"{url[0]}/v1/models", headers={"x-api-key": "rye-and-wheat"}).json()["data"][0]["id"]
        ask = {"url": f"{url[0]}/v1/chat/completions", "json": body, "timeout": 60}
        assert httpx.post(**ask).status_code == 401
        reply = httpx.post(**ask, headers={"Authorization": "Bearer rye-and-wheat"})
        assert isinstance(reply.json()["choices"][0]["message"]["content"], str)
    finally:
        child.kill()
        child.wait()


# ------------------------------------------------------------------------------------------------ troubleshooting


def test_block_38_settings_against_too_little_memory():
    config = TrainingConfig()
    config.per_device_train_batch_size = 1
    config.gradient_accumulation_steps = 8
    config.use_lora = True
    config.max_completion_length = 32
    config.bf16 = True
    settings = config.run_settings(AgentConfig(max_new_tokens=64))
    assert (settings["rollout"]["tasks_per_step"], settings["sampling"]["max_tokens"]) == (8, 32)
    assert (settings["model"]["lora"]["rank"], settings["model"]["dtype"]) == (16, "bfloat16")


async def test_block_39_settings_against_instability():
    from arborl.stateset.training.gspo_trainer import GSPOConfig, train_with_gspo

    config = TrainingConfig()
    config.learning_rate = 1e-6
    config.num_generations = 4
    profile = "conservative"
    together = resolve_config(config, profile)
    assert (together.learning_rate, together.learning_rate_scale, together.num_generations) == (1e-6, 1.0, 4)
    assert together.kl_penalty == 0.02
    careful = resolve_config(GSPOConfig(beta=0.1), profile)
    assert (careful.algorithm, careful.clip_range_left, careful.kl_penalty) == ("gspo", 3e-4, 0.0)
    trained = await train_with_gspo(GSPOConfig(**SMALL, learning_rate=1e-6), stub(), bakery(), HelpfulnessReward())
    assert config_of(trained)["learner"]["lr"] == 1e-6


def test_block_40_settings_against_slowness():
    from arborl.stateset.training.distributed import DistributedTrainer

    agent_config = AgentConfig()
    agent_config.attn_implementation = "flash_attention_2"
    config = TrainingConfig()
    trainer = DistributedTrainer(MultiTurnAgent(agent_config), bakery(), config=config, num_gpus=4)
    config.per_device_train_batch_size = 4
    assert trainer.config.overrides == {"learner.strategy": "ddp", "learner.ranks": 4}


async def test_block_41_rewards_against_exploitation():
    from arborl.stateset.rewards import SimilarityAwareReward

    reward_fn = CompositeReward(
        [HelpfulnessReward(weight=0.5), SimilarityAwareReward(weight=0.2), SafetyReward(weight=0.3)]
    )
    texts = ("A wheat loaf costs three euros and is as fresh as the rye.", TALK[1].content)
    talks = [[*TALK, TALK[0], ConversationTurn(role="assistant", content=text)] for text in texts]
    new, repeated = [(await reward_fn.compute_reward(talk)).breakdown["similarity_aware"] for talk in talks]
    assert repeated < new
    config = TrainingConfig()
    config.kl_penalty = 0.1
    assert config.run_settings(AgentConfig())["algorithm"]["kl"] == {"coef": 0.1}


@pytest.mark.parametrize("way", ["logging", "variable"])
async def test_block_42_debug_lines_are_in_the_log_of_the_run(way, monkeypatch):
    if way == "logging":
        logging.basicConfig(level=logging.DEBUG)
        monkeypatch.setattr(logging.getLogger(), "level", logging.DEBUG)  # basicConfig does nothing a second time
    else:
        monkeypatch.setattr(os, "environ", os.environ.copy())
        os.environ["STATESET_DEBUG"] = "1"
    from arborl.track.run_log import RunLog

    with RunLog(Path("run.log")):
        logging.getLogger("arborl.test").debug("seen")
    assert "seen" in Path("run.log").read_text()


@pytest.mark.parametrize(
    ("number", "name"),
    enumerate(("customer_service_bot", "technical_support_agent", "sales_assistant", "custom_domain_agent"), 43),
)
def test_blocks_43_to_46_name_examples(number, name):
    """`tests/examples/test_examples.py` runs them."""
    text = (Path(__file__).parents[2] / "examples" / f"{name}.py").read_text()
    compile(text, name, "exec")
    assert "arborl" in text
